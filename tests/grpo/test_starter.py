"""The tree that `retrain grpo init` writes, and runs of it with the built-in model."""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
import yaml
from transformers import TrainerControl, TrainerState, TrainingArguments

from retrain.cli import run
from retrain.errors import ConfigError
from retrain.grpo import GRPOConfig, GRPOTrainer
from retrain.grpo.checks import choose_checkpoint, steps_if_finished
from retrain.grpo.compose import compose_settings
from retrain.grpo.rewards import NamedReward
from retrain.grpo.rows import load_rows
from retrain.grpo.run import SharedCheckpoints, build_trainer, describe_interrupt, describe_resume
from retrain.grpo.settings import RunSettings
from tests.cases import slow

ROOT = Path(__file__).parents[2]
SEED_KEYS = {
    "zero1": {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero_stage": 1,
    },
    "zero3": {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
}
# As the reference documentation has it, but for the indentation.
SNIPPET = """\
from hydra import compose, initialize
from trainers.grpo_config import GRPOConfig

# Initialize Hydra
with initialize(config_path="../configs"):
    cfg = compose(config_name="train",
                  overrides=["trainer=teacher_grpo"])

# Create GRPOConfig
config = GRPOConfig(
    output_dir=cfg.output_dir,
    num_train_epochs=cfg.num_train_epochs,
    per_device_train_batch_size=cfg.per_device_train_batch_size,
    num_generations=cfg.num_generations,
    temperature=cfg.temperature,
    beta=cfg.beta,
    learning_rate=cfg.learning_rate,
    max_probe_tokens=cfg.max_probe_tokens,
    degradation_penalty_multiplier=cfg.degradation_penalty_multiplier,
    efficiency_weight=cfg.efficiency_weight
)
print(type(config).__module__, config.max_probe_tokens, config.learning_rate, config.output_dir)
"""
MY_MODEL = """\
name: my_model
model_name_or_path: builtin:tiny

model_init_kwargs:
  torch_dtype: bfloat16
  use_cache: false
  attn_implementation: sdpa

tokenizer_kwargs:
  padding_side: left
  use_fast: true
"""
MY_DATASET = """\
dataset_id_or_path: my-org/my-dataset
train_split: train
val_split: validation

completion_only_training: true
artificial_epochs: 2

keep_columns:
  - text
  - ground_truth
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert run(["grpo", "init"]) == 0
    return tmp_path


def test_the_tree_has_the_documented_files(tree: Path) -> None:
    for name, keys in SEED_KEYS.items():
        content = yaml.safe_load((tree / "accelerate" / f"{name}.yaml").read_text())
        expected = {"compute_environment": "LOCAL_MACHINE", "deepspeed_config": keys, "distributed_type": "DEEPSPEED"}
        assert content == expected
    for script in ("launch.sh", "launch_with_server.sh"):
        assert os.access(tree / "scripts" / script, os.X_OK)
        assert subprocess.run(["bash", "-n", tree / "scripts" / script], check=False).returncode == 0
    for name in ("run/teacher_sft", "run/teacher_rcl", "run/tiny", "model/llama3_70b", "trainer/teacher_grpo"):
        assert (tree / "configs" / f"{name}.yaml").is_file()


def test_existing_files_are_never_overwritten(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "new" / "configs" / "run").mkdir(parents=True)
    (tree / "new" / "configs" / "run" / "tiny.yaml").write_text("mine: 1\n")
    assert run(["grpo", "init", "new"]) == 2
    assert "new/configs/run/tiny.yaml exists already.  Try: retrain grpo init another_folder" in capsys.readouterr().err
    assert [path.name for path in (tree / "new").rglob("*") if path.is_file()] == ["tiny.yaml"]
    (tree / "file").write_text("")
    assert run(["grpo", "init", "file"]) == 2
    assert run(["grpo", "init", "other/folder"]) == 0 and (tree / "other/folder/scripts/launch.sh").is_file()


@pytest.mark.filterwarnings("ignore")  # of Hydra, whose later versions want an argument that the document lacks
def test_the_documented_hydra_snippet_runs(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "scripts" / "snippet.py").write_text(SNIPPET)
    monkeypatch.syspath_prepend(tree)
    runpy.run_path("scripts/snippet.py", run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "retrain.grpo.config 50 1e-06 logs/train"


@pytest.mark.parametrize(
    ("name", "words", "key", "value"),
    [
        ("teacher_sft", ["learning_rate=5e-6"], "learning_rate", 5e-6),
        ("teacher_rcl", ["dataset_id_or_path=my/dataset", "num_generations=16"], "dataset_id_or_path", "my/dataset"),
        ("teacher_rcl", [], "adaptive_teaching", True),
        (
            "teacher_sft",
            ["model=llama3_70b", "per_device_train_batch_size=1"],
            "model_name_or_path",
            "meta-llama/Llama-3.3-70B-Instruct",
        ),
    ],
)
def test_the_documented_overrides_compose(tree: Path, name: str, words: list[str], key: str, value: object) -> None:
    assert compose_settings(tree / "configs" / "run" / f"{name}.yaml", words)[key] == value


def test_a_setting_can_be_shown(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    keys = "model_name_or_path,vllm_dtype,num_generations"
    assert run(["grpo", "--show", keys, "configs/run/teacher_rcl.yaml", "num_generations=16"]) == 0
    model, dtype, generations = capsys.readouterr().out.splitlines()
    assert Path(model).is_dir() and (dtype, generations) == ("", "16")


@pytest.mark.slow
def test_the_documented_model_and_data_files_train(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "configs" / "model" / "my_model.yaml").write_text(MY_MODEL)
    (tree / "configs" / "data" / "my_dataset.yaml").write_text(MY_DATASET)
    rows = datasets.Dataset.from_list(
        [{"text": f"{number}+1=?", "ground_truth": str(number + 1)} for number in range(8)]
    )
    datasets.DatasetDict({"train": rows, "validation": rows.select(range(2))}).save_to_disk("my-org/my-dataset")
    words = ["model=my_model", "data=my_dataset", "per_device_train_batch_size=8", "max_completion_length=8"]
    composed = compose_settings(tree / "configs/run/tiny.yaml", [*words, "reward_funcs=match", "lora_rank=4"])
    trainer = build_trainer(composed)
    assert isinstance(trainer, GRPOTrainer) and len(trainer.train_dataset) == 16
    assert trainer.train_dataset[0]["ground_truth"] == trainer.train_dataset[0]["answer"] == "1"
    assert str(trainer.model.dtype) == "torch.bfloat16" and not trainer.model.config.use_cache
    words = ["model=my_model", "data=my_dataset", "max_steps=1"]
    assert run(["grpo", "configs/run/teacher_sft.yaml", *words]) == 0
    assert "my_model on my-org/my-dataset: 8 prompts" in capsys.readouterr().out


@pytest.mark.slow
def test_tiny_trains_with_grpo(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    words = ["max_steps=2", "save_steps=2", "per_device_train_batch_size=16", "max_completion_length=24"]
    words += ["save_total_limit=1"]  # so that a resume deletes what it is resumed from
    Path("logs/tiny/base").mkdir(parents=True)
    Path("logs/tiny/base/model.safetensors").touch(mode=0o600)
    assert run(["grpo", "configs/run/tiny.yaml", *words, "max_val_examples=2", "max_train_examples=16"]) == 0
    shown = capsys.readouterr().out
    assert "tiny on arithmetic: 16 prompts" in shown
    last = shown.splitlines()[-1]
    assert re.fullmatch(r"Done: 2 steps, held-out reward \S+ before and \S+ after, logs in logs/tiny\.", last)
    assert Path("logs/tiny/adapter_model.safetensors").is_file()
    # Whoever may read the state may read the weights of the run, and of nothing else.
    modes = {path: path.stat().st_mode for path in Path("logs/tiny").rglob("*.safetensors")}
    assert modes.pop(Path("logs/tiny/base/model.safetensors")) & 0o777 == 0o600
    assert len(modes) == 2 and set(modes.values()) == {Path("logs/tiny/trainer_state.json").stat().st_mode}
    assert "earlier run" not in shown
    assert run(["status", "logs"]) == 0
    assert "logs/tiny: run, finished" in (listed := capsys.readouterr().out) and "2/2" in listed
    assert run(["grpo", "configs/run/tiny.yaml", *words, "max_val_examples=2", "max_train_examples=16"]) == 0
    shown = capsys.readouterr().out
    assert "Warning: logs/tiny already contains an earlier run" in shown and "resume_from_checkpoint=true" in shown
    # A checkpoint of an earlier and longer run, which that run did not replace.
    Path("logs/tiny/checkpoint-9").mkdir()
    Path("logs/tiny/checkpoint-9/trainer_state.json").write_text("{}")
    os.utime("logs/tiny/checkpoint-9/trainer_state.json", (1e9, 1e9))
    # If all were written within a second, transformers would delete those with the lowest numbers.
    os.utime("logs/tiny/checkpoint-9", (1e9, 1e9))
    words = [*words, "max_steps=4", "max_train_examples=16", "val_split=null"]
    assert run(["grpo", "configs/run/tiny.yaml", *words, "resume_from_checkpoint=true", "learning_rate=1e-5"]) == 0
    shown = capsys.readouterr().out
    assert "Resuming from logs/tiny/checkpoint-2 at step 2." in shown
    # The earlier run was evaluated, this one was not.
    assert "Done: 4 steps, logs in logs/tiny." in shown
    assert "Note: learning_rate=1e-05 has no effect: a resumed run restores the schedule" in shown
    assert "which has 0.002." in shown
    assert "Note: this run has 4 steps, and that of the checkpoint had 2: the cosine schedule now spans" in shown
    before = Path("logs/tiny/adapter_model.safetensors").read_bytes()
    assert run(["grpo", "configs/run/tiny.yaml", *words, "resume_from_checkpoint=true"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Nothing is left to train: the model in logs/tiny/checkpoint-4 has 4 steps.  To train lo")
    assert Path("logs/tiny/adapter_model.safetensors").read_bytes() == before
    logged = json.loads(Path("logs/tiny/trainer_state.json").read_text())["log_history"]
    assert next(row["learning_rate"] for row in logged if row["step"] == 4) > 1e-4


def test_a_checkpoint_that_transformers_has_deleted_is_not_looked_for(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    SharedCheckpoints().on_save(args, TrainerState(global_step=4), TrainerControl())


def test_the_checkpoint_written_last_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        choose_checkpoint(str(tmp_path), True)
    for step, written in ((2, 30), (10, 20), (9, 30), (11, 10)):
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.parent.mkdir()
        state.write_text("{}")
        os.utime(state, (written, written))
    (tmp_path / "checkpoint-12").mkdir()
    assert choose_checkpoint(str(tmp_path), True) == tmp_path / "checkpoint-9"
    # In a copy, the order of times is that of copying; what was logged tells which checkpoints are of one run.
    for step, name in ((2, "a"), (9, "b"), (10, "b"), (11, "a")):
        rows = [{"step": done, "loss": f"{name}{done}"} for done in range(1, step + 1)]
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        times = state.stat().st_mtime
        state.write_text(json.dumps({"log_history": rows}))
        os.utime(state, (times, times))
    assert choose_checkpoint(str(tmp_path), True) == tmp_path / "checkpoint-10"
    for wanted in ("elsewhere", str(tmp_path / "checkpoint-12")):
        with pytest.raises(
            ConfigError, match=f"{wanted}'?: there is no checkpoint.  Try: a folder checkpoint-N, or tr"
        ):
            choose_checkpoint(str(tmp_path), wanted)
    for step in (9, 12):
        (tmp_path / f"checkpoint-{step}" / "adapter_model.safetensors").touch()
    assert choose_checkpoint(str(tmp_path), str(tmp_path / "checkpoint-9")) == tmp_path / "checkpoint-9"
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text('{"log_history": [')
    for step in (9, 12):
        with pytest.raises(ConfigError, match=rf"checkpoint-{step}/trainer_state.json cannot be read: .*Try: another"):
            choose_checkpoint(str(tmp_path), str(tmp_path / f"checkpoint-{step}"))
    assert choose_checkpoint(str(tmp_path), False) is choose_checkpoint(str(tmp_path), None) is None


def test_a_run_of_epochs_is_finished_after_them(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 8, "epoch": 2.0, "max_steps": 8}')
    run = RunSettings()
    found = [steps_if_finished(tmp_path, run, {"num_train_epochs": epochs}) for epochs in (1.5, 2, 2.5)]
    assert found == [8, 8, 0] and steps_if_finished(tmp_path, run, {}) == 0
    for kind, steps in (("sft", 0), ("grpo", 8)):
        repeated = RunSettings(artificial_epochs=2, trainer_type=kind)
        assert steps_if_finished(tmp_path, repeated, {"num_train_epochs": 2}) == steps
    assert [steps_if_finished(tmp_path, run, {"max_steps": steps}) for steps in (7, 8, 9)] == [8, 8, 0]
    assert steps_if_finished(tmp_path / "none", run, {"max_steps": 1}) == 0


def test_more_epochs_under_a_schedule_are_noted(tmp_path: Path) -> None:
    state = {"global_step": 8, "epoch": 2.0, "max_steps": 8}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    args = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "lr_scheduler_type": "cosine"}
    for epochs, is_said in ((2, False), (4, True)):
        lines = list(describe_resume(tmp_path, TrainingArguments(num_train_epochs=epochs, **args)))
        assert any("this run has 16 steps, and that of the checkpoint had 8" in line for line in lines) == is_said


def test_a_checkpoint_of_weights_only_says_what_starts_anew(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True)
    (line,) = describe_resume(tmp_path, args)
    assert line.startswith("Warning: ") and "schedule and the random numbers start anew" in line
    (tmp_path / "global_step8").mkdir()
    assert not list(describe_resume(tmp_path, args))


def test_checkpoints_of_an_earlier_run_are_not_those_of_an_interrupted_one(tmp_path: Path) -> None:
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text("{}")
    os.utime(state, (1e9, 1e9))
    assert "before the first checkpoint" in describe_interrupt(str(tmp_path), 1, 2e9, None)
    resumed = tmp_path / "checkpoint-4"
    assert f"resume_from_checkpoint={resumed}" in describe_interrupt(str(tmp_path), 5, 2e9, resumed)
    assert "resume_from_checkpoint=true" in describe_interrupt(str(tmp_path), 5, 1e9, None)


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_resume_it(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    seen = []

    def score(completions: list[Any], **columns: Any) -> list[float]:
        seen.append(len(completions))
        if len(seen) > 2:
            raise KeyboardInterrupt
        return [float(len(str(one)) % 2) for one in completions]

    # By name it would be looked up as an attribute of the package, which another test may have imported anew.
    monkeypatch.setattr(import_module("retrain.grpo.run"), "load_rewards", lambda names: [score])
    words = ["max_steps=4", "save_steps=1", "per_device_train_batch_size=4", "num_generations=4", "val_split=null"]
    code = run(["grpo", "configs/run/tiny.yaml", *words, "max_completion_length=8", "max_train_examples=8"])
    assert code == 130
    line = (
        "Stopped at step 2.  To resume from logs/tiny/checkpoint-2: the same command with resume_from_checkpoint=true"
    )
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_teacher_sft_trains_on_completions_only(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    words = ["completion_only_training=true", "artificial_epochs=2", "max_train_examples=128", "learning_rate=1e-3"]
    assert run(["grpo", "configs/run/teacher_sft.yaml", *words, "max_val_examples=16"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(
        r"Done: 16 steps, held-out loss (\S+) before and (\S+) after, logs in logs/teacher_sft\.", last
    )
    assert found and float(found[2]) < float(found[1])
    assert Path("logs/teacher_sft/model.safetensors").is_file()


def test_rows_of_every_form_are_trained_on(tmp_path: Path) -> None:
    def convert(row: dict[str, object], **settings: object) -> dict[str, object]:
        datasets.Dataset.from_list([row]).to_json(tmp_path / "rows.jsonl")
        data = RunSettings(dataset_id_or_path=str(tmp_path / "rows.jsonl"), **settings)  # type: ignore[arg-type]
        return load_rows(data, "train", None, is_sft=True)[0]

    asked, answered = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}
    both = {"prompt": [asked], "completion": [answered]}
    assert convert({"question": "2 + 2", "answer": 4}) == both
    assert convert({"prompt": [asked], "completion": [answered]}) == both
    assert convert({"messages": [asked, answered]}) == both
    assert convert({"text": "2 + 2 = 4"}) == {"text": "2 + 2 = 4"}
    assert convert({"text": "2 + 2", "ground_truth": "4"}, completion_only_training=True) == both


@pytest.mark.parametrize("starts", slow(True, False))
def test_a_server_is_started_on_the_first_gpus_and_stopped(tree: Path, starts: bool) -> None:
    """With a stand-in for `python`: a web server for vLLM, and a trainer that only prints its arguments."""
    server = f"{sys.executable} -m http.server --bind 127.0.0.1 --directory web $VLLM_PORT" if starts else "false"
    (tree / "web" / "health").mkdir(parents=True)
    (tree / "bin").mkdir()
    (tree / "bin" / "python").write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in\n'
        f'  *scripts.vllm_serve*) echo "server $CUDA_VISIBLE_DEVICES $*" >&2; exec {server};;\n'
        '  *accelerate*) echo "trainer $CUDA_VISIBLE_DEVICES $*";;\n'
        '  *"import deepspeed"*) ;;\n'
        f'  *) exec {sys.executable} "$@";;\n'
        "esac\n"
    )
    (tree / "bin" / "python").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "PATH": f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "VLLM_PORT": port,
    }
    words = ["2", "2", "configs/run/teacher_rcl.yaml", "vllm_max_model_len=128", "temperature=0.8"]
    done = subprocess.run(
        ["scripts/launch_with_server.sh", *words], env=environment, capture_output=True, text=True, check=False
    )
    started = (tree / "logs" / "vllm.log").read_text().splitlines()[0]
    assert started.startswith("server 4,5 ") and "--tensor_parallel_size 2" in started
    assert "builtin/tiny --max_model_len 128" in started
    if not starts:
        assert done.returncode == 1 and "The vLLM server did not start" in done.stderr and not done.stdout
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trainer 6,7 ") and "--num_processes 2" in done.stdout
    assert done.stdout.rstrip().endswith(f"temperature=0.8 use_vllm_server=true vllm_host=127.0.0.1 vllm_port={port}")
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(port))) != 0, "the server is stopped"


def launched(tree: Path, stand_in: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the starter with a `python` that begins with these lines."""
    (tree / "bin").mkdir()
    (tree / "bin" / "python").write_text(f'#!/usr/bin/env bash\n{stand_in}\nexec {sys.executable} "$@"\n')
    (tree / "bin" / "python").chmod(0o755)
    path = f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)


