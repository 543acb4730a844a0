#!/usr/bin/env bash
# Train with N processes on this machine, by `accelerate launch`:
#   scripts/launch.sh N configs/run/x.yaml key=value …
# ACCELERATE_CONFIG selects another configuration: accelerate/zero3.yaml, or none for plain data parallelism.
# With CHECK_ONLY=1, nothing is started.
set -euo pipefail
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "Usage: scripts/launch.sh N configs/run/x.yaml key=value …" >&2
  exit 2
fi
processes=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
config=${ACCELERATE_CONFIG:-$root/accelerate/zero1.yaml}
options=(--num_processes "$processes" --num_machines 1 --mixed_precision no --dynamo_backend no)
if [[ -z ${MASTER_PORT:-} ]]; then
  # A free port, so that several runs fit on one machine.
  MASTER_PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
fi
options+=(--main_process_port "$MASTER_PORT")
gpus=$(python -c 'import torch; print(torch.accelerator.device_count())')
if ((gpus == 0)); then
  export DS_ACCELERATOR=cpu
elif ((processes > gpus)); then
  echo "Each process needs a GPU: $processes processes, GPUs here: $gpus.  Try: scripts/launch.sh $gpus …, or CUDA_VISIBLE_DEVICES= scripts/launch.sh $processes … for the CPU" >&2
  exit 2
fi
if [[ $config != none ]] && grep -q DEEPSPEED "$config" && ! python -c 'import deepspeed' 2>/dev/null; then
  install=$(python -c 'from retrain.runtime.packages import install_command; print(install_command("deepspeed"))')
  echo "$config needs DeepSpeed.  Try: $install, or ACCELERATE_CONFIG=none for plain data parallelism" >&2
  exit 2
fi
if [[ -n ${CHECK_ONLY:-} ]]; then exit 0; fi
if [[ $config != none ]]; then
  options+=(--config_file "$config")
elif ((processes > 1)); then
  # On the CPU as well: with --cpu, accelerate starts a single process.
  options+=(--multi_gpu)
fi
# The processes end when this one, which becomes their launcher, is killed.
export RETRAIN_PARENT=$$
# The run decides about mixed precision: bf16=true or fp16=true.
exec python -m accelerate.commands.launch "${options[@]}" -m retrain grpo "$@"
