"""What a run has read: digests of its data, its user code and its models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from retrain.config import TrainConfig
from retrain.data import (
    ExampleOrder,
    digest_of,
    held_out_section,
    is_same_digest,
    load_examples,
    load_held_out,
    reads_file,
)
from retrain.runtime.text import list_some
from retrain.types import JsonObject


@dataclass
class RunInputs:
    """Digests as checkpoints and trainer_state.json have them; of what was edited during the run, all, joined by +."""

    data: str
    """Of the examples, in order; empty for those that are made on access."""
    code: dict[str, str]
    """Of the source files that the configuration names, as they were loaded."""
    models: dict[str, dict[str, str]]
    """By model and file."""
    held_out: str = ""
    """Of the held-out problems; empty without evaluations."""
    forced: list[str] = field(default_factory=list)
    """Options that --force-resume changed, with both values and the step; no digests."""
    project: str = field(default_factory=os.getcwd)
    """The folder that the run was started in, or continued in after that one was moved."""
    edited_at: int = 0
    """The step since which the run has trained with the same data, code, models and options."""

    def add_earlier(self, saved: JsonObject) -> list[str]:
        """Continue a run with what a checkpoint of it has recorded; return what was edited since, in sentences."""
        if os.path.lexists(project := saved.get("project", "")):
            self.project = project
        if not saved["progress"]["step"]:
            self.forced = []
            return []  # nothing was trained with it
        data, held_out = _recorded(saved)
        code, models = saved.get("code", {}), saved.get("models", {})
        is_edited = bool(self.forced) or _differs(data, self.data)
        is_edited |= any(_differs(code.get(name), digest) for name, digest in self.code.items())
        self.edited_at = saved["progress"]["step"] if is_edited else saved.get("edited_at", 0)
        self.forced = [*saved.get("forced", []), *self.forced]
        edits = []
        if _differs(data, self.data):
            edits.append(
                "the data has changed since the checkpoint: the number of examples is the same, but the examples or "
                "their order differ. The run continues with the current data."
            )
        if _differs(held_out, self.held_out):
            edits.append(
                "the held-out problems have changed since the checkpoint, so the evaluations before and after it are "
                "not compared."
            )
        edits += [
            f"the code of {name} has changed since the checkpoint. The run continues with the current code."
            for name, digest in self.code.items()
            if _differs(code.get(name), digest)
        ]
        self.data, self.held_out = _join(data, self.data), _join(held_out, self.held_out)
        self.code = {name: _join(code.get(name), digest) for name, digest in self.code.items()}
        for name, files in self.models.items():
            trained = models.get(name, {})
            self.models[name] = {file: _join(trained.get(file), digest) for file, digest in files.items()}
        return edits


def digest_file_of_data(config: TrainConfig) -> str:
    """The digest of training data from a file, as a run records it; "" if there is none."""
    if config.environment.provider or not reads_file(config.data.source) or not _is_file(config.data.path):
        return ""
    return ExampleOrder(load_examples(config.data), 0, config.training.max_examples).digest


def digest_file_of_held_out(config: TrainConfig) -> str:
    """The digest of held-out problems from a file, as a run records it; "" if there is none."""
    if config.environment.provider or not config.eval.every or not reads_file(config.held_out_source):
        return ""
    return digest_of(load_held_out(config)) if _is_file(held_out_section(config).path) else ""


def find_moved_files(saved: JsonObject, trained: TrainConfig, wanted: TrainConfig) -> set[str]:
    """Options that name another file with the content that was recorded: a project that was moved or copied."""
    (data, held_out), moved = _recorded(saved), set()
    if trained.data.path != wanted.data.path and _is_still(data, digest_file_of_data(wanted)):
        moved.add("data.path")
    if trained.eval.path != wanted.eval.path and _is_still(held_out, digest_file_of_held_out(wanted)):
        moved.add("eval.path")
    return moved


def _recorded(saved: JsonObject) -> tuple[str, str]:
    """The digests of the data and of the held-out problems; older checkpoints have other names for them."""
    return saved.get("data", saved.get("data_digest")) or "", saved.get("held_out", saved.get("held_out_digest")) or ""


def find_moved_models(
    saved: JsonObject, trained: TrainConfig, wanted: TrainConfig, digests: Mapping[str, Mapping[str, str]]
) -> set[str]:
    """Options that name another folder with the files of the model that was recorded."""
    names = {
        "model.model": (trained.model.model, wanted.model.model),
        "teaching.student_model": (trained.teaching.student_model, wanted.teaching.student_model),
    }
    recorded = {name: {file: latest(d) for file, d in files.items()} for name, files in saved.get("models", {}).items()}
    return {
        option
        for option, (before, now) in names.items()
        if before != now and recorded.get(before) and digests.get(now) == recorded[before]
    }


def find_changed_models(saved: JsonObject, digests: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Models whose files are not those that were last trained, by a checkpoint or trainer_state.json."""
    changed = []
    for name, trained in saved.get("models", {}).items():
        if (now := digests.get(name)) is None:
            continue
        files = sorted(file for file in trained.keys() | now.keys() if latest(trained.get(file)) != now.get(file))
        if files:
            changed.append(f"the model {name} has changed since: {list_some(files)}")
    return changed


def latest(digest: str | None) -> str | None:
    """The digest of the version that was used last."""
    return digest and digest.rpartition("+")[2]


def _is_file(path: str) -> bool:
    return Path(path).expanduser().is_file()


def _differs(earlier: str | None, now: str) -> bool:
    """Whether something was edited since it was recorded, if it was and is still used."""
    return bool(earlier and now) and not _is_still(earlier, now)


def _is_still(earlier: str | None, now: str) -> bool:
    return bool(earlier and now) and is_same_digest(latest(earlier) or "", now)


def _join(earlier: str | None, now: str) -> str:
    return f"{earlier}+{now}" if _differs(earlier, now) else earlier or now