def test_more_processes_than_gpus_are_refused(tree: Path) -> None:
    one_gpu = "[[ $* == *device_count* ]] && echo 1 && exit"
    done = launched(tree, one_gpu, "scripts/launch.sh", "2", "configs/run/tiny.yaml")
    assert done.returncode == 2 and not done.stdout
    assert "2 processes, GPUs here: 1.  Try: scripts/launch.sh 1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [["launch.sh", "1"], ["launch_with_server.sh", "1", "1"]])
def test_a_missing_deepspeed_is_said_before_anything_starts(tree: Path, command: list[str]) -> None:
    name, *counts = command
    without = '[[ $* == *"import deepspeed"* ]] && exit 1'
    done = launched(tree, without, f"scripts/{name}", *counts, "configs/run/tiny.yaml")
    assert done.returncode == 2 and not done.stdout and not (tree / "logs").exists()
    assert "needs DeepSpeed" in done.stderr and "ACCELERATE_CONFIG=none" in done.stderr


def test_a_named_reward_scores_texts_and_messages() -> None:
    reward = NamedReward("match")
    try:
        completions = [r"\boxed{4}", [{"role": "assistant", "content": r"So \boxed{42}"}], "nothing"]
        assert reward(completions=completions, answer=[4, "By hand.\n#### 42", "1"]) == [1.0, 1.0, 0.0]
    finally:
        reward.close()


def test_the_starter_names_only_arguments_that_exist(tree: Path) -> None:
    settings = yaml.safe_load((tree / "configs" / "trainer" / "teacher_grpo.yaml").read_text())
    del settings["trainer_type"]
    assert GRPOConfig(output_dir="logs", use_cpu=True, bf16=False, **settings).adaptive_teaching


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_processes_end_when_their_launcher_is_killed(tree: Path) -> None:
    # On the CPU: two processes would need two GPUs.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    changes = {"PATH": path, "ACCELERATE_CONFIG": "none", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = ["max_steps=1000", "val_split=null", "save_steps=1", "per_device_train_batch_size=8", "num_generations=4"]
    launcher = subprocess.Popen(
        ["scripts/launch.sh", "2", "configs/run/tiny.yaml", *words, "max_completion_length=8", "logging_steps=1"],
        env=os.environ | changes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not Path("logs/tiny/checkpoint-2").exists():
            assert launcher.poll() is None
            time.sleep(0.2)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [rank for rank in ranks if "retrain" in rank.cmdline() and "grpo" in rank.cmdline()]
        assert len(ranks) == 2
    finally:
        launcher.kill()
        launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
