"""Whole runs with a student: the built-in model's, random ones', cut and resumed, and those that are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.assemble import Overrides
from retrain.backends import FrozenModel
from retrain.backends.local import LocalBackend
from retrain.backends.local import build as build_local
from retrain.config import TrainConfig, load_config
from retrain.errors import ConfigError
from retrain.testing import ScriptedEngine
from retrain.types import Datum

from .runs import fake_config, rows, rows_without_times, run_command, train_quietly
from .tiny import write_model, write_tokenizer

METRICS = ("student_accuracy", "baseline_accuracy", "improvement_rate", "degradation_rate", "teaching_length")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), gain=1.5, layers=1))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family, with a tokenizer that writes prompts in another way."""
    folder = write_model(tmp_path_factory.mktemp("other"), "llama", gain=1.5, layers=1)
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    return write_tokenizer(folder, template)


def config_for(model: Path | str, folder: Path, **overrides: Any) -> TrainConfig:
    """Four short steps over few problems, so that questions come again; overrides are `section__key`."""
    small: dict[str, Any] = {
        "backend.devices": "cpu",
        "backend.adapter_path": str(folder / "adapter"),
        "model.model": str(model),
        "model.lora_rank": 4,
        "data.source": "arithmetic",
        "training.seed": 3,
        "training.max_steps": 4,
        "training.batch_size": 3,
        "training.group_size": 4,
        "training.max_tokens": 8,
        "training.max_examples": 5,
        "training.temperature": 1.0,
        "training.lr": 1e-2,
        "training.save_every": 2,
        "reward.type": "custom",
        "reward.custom_module": "e2e.scores",
        "reward.custom_function": "score_length",
        "reward.workers": 1,
        "algorithm.advantage_mode": "grpo",
        "teaching.enabled": True,
        "teaching.max_probe_tokens": 6,
        "teaching.student_diagnostic_template": "{question}",
        "teaching.teacher_adaptive_template": "{question} {approach}",
        "teaching.student_with_teaching_template": "{question} {teaching}",
        "logging.log_dir": str(folder / "logs"),
    }
    return load_config(None, small | {key.replace("__", "."): value for key, value in overrides.items()})


def test_a_run_trains_the_teaching_and_logs_the_student(model: Path, tmp_path: Path) -> None:
    seen: list[list[Datum]] = []

    def build(*given: Any) -> LocalBackend:
        backend = build_local(*given)
        assert isinstance(backend, LocalBackend)
        step = backend.learner.step

        def spy(datums: list[Datum], *rest: Any, **more: Any) -> Any:
            seen.append(list(datums))
            return step(datums, *rest, **more)

        backend.learner.step = spy  # type: ignore[method-assign]
        return backend

    config = config_for(model, tmp_path, eval__every=2, eval__max_examples=4)
    _, printed = train_quietly(config, overrides=Overrides(backend=build))
    assert "with the adapter off." in printed
    logs = tmp_path / "logs"
    for row in rows(logs):
        assert all(0 <= row[name] <= (8 if name == "teaching_length" else 1) for name in METRICS)
        assert row["student_accuracy"] == row["correct_rate"]
        if row["step"] % 2 == 0:
            assert row["eval_pass_at_1"] == row["eval_student_accuracy"]
    # The student is frozen and its draws are seeded: alone it does the same at every evaluation.
    evaluations = rows(logs, "eval.jsonl")
    assert len({row["eval_baseline_accuracy"] for row in evaluations}) == 1 and len(evaluations) == 3
    generations = rows(logs, "emergence/generations.jsonl")
    texts = {(row["step"], row["completion"]) for row in generations}
    assert any(seen)
    for step, datums in enumerate(seen):
        for datum in (datum for datum in datums if datum.check_T is None):
            prompt = "".join(map(chr, datum.prompt_ids))
            taught = "".join(chr(id) for id in datum.completion_ids_T if id > 2)
            assert (step, taught) in texts and datum.mask_T.all()
            asked = {(row["transcript"][0]["content"], row["transcript"][2]["content"]) for row in generations}
            assert prompt.removesuffix("=") in {f"{question} {probe}" for question, probe in asked}
    for row in generations:
        roles = [message["role"] for message in row["transcript"]]
        assert roles == ["question", "student alone", "student probed", "teacher", "student taught"]
        assert row["transcript"][3]["content"] == row["completion"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["other", "base", "parts", "split", "whole"])
