"""Checkpoints: saved atomically, verified on load.

    log_dir/trainer_state.json                newest checkpoint and status of the run
    log_dir/checkpoints/step_000020/          checkpoint.json, adapter/ (PEFT layout), learner.safetensors

A checkpoint is written to a temporary folder and renamed, so a kill always leaves the last good one. Its manifest has
a digest of every file; a checkpoint that does not match is skipped for an older one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from retrain.errors import CheckpointError
from retrain.runtime.permissions import share_weights
from retrain.storage.publishing import publish_folder, why_kept
from retrain.types import JsonObject

MANIFEST = "checkpoint.json"
STATE_FILE = "trainer_state.json"
FORMAT = 1
NOTES = "notes.json"
_ADVICE = {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make it writable",
}


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint after `step` steps."""

    path: Path
    step: int
    state: JsonObject


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, log_dir: Path, keep: int, log: Callable[[str], None]) -> None:
        self.log_dir = log_dir
        self.folder = log_dir / "checkpoints"
        self.keep = keep
        self.log = log

    def save(self, step: int, state: JsonObject, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint after `step` steps; `write` fills its folder. Older ones beyond `keep` are deleted."""
        target = self.path_of(step)
        draft = self.folder / f".writing_{target.name}"
        try:
            _remove(draft)
            draft.mkdir(parents=True)
            write(draft)
            digests = {str(f.relative_to(draft)): digest(f) for f in sorted(draft.rglob("*")) if f.is_file()}
            manifest = {"format": FORMAT, "step": step, "state": state, "files": digests}
            manifest["seal"] = _seal(manifest)
            (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            share_weights(draft, MANIFEST)
            _sync_tree(draft)
            _remove(target)
            os.rename(draft, target)
            _sync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                _remove(draft)
            raise explain_write_error(error, self.folder) from error
        for old in self.steps()[: -self.keep]:
            _remove(self.path_of(old))
        self._sweep()
        return target

    def path_of(self, step: int) -> Path:
        """Path of the checkpoint after `step` steps."""
        return self.folder / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order."""
        names = [path.name for path in self.folder.glob("step_*")] if self.folder.is_dir() else []
        return sorted(int(name[5:]) for name in names if re.fullmatch("step_[0-9]+", name))

    def newest(self) -> Checkpoint:
        """The newest valid checkpoint."""
        for step in reversed(self.steps()):
            path = self.path_of(step)
            problem, manifest = _verify(path)
            if not problem:
                return Checkpoint(path, step, manifest["state"])
            self.log(f"Checkpoint {path} is damaged ({problem}); looking for an older one.")
        raise CheckpointError(
            f"{self.log_dir} has no checkpoint to resume from: there is one every [training] save_every steps, and "
            "when a run is interrupted or fails.  Try: start the run again, with --save-every 1"
        )

    def drop_after(self, step: int) -> None:
        """Delete checkpoints after `step`, which a resume will rewrite."""
        for later in (s for s in self.steps() if s > step):
            _remove(self.path_of(later))
        self._sweep()

    def _sweep(self) -> None:
        """Delete incomplete checkpoints left by a kill."""
        for leftover in self.folder.glob(".*_step_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def write_state_file(log_dir: Path, state: JsonObject) -> None:
    """Replace trainer_state.json atomically."""
    replace_file(log_dir / STATE_FILE, json.dumps(state, indent=1))


def read_state(log_dir: Path) -> JsonObject:
    """The contents of trainer_state.json; empty if it cannot be read."""
    try:
        state = json.loads((log_dir / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def read_settings(log_dir: Path, state: JsonObject) -> str:
    """The configuration in the checkpoint that trainer_state.json names; "" if there is none."""
    try:
        manifest = json.loads((log_dir / str(state["checkpoint"]) / MANIFEST).read_text(encoding="utf-8"))
        return str(manifest["state"]["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def last_edit(state: JsonObject, last_step: int) -> int:
    """The step at which inputs of a run were edited for the last time, if it was trained further; else 0."""
    at = int(state.get("edited_at", 0))
    return at if last_step >= at else 0


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically."""
    draft = path.with_name(f".{path.name}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise explain_write_error(error, path.parent) from error


def record_failure(log_dir: Path, reason: str) -> None:
    """Note in trainer_state.json what ended a run; the rest of it, if any, still describes the newest checkpoint."""
    path = log_dir / STATE_FILE
    state: JsonObject = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_state_file(log_dir, state | {"status": "failed", "error": reason})


def mark_running(log_dir: Path) -> None:
    """Note in trainer_state.json that a run continues: killed before its next checkpoint, it is not what it was."""
    state = read_state(log_dir)
    if state:
        state.pop("error", None)
        write_state_file(log_dir, state | {"status": "running"})


def read_notes(checkpoint: Path) -> JsonObject:
    """A backend's notes on a checkpoint for trainer_state.json, e.g. where a service keeps the weights."""
    path = checkpoint / NOTES
    notes: JsonObject = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return notes


def explain_write_error(error: Exception, where: Path, is_of_run: bool = True) -> CheckpointError:
    """Explain a write error such as a full disk; exit code 1, since the configuration is fine.

    The advice to resume is for the files `is_of_run`.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    # Errors of safetensors have the system's number in their text only.
    found = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else 0
    advice = _ADVICE.get(number or 0, "free some space")
    intact, then = "", "or write elsewhere"
    if is_of_run:
        intact = " Earlier checkpoints are intact."
        then = "then resume from the last checkpoint, or start again if there is none yet."
    explained = CheckpointError(f"could not write to {where}: {reason}.{intact}  Try: {advice}, {then}")
    explained.exit_code = 1
    return explained


def publish_adapter(checkpoint: Path, adapter_path: Path, log: Callable[[str], None]) -> Path | None:
    """Copy the newest adapter to `[backend] adapter_path`; return where the adapter is, if there is one.

    A copy that fails loses nothing.
    """
    source = checkpoint / "adapter"
    if not source.is_dir():
        # A backend of another kind may have none.
        return None
    if why := why_kept(adapter_path):
        log(f"Warning: {adapter_path} {why}, so it is left alone. The adapter is in {source}.")
        return source
    log_dir = checkpoint.parent.parent.absolute()
    # Without the permissions of the originals: weights are written for their owner alone, and a server that reads them
    # may be another user's.
    copy = partial(shutil.copytree, source, dirs_exist_ok=True, copy_function=shutil.copyfile)
    try:
        publish_folder(adapter_path, copy, run=str(log_dir))
    except OSError as error:
        # copytree raises one error with a list of (source, target, reason).
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        log(f"Warning: the adapter could not be copied to {adapter_path}: {reason}. It is in {source}.")
        return source
    return adapter_path


def digest(path: Path) -> str:
    """A short digest of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _seal(manifest: JsonObject) -> str:
    text = json.dumps([manifest["step"], manifest["state"], manifest["files"]], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _verify(path: Path) -> tuple[str, JsonObject]:
    """What is wrong with a checkpoint ("" if valid), and its manifest."""
    try:
        manifest: JsonObject = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, this version reads {FORMAT}", {}
        if manifest["seal"] != _seal(manifest) or path.name != f"step_{manifest['step']:06d}":
            return f"{MANIFEST} was changed", {}
        for name, expected in manifest["files"].items():
            if digest(path / name) != expected:
                return f"{name} does not match its digest", {}
    except PermissionError as error:
        hint = f"Try: have its owner make it readable, as with chmod -R g+rX {path.parent.parent}"
        raise CheckpointError(f"{error.filename} cannot be read: permission denied.  {hint}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}", {}
    return "", manifest


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Renamed first: a kill while deleting must not leave an incomplete checkpoint under its name.
        doomed = path.with_name(f".removing_{path.name}_{os.getpid()}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    elif path.exists() or path.is_symlink():
        path.unlink()


def _sync_tree(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
