"""Launches a vLLM server for a run, monitors it, and stops it with the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from retrain.capacity.memory import SMALL_MICRO_BATCH, SPARE, TrainingCost, read_shape
from retrain.config import TrainConfig
from retrain.config.schema import Inference
from retrain.errors import ConfigError
from retrain.inference_engine import Progress
from retrain.inference_engine.http.engine import HttpEngine
from retrain.inference_engine.vllm import VLLM
from retrain.modeling.policy import Policy
from retrain.modeling.tokens import Tokenizer
from retrain.runtime.packages import find_vllm
from retrain.storage.logs import SERVER_LOG

SHOWN_LINES = 15
GIB = 2**30
CPU_CACHE, CPU_CACHE_BYTES = "VLLM_CPU_KVCACHE_SPACE", 2 * GIB
SUPERVISOR = Path(__file__).with_name("supervisor.py")
STOP_S = 30.0


@dataclass(frozen=True)
class Launch:
    """Command, environment and log file of a server."""

    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    log: Path


class LaunchedServer:
    """The server process."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("ab") as log:
            self.begins_at = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), *launch.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launch.environment},
                # Only the trainer receives Ctrl-C; it saves, unloads its adapter and stops the server.
                start_new_session=True,
            )

    def exit_reason(self) -> str:
        """Exit code and last log lines of a server that has exited; empty while it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        with self.launch.log.open("rb") as log:
            log.seek(self.begins_at)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        tail = "\n".join(f"  {line}" for line in lines[-SHOWN_LINES:]) or "  (nothing)"
        return (
            f"the vLLM server that this run started exited with code {code}. "
            f"The last lines of {self.launch.log}:\n{tail}"
        )

    def stop(self) -> None:
        """Stop the server and its child processes."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class LaunchedEngine(HttpEngine):
    """An engine that launches its server, and stops it on shutdown."""

    def __init__(
        self, launch: Launch, policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress
    ) -> None:
        own = inference.model_copy(update={"url": f"http://127.0.0.1:{launch.port}"})
        super().__init__(VLLM, policy, own, tokenizer, progress)
        self.server = LaunchedServer(launch)
        self.fleet.exit_reason = self.server.exit_reason
        self.fleet.remedy = f"see {launch.log}; a large model may need a longer wait_s"

    def shutdown(self) -> None:
        """Stop the server; its adapters need no unloading."""
        self.server.stop()
        super().shutdown()


def launch_engine(
    config: TrainConfig, policy: Policy, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
) -> LaunchedEngine:
    """Launch the configured server; returns its engine."""
    inference = config.inference
    device = choose_device(inference.launch_device, policy.device, torch.cuda.device_count())
    if device == str(policy.device) and device != "cpu":
        check_gpu_room(policy, config)
    log_file = Path(config.logging.log_dir).expanduser().absolute() / SERVER_LOG
    port = free_port()
    command = [*command_for(config, policy, device), "--port", str(port)]
    launch = Launch(command, environment_for(device), port, log_file)
    engine = LaunchedEngine(launch, policy, inference, tokenizer, progress)
    log(f"Starting a vLLM server on {device}, port {launch.port}; its log is {log_file}.")
    return engine


def command_for(config: TrainConfig, policy: Policy, device: str) -> list[str]:
    """`vllm serve` and its flags, without the port."""
    inference, model = config.inference, policy.peft.peft_config["default"]
    if policy.rank > VLLM.ranks[-1]:
        raise ConfigError(
            f"[model] lora_rank = {policy.rank} is more than vLLM supports.  Try: lora_rank = {VLLM.ranks[-1]}"
        )
    dtype = str(policy.dtype).removeprefix("torch.") if inference.launch_dtype == "auto" else inference.launch_dtype
    command = [find_vllm(), "serve", str(model.base_model_name_or_path), "--host", "127.0.0.1"]
    command += [
        "--enable-lora",
        "--max-lora-rank",
        str(VLLM.max_rank(policy.rank)),
        "--logprobs-mode",
        "processed_logprobs",
    ]
    command += ["--dtype", dtype, "--seed", str(config.training.seed % 2**31)]
    if inference.max_model_len:
        command += ["--max-model-len", str(inference.max_model_len)]
    share = inference.gpu_memory_utilization
    if device == "cpu":
        command += ["--enforce-eager"]
    # On a CPU it is a share of the machine's memory, which the server takes only if the user sets it.
    if device != "cpu" or share != Inference.model_fields["gpu_memory_utilization"].default:
        command += ["--gpu-memory-utilization", str(share)]
    elif CPU_CACHE not in os.environ:
        command += ["--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]
    return command


def environment_for(device: str) -> dict[str, str]:
    """Additional environment variables of the server."""
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        # Its processes connect through an address, even without a network.
        return variables | {"VLLM_HOST_IP": os.environ.get("VLLM_HOST_IP", "127.0.0.1")}
    number = int(device.removeprefix("cuda:"))
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return variables | {"CUDA_VISIBLE_DEVICES": visible[number] if visible else str(number)}


def choose_device(wanted: str, trains: torch.device, gpus: int) -> str:
    """Where the server runs: `cpu` or `cuda:N`."""
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return "cpu"
    if wanted == "auto":
        free = [f"cuda:{number}" for number in range(gpus) if torch.device("cuda", number) != trains]
        if free:
            return free[0]
        raise ConfigError(
            f'[inference] launch_device = "auto" finds no free GPU: the only one is used for training.  '
            f'Try: launch_device = "{trains}" and a gpu_memory_utilization that leaves room for training'
        )
    if int(wanted.removeprefix("cuda:")) >= gpus:
        raise ConfigError(f'[inference] launch_device = "{wanted}" does not exist: {gpus} GPUs found.')
    return wanted


def check_gpu_room(policy: Policy, config: TrainConfig) -> None:
    """Raise if a server on the training GPU leaves no room for training."""
    free, total = torch.cuda.mem_get_info(policy.device)
    shape = read_shape(policy.causal_lm.config.to_dict())
    tokens = max(SMALL_MICRO_BATCH, config.training.max_prompt_tokens + config.training.max_tokens)
    step = TrainingCost(shape, policy.rank, policy.dtype.itemsize).bytes(tokens, shape.layers) if shape else 0
    problem = problem_with_room(total, free, config.inference.gpu_memory_utilization, step + SPARE * total)
    if problem:
        raise ConfigError(f'[inference] launch_device = "{policy.device}" is also used for training, and {problem}')


def problem_with_room(total: float, free: float, share: float, step: float) -> str:
    """Why a server that takes `share` of a GPU leaves no room for a training step; empty if there is room."""
    left = free - share * total
    if left >= step:
        return ""
    most = int(100 * (free - step) / total) / 100
    hint = (
        f"Try: gpu_memory_utilization = {most}, or another launch_device" if most > 0 else "Try: another launch_device"
    )
    return (
        f"there is no room for both: of {total / GIB:.1f} GiB the trainer's model leaves {free / GIB:.1f}, the server "
        f"would take {share} × {total / GIB:.1f} = {share * total / GIB:.1f}, and a training step needs about "
        f"{step / GIB:.1f}.  {hint}"
    )


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
