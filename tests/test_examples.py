"""Every file of examples/ runs: the TOML files for a step on the CPU, the script as it stands with small numbers."""

from __future__ import annotations

import importlib.util
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from retrain.cli import run
from retrain.config import load_config
from retrain.tracking.console import Console
from retrain.trainer import train
from tests.e2e.tiny import write_model, write_tokenizer
from tests.rewards.judge_server import JudgeServer, completion, refusal

FOLDER = Path(__file__).parents[1] / "examples"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
SMALL = {"training.max_steps": 1, "training.batch_size": 2, "training.group_size": 2, "training.max_tokens": 12}


def run_small(name: str, folder: Path, **overrides: Any) -> dict[str, Any]:
    """One small step of an example; returns its metrics."""
    own = {
        **SMALL,
        "training.seed": 1,
        "backend.adapter_path": str(folder / "adapter"),
        "logging.log_dir": str(folder / "logs"),
        "eval.every": 0,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    train(load_config(FOLDER / f"{name}.toml", own), console=Console(StringIO()))
    metrics: dict[str, Any] = json.loads((folder / "logs" / "metrics.jsonl").read_text())
    return metrics


def test_every_example_is_described_and_every_file_described_is_there() -> None:
    described = set(re.findall(r"^\| `(\S+)`", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert described == {path.name for path in FOLDER.iterdir() if path.suffix in (".toml", ".py")}
    for path in FOLDER.glob("*.toml"):
        load_config(path)


def test_arithmetic_runs(tmp_path: Path) -> None:
    assert run_small("arithmetic", tmp_path)["reward_errors"] == 0


def test_guess_number_runs_over_several_turns(tmp_path: Path) -> None:
    metrics = run_small("guess_number", tmp_path)
    assert 1 <= metrics["turns"] <= 4 and metrics["rollout_errors"] == 0
    (path,) = (tmp_path / "logs").rglob("generations.jsonl")
    (line, *_) = path.read_text().splitlines()
    assert "1..9?" in line


def test_calculator_runs_on_an_untrained_model(tmp_path: Path) -> None:
    model = write_tokenizer(write_model(tmp_path / "model"), TEMPLATE)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4096}))
    metrics = run_small("calculator", tmp_path, model__model=str(model), backend__devices="cpu")
    assert metrics["rollout_errors"] == 0 and metrics["env/calls"] == 0


def test_judge_runs_and_counts_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with JudgeServer(lambda body: completion("yes" if len(str(body)) % 2 else "no")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        metrics = run_small("judge", tmp_path, reward__judge_cache=str(tmp_path / "cache"), reward__workers=1)
    assert 2 <= metrics["judge_requests"] + metrics["judge_cached"] <= 5
    assert metrics["judge_prompt_tokens"] == 100 * metrics["judge_requests"]
    written = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert written and not any(b"sk-of-a-test" in path.read_bytes() for path in written)


def test_a_judge_that_rejects_the_key_ends_the_run_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with JudgeServer(lambda body: refusal(401, "Incorrect API key provided: sk-wrong")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        flags = ["--log-dir", str(tmp_path / "logs"), "--adapter-path", str(tmp_path / "adapter")]
        assert run([str(FOLDER / "judge.toml"), *flags]) == 2
    printed = "".join(capfd.readouterr())
    assert "401 Unauthorized" in printed and "sk-wrong" not in printed and "Loading tokenizer" not in printed


def script(name: str) -> Any:
    """A script of the folder as a module."""
    found = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_teaching_runs_with_the_student_that_its_script_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = script("teaching_student").main(["--out", str(tmp_path / "student"), "--steps", "2"])
    assert "step 1: loss" in capsys.readouterr().out
    metrics = run_small("teaching", tmp_path, teaching__student_model=str(student), eval__every=1, eval__max_examples=2)
    assert metrics["reward_errors"] == 0 and 0 < metrics["teaching_length"] <= 12
    assert {"student_accuracy", "baseline_accuracy", "eval_baseline_accuracy"} <= metrics.keys()


def test_the_plain_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    loop = script("rl_loop")
    flags = ["--steps", "2", "--batch", "2", "--group", "4", "--max-tokens", "24", "--held-out", "4"]
    history = loop.main(flags)
    assert len(history) == 2 and all(0 <= reward <= 1 for reward in history)
    assert "held-out after:" in capsys.readouterr().out


def test_the_problems_of_smollm2_are_those_that_its_script_writes_and_none_is_held_out_and_trained_on(
    tmp_path: Path,
) -> None:
    task = script("smollm2_task")
    task.main(tmp_path)
    pairs: dict[str, set[tuple[str, ...]]] = {}
    for name in ("train", "test"):
        written = (tmp_path / f"smollm2_{name}.jsonl").read_text()
        assert written == (FOLDER / f"smollm2_{name}.jsonl").read_text()
        rows = [json.loads(line) for line in written.splitlines()]
        assert all(task.score(f"It is {row['answer']}.", row["answer"]) for row in rows)
        words = [row["prompt"].removesuffix("? Answer with the number only.").split()[2:] for row in rows]
        pairs[name] = {(operation, *sorted((a, b))) for a, operation, b in words}
    assert not pairs["train"] & pairs["test"]
    assert task.score("7 + 5 = 12, not 13", "12") == 0 and task.score("no idea", "12") == 0


@pytest.mark.slow
def test_smollm2_arithmetic_runs_on_the_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    flags = ["--campaign-max-steps", "1", "--campaign.seeds", "[1]", "--batch-size", "2", "--group-size", "2"]
    flags += ["--model", "builtin:tiny", "--devices", "cpu", "--max-tokens", "8", "--eval-max-examples", "4"]
    assert run([str(FOLDER / "smollm2_arithmetic.toml"), "--log-dir", str(tmp_path / "c"), *flags]) == 0
    table = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert [record["condition"] for record in table["runs"]] == ["grpo+none", "maxrl+gtpo_sepa"]
    assert all(record["evaluation"]["eval_pass_at_1"] is not None for record in table["runs"])
