"""The starter tree under `accelerate launch` on the CPU: DeepSpeed ZeRO-1, ZeRO-3 with offload, and plain processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from retrain.builtin import resolve_model
from retrain.cli import run

from .conftest import Prepare

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
# The other requirements of DeepSpeed are this environment's.
DEEPSPEED = ["deepspeed==0.19.8", "einops==0.8.2", "hjson==3.1.0", "ninja==1.13.2", "py-cpuinfo==9.0.0"]
INSTALLS = [["install", "--no-deps", *DEEPSPEED], ["install", "setuptools"]]
ROWS = 8
SHORT = ["max_steps=2", "save_steps=2", "max_train_examples=32", "max_val_examples=2"]
# Lengths differ within a group where few answers are right, so that there is a gradient from the first step on.
LENGTH = """\
def length(completions, **columns):
    return [len(completion[0]["content"]) / 10 for completion in completions]
"""
GRPO = ["max_completion_length=16", "reward_funcs=lengths:length", "warmup_steps=0", "learning_rate=1e-3"]
RUNS = {"teacher_sft": ["learning_rate=1e-3"], "tiny": GRPO, "teacher_rcl": [*GRPO, "max_probe_tokens=8"]}

# accelerate has no FSDP on the CPU: there it trains with DDP, whatever is asked for. So two CPUs pass for two GPUs.
FSDP = """\
import sys
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

start = PartialState.__init__


def start_as_gpus(self, *given, **others):
    start(self, *given, **others)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = start_as_gpus
torch.cuda.current_device = lambda: torch.device("cpu")

from datasets import Dataset
from retrain.grpo import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    sys.argv[1], use_cpu=True, bf16=False, report_to=[], max_steps=2, per_device_train_batch_size=4, num_generations=4,
    max_completion_length=8, beta=0.0, gradient_checkpointing=False, save_strategy="no",
)
rows = Dataset.from_dict({"prompt": [f"{number} + {number} =" for number in range(8)]})
trainer = GRPOTrainer("builtin:tiny", lambda completions, **_: [len(text) for text in completions], args, rows)
trainer.train()
print(type(trainer.model).__name__, trainer._reasons)
"""


@pytest.fixture(scope="module")
def environment(side_venv: Prepare, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose `python` has DeepSpeed; compiled kernels are kept for all tests."""
    python = Path(sys.executable) if importlib.util.find_spec("deepspeed") else side_venv("deepspeed", INSTALLS)
    return os.environ | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, sysconfig.get_path("purelib")))),
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions"))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert run(["grpo", "init"]) == 0
    (tmp_path / "lengths.py").write_text(LENGTH)
    return tmp_path


def launch(environment: dict[str, str], config: str, command: list[str]) -> str:
    """What a command prints; the command must end well."""
    done = subprocess.run(
        command, env=environment | {"ACCELERATE_CONFIG": config}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> float:
    """The held-out loss of teacher_sft with one process, all rows of a step in one batch."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(["grpo", "init", str(folder)]) == 0
    words = [*SHORT, *RUNS["teacher_sft"], f"per_device_train_batch_size={ROWS}", f"output_dir={folder / 'logs'}"]
    command = ["python", "-m", "retrain", "grpo", f"{folder}/configs/run/teacher_sft.yaml", *words]
    return held_out(launch(environment, "", command))


def held_out(printed: str) -> float:
    """The held-out loss or reward after the last step, which only the main process prints."""
    (last,) = re.findall(r"^Done: 2 steps, held-out \w+ \S+ before and (\S+) after", printed, re.MULTILINE)
    return float(last)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("zero", ["zero1", "zero3"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_under_zero(
    name: str, zero: str, processes: int, tree: Path, environment: dict[str, str], alone: float
) -> None:
    words = [*SHORT, *RUNS[name], f"per_device_train_batch_size={ROWS // processes}"]
    command = ["scripts/launch.sh", str(processes), f"configs/run/{name}.yaml", *words]
    found = held_out(launch(environment, f"accelerate/{zero}.yaml", command))
    output = tree / "logs" / name
    # One part of the optimizer's state per process.
    assert len(list((output / "checkpoint-2").glob("global_step2/*optim_states.pt"))) == processes
    if name == "tiny":
        trained = load_file(output / "adapter_model.safetensors")
        assert any(bool(value.any()) for key, value in trained.items() if "lora_B" in key)
        return
    trained = load_file(output / "model.safetensors")
    initial = load_file(Path(resolve_model("builtin:tiny")) / "model.safetensors")
    # DeepSpeed's file has the tied head as well.
    assert {key: trained[key].shape for key in initial} == {key: value.shape for key, value in initial.items()}
    assert any(not torch.equal(trained[key].float(), initial[key].float()) for key in initial)
    if name == "teacher_sft":
        assert found == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_without_deepspeed(
    name: str, tree: Path, environment: dict[str, str], alone: float
) -> None:
    words = [*SHORT, *RUNS[name], f"per_device_train_batch_size={ROWS // 2}"]
    found = held_out(launch(environment, "none", ["scripts/launch.sh", "2", f"configs/run/{name}.yaml", *words]))
    if name == "teacher_sft":
        assert found == pytest.approx(alone, abs=2e-3)


def test_settings_of_the_run_override_those_of_accelerate(
    tree: Path, environment: dict[str, str], alone: float
) -> None:
    words = [*SHORT, *RUNS["teacher_sft"], "gradient_accumulation_steps=2", "max_grad_norm=0.9"]
    command = ["scripts/launch.sh", "2", "configs/run/teacher_sft.yaml", *words, "per_device_train_batch_size=2"]
    assert held_out(launch(environment, "accelerate/zero1.yaml", command)) == pytest.approx(alone, abs=2e-3)


def test_weights_sharded_by_fsdp_are_sampled_by_trl(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(FSDP)
    options = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    options += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = ["python", "-m", "accelerate.commands.launch", *options, str(tmp_path / "script.py"), str(tmp_path)]
    printed = launch(environment | {"MASTER_PORT": "29577"}, "", command)
    # Both processes print, and their lines may mix.
    for part in ("FSDPQwen3ForCausalLM", "{'sampling': 'the weights are sharded (FSDP or ZeRO-3)'}"):
        assert printed.count(part) == 2


@pytest.mark.parametrize("words", [[], ["2"], ["x", "configs/run/tiny.yaml"], ["0", "configs/run/tiny.yaml"]])
def test_a_wrong_command_line_prints_the_usage(words: list[str], tree: Path, environment: dict[str, str]) -> None:
    for script in ("launch.sh", "launch_with_server.sh"):
        done = subprocess.run(
            [f"scripts/{script}", *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and f"Usage: scripts/{script} " in done.stderr
