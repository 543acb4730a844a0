#!/usr/bin/env bash
# Start TRL's vLLM server (`trl vllm-serve`) on the first GPUs, train on the next ones, then stop the server:
#   scripts/launch_with_server.sh SERVER_GPUS TRAIN_GPUS configs/run/x.yaml key=value …
# VLLM_PORT is the server's port (8000), VLLM_WAIT the seconds to wait for it (600), VLLM_LOG its log (logs/vllm.log).
set -euo pipefail
if [[ $# -lt 3 || ! $1 =~ ^[1-9][0-9]*$ || ! $2 =~ ^[1-9][0-9]*$ ]]; then
  echo "Usage: scripts/launch_with_server.sh SERVER_GPUS TRAIN_GPUS configs/run/x.yaml key=value …" >&2
  exit 2
fi
server_gpus=$1 train_gpus=$2
shift 2
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
port=${VLLM_PORT:-8000} wait=${VLLM_WAIT:-600} log=${VLLM_LOG:-logs/vllm.log}
total=$((server_gpus + train_gpus))
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((total - 1)))}"
if ((${#gpus[@]} < total)); then
  echo "$total GPUs are needed, CUDA_VISIBLE_DEVICES lists ${#gpus[@]}." >&2
  exit 2
fi
join() { local IFS=,; echo "$*"; }
is_up() { python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null; }
if is_up; then
  echo "Port $port has a server already.  Try: VLLM_PORT=8001 scripts/launch_with_server.sh …" >&2
  exit 2
fi
# What the run needs is checked before the server loads its model, which takes minutes.
CHECK_ONLY=1 "$scripts/launch.sh" "$train_gpus" "$@"
settings=(model_name_or_path vllm_gpu_memory_utilization vllm_max_model_len vllm_dtype)
options=(--model --gpu_memory_utilization --max_model_len --dtype)
# The last lines: some packages print to stdout when they are imported.
mapfile -t values < <(python -m retrain grpo --show "$(join "${settings[@]}")" "$@" | tail -n ${#settings[@]})
if ((${#values[@]} != ${#settings[@]})); then exit 2; fi
command=(python -m trl.scripts.vllm_serve --tensor_parallel_size "$server_gpus" --port "$port")
for index in "${!values[@]}"; do
  if [[ -n ${values[index]} ]]; then command+=("${options[index]}" "${values[index]}"); fi
done
mkdir -p "$(dirname "$log")"
CUDA_VISIBLE_DEVICES=$(join "${gpus[@]:0:server_gpus}") "${command[@]}" >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true' EXIT
for ((second = 0; ; second++)); do
  if is_up; then break; fi
  if ! kill -0 "$server" 2>/dev/null || ((second >= wait)); then
    echo "The vLLM server did not start; the end of $log:" >&2
    tail -n 20 "$log" >&2
    exit 1
  fi
  sleep 1
done
CUDA_VISIBLE_DEVICES=$(join "${gpus[@]:server_gpus:train_gpus}") "$scripts/launch.sh" "$train_gpus" "$@" \
  use_vllm_server=true vllm_host=127.0.0.1 vllm_port="$port"