def test_a_resumed_run_is_equal_to_the_bit(kind: str, model: Path, other: Path, tmp_path: Path) -> None:
    """The run that was never cut remembers what the resumed one has forgotten; questions come again in both."""
    own: dict[str, Any] = {
        "base": {},
        "other": {"teaching__student_model": str(other)},
        "split": {"backend__devices": "cpu,cpu"},
        "whole": {"model__lora_rank": 0},
        "parts": {"training__prompts_per_sampling": 2},
    }[kind] | {"training__max_steps": 3}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    train_quietly(config_for(model, whole, **own))
    train_quietly(config_for(model, cut, **(own | {"training__max_steps": 2})))
    train_quietly(config_for(model, cut, resume__from=str(cut / "logs"), **own))
    for name in ("metrics.jsonl", "emergence/generations.jsonl"):
        assert rows_without_times(whole / "logs", name) == rows_without_times(cut / "logs", name)


@pytest.mark.slow
def test_another_student_reads_with_its_own_tokenizer(model: Path, other: Path, tmp_path: Path) -> None:
    _, printed = train_quietly(config_for(model, tmp_path, training__max_steps=1, teaching__student_model=str(other)))
    assert f"Loading student: {other} on cpu..." in printed
    train_quietly(config_for(model, tmp_path, training__max_steps=1, logging__log_dir=str(tmp_path / "own")))
    probes = [
        {message["transcript"][2]["content"] for message in rows(tmp_path / name, "emergence/generations.jsonl")}
        for name in ("logs", "own")
    ]
    assert probes[0] != probes[1]


@pytest.mark.slow
def test_a_relative_student_folder_is_saved_as_an_absolute_path(
    model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(other.parent)
    train_quietly(config_for(model, tmp_path, training__max_steps=1, teaching__student_model=other.name))
    stored = load_config(tmp_path / "logs" / "config.toml")
    assert stored.teaching.student_model == str(other)


def test_a_student_that_cannot_be_loaded_is_wrong_input(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(config_for(model, tmp_path, teaching__student_model=str(tmp_path / "nothing"))) == 2
    assert "[teaching] student_model" in "".join(capfd.readouterr())


def test_a_backend_that_lends_no_student_is_rejected(model: Path, tmp_path: Path) -> None:
    config = fake_config(model, tmp_path, teaching__enabled=True, algorithm__advantage_mode="grpo")
    with pytest.raises(ConfigError, match=r"provides a frozen model, and e2e\.fakes\.build does not"):
        train_quietly(config)


def test_templates_that_fill_the_context_are_rejected_before_anything_is_sampled(model: Path, tmp_path: Path) -> None:
    config = config_for(model, tmp_path, teaching__student_with_teaching_template="x" * 300 + "{question} {teaching}")
    with pytest.raises(ConfigError, match=r"the taught student reads up to \d+ .* do not fit its context of 256"):
        train_quietly(config)
    assert not (tmp_path / "logs" / "emergence" / "generations.jsonl").exists()


@pytest.mark.slow
def test_the_built_in_templates_run(model: Path, tmp_path: Path) -> None:
    built_in = {
        f"teaching__{name}_template": "" for name in ("student_diagnostic", "teacher_adaptive", "student_with_teaching")
    }
    larger = tmp_path / "larger"
    settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1024}
    larger.mkdir()
    for file in model.iterdir():
        (larger / file.name).write_bytes(file.read_bytes())
    (larger / "config.json").write_text(json.dumps(settings))
    train_quietly(config_for(larger, tmp_path, training__max_steps=1, **built_in))
    assert rows(tmp_path / "logs")[0]["reward_errors"] == 0


class Parrot(ScriptedEngine):
    """A student that repeats what it was taught, and says nothing alone."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(lambda prompt, index, rng: tokenizer.decode(prompt).partition("=? ")[2])


@pytest.mark.slow
def test_the_embedded_teacher_learns_what_its_student_is_rewarded_for(tmp_path: Path) -> None:
    def build(*given: Any) -> LocalBackend:
        backend = build_local(*given)
        assert isinstance(backend, LocalBackend)
        backend.frozen = lambda config, tokenizer, *rest: FrozenModel(Parrot(tokenizer), 4096)  # type: ignore
        return backend

    config = config_for(
        "builtin:tiny",
        tmp_path,
        model__lora_rank=16,
        algorithm__transform_mode="none",
        training__max_steps=10,
        training__batch_size=6,
        training__group_size=8,
        training__max_tokens=40,
        training__max_examples=0,
        training__lr=2e-3,
        reward__custom_function="score_box",
    )
    train_quietly(config, overrides=Overrides(backend=build))
    metrics = rows(tmp_path / "logs")
    taught = [row["student_accuracy"] for row in metrics]
    assert np.mean(taught[-2:]) > np.mean(taught[:2]) + 0.15
    assert [row["baseline_accuracy"] for row in metrics] == 10 * [0.0]
