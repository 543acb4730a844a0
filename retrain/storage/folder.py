"""The run folder: locked by one run at a time, never overwritten, reused by a resume."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Set
from pathlib import Path
from typing import TextIO

from retrain.config import TrainConfig, dump_config, load_config
from retrain.config.load import parse_recorded
from retrain.config.options import free_on_resume, options_by_path, paths_where, replace_values, values_of
from retrain.config.toml import show_value
from retrain.errors import CheckpointError, ConfigError
from retrain.modeling.digest import digest_models
from retrain.runtime.permissions import is_writable_folder, nearest_existing
from retrain.runtime.text import list_some
from retrain.seeding import fresh_seed
from retrain.storage.aside import CONFIG_FILE, LOCK_FILE, holds_run, is_not_empty, require_unoccupied, step_aside
from retrain.storage.checkpoint import (
    Checkpoint,
    Checkpoints,
    explain_write_error,
    read_state,
    replace_file,
)
from retrain.storage.inputs import find_changed_models, find_moved_files, find_moved_models
from retrain.storage.logs import EVALS, FILES, MANIFEST, cut_logs, restore_logs, steps_after
from retrain.storage.publishing import other_run, why_kept
from retrain.storage.recording import drop_recordings, find_recordings

# Depth of the search for runs in folders.
SEARCH_DEPTH = 4


def subfolders(folder: Path, root: Path) -> list[Path]:
    """Folders in which runs are searched for: no hidden or private ones, and no links to what is found without them."""
    visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    inside = [path for path in visible if path.is_dir() and os.access(path, os.R_OK | os.X_OK)]
    found = {path: path for path in inside if not path.is_symlink()}
    # A link may have led to this folder.
    tops = (root.resolve(), folder.resolve())
    for link in (path for path in inside if path.is_symlink()):
        target = link.resolve()
        if not any(target.is_relative_to(top) or top.is_relative_to(target) for top in tops):
            found.setdefault(target, link)
    return sorted(found.values())


class RunFolder:
    """A locked log_dir with its resolved configuration, and the checkpoint to resume from, if any."""

    def __init__(self, config: TrainConfig, force_resume: bool, log: Callable[[str], None]) -> None:
        self.path = Path(config.logging.log_dir).expanduser()
        if self.path.is_symlink():
            # Renaming the link instead of its target would move the next run to another disk.
            self.path = self.path.resolve()
        self.log = log
        self.checkpoint: Checkpoint | None = None
        self.stored = config
        """The settings of the run to resume, as they are in its folder."""
        self.only_evaluates = False
        """Whether a finished run is only evaluated again; until that has succeeded, the run stays as it is."""
        self.forced: list[str] = []
        """Options that --force-resume changes, in words."""
        self.resumed = Path(config.resume.from_).expanduser() if config.resume.from_ else None
        self._new = [each for each in (self.path / LOCK_FILE, self.path, *self.path.parents) if not each.exists()]
        """What did not exist before, inside out; removed again by a run that is rejected before it begins."""
        if self.resumed is None:
            require_unoccupied(self.path)
        else:
            _require_free(self.path, self.resumed)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = lock_folder(self.path)
        except OSError as error:
            why = f"[logging] log_dir = {str(self.path)!r} cannot be written to: {error.strerror}"
            raise ConfigError(f"{why}.  Try: another --log-dir") from error
        try:
            config = with_absolute_paths(config)
            self.config = self._find_checkpoint(config, force_resume) if self.resumed else self._draw_seed(config)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock; a folder that was never prepared is removed."""
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            for each in self._new:
                each.unlink() if each.name == LOCK_FILE else each.rmdir()
        self.lock.close()

    def _draw_seed(self, config: TrainConfig) -> TrainConfig:
        drawn = _with_seed(config, fresh_seed())
        if config.training.seed < 0:
            self.log(f"Seed: {drawn.training.seed}, drawn for this run. To repeat it: --seed {drawn.training.seed}")
        return drawn

    def settle(self) -> None:
        """Prepare the folder, once every component has loaded; nothing in it changes before."""
        self._new = []
        try:
            if self.checkpoint is not None and self.resumed is not None:
                if self.resumed.resolve() != self.path.resolve():
                    _copy_logs(self.resumed, self.path)
                else:
                    self.only_evaluates = self._is_finished(self.checkpoint.step)
                self._tell_replaced_evaluation(self.checkpoint.step)
                names = [name for name in FILES if name != EVALS or not self.only_evaluates]
                changed = cut_logs(self.path, self.checkpoint.state["log_sizes"], self.checkpoint.step, names)
                restore_logs(self.path, changed, self.checkpoint.step, self.config.condition, self.log)
                drop_recordings(self.path, self.checkpoint.step)
                Checkpoints(self.path, self.config.training.keep, self.log).drop_after(self.checkpoint.step)
            elif holds_run(self.path):
                self._step_aside_earlier_run()
            if not self.only_evaluates:
                replace_file(self.path / CONFIG_FILE, self.settings())
        except OSError as error:
            raise explain_write_error(error, self.path) from error
        self._warn_about_adapter_path()

    def replace_evaluation(self) -> None:
        """Make room for the new evaluation of a finished run, with its options."""
        if self.only_evaluates:
            assert self.checkpoint is not None
            cut_logs(self.path, self.checkpoint.state["log_sizes"], self.checkpoint.step, [EVALS])
            replace_file(self.path / CONFIG_FILE, self.settings())

    def _is_finished(self, steps: int) -> bool:
        """Whether the run in the folder has finished, and no steps are added."""
        return read_state(self.path).get("status") == "finished" and not _is_longer(self.config, self.stored, steps)

    def settings(self) -> str:
        """The configuration as TOML, for config.toml and for checkpoints; a run started from it is a new run."""
        return dump_config(self.config.model_copy(update={"resume": type(self.config.resume)()}))

    def _tell_replaced_evaluation(self, steps: int) -> None:
        """Say that the evaluation at the end of a shorter run is dropped: an uninterrupted run would not have it."""
        every = self.config.eval.every
        for step in steps_after(self.path / EVALS, steps):
            if (not every or step % every) and _is_longer(self.config, self.stored, step):
                what = "replaced by those of the longer run" if every else "removed: [eval] every is 0"
                self.log(f"The evaluation after step {step}, the end of the earlier run, is {what}.")

    def _warn_about_adapter_path(self) -> None:
        """Say that adapters cannot be copied there, or replace those of another run."""
        if self.config.backend.backend == "tinker":
            return  # the service keeps them
        adapter = Path(self.config.backend.adapter_path).expanduser()
        existing = nearest_existing(adapter)
        obstacle = f"{adapter} {why}" if (why := why_kept(adapter)) else ""
        if not obstacle and not is_writable_folder(existing):
            obstacle = f"{existing} cannot be written to"
        if obstacle:
            self.log(
                f"Warning: {obstacle}, so adapters stay in the checkpoints.  "
                f"Try: --adapter-path {self.path / 'adapter'}"
            )
        elif other := other_run(adapter, self.path):
            self.log(
                f"Warning: {adapter} holds the adapter of the run in {other}, and this run replaces it; that run's "
                f"checkpoints stay.  Try: --adapter-path {self.path / 'adapter'}"
            )

    def _step_aside_earlier_run(self) -> None:
        step_aside(self.path, self.log)
        if not self.path.exists():
            self.path.mkdir()
            earlier, self.lock = self.lock, lock_folder(self.path)
            earlier.close()

    def _find_checkpoint(self, config: TrainConfig, force: bool) -> TrainConfig:
        self.checkpoint, self.stored, differences = check_resume(config, force, self.log)
        self.log(f"Resuming from {self.checkpoint.path} at step {self.checkpoint.step}.")
        self.forced = [f"{line} at step {self.checkpoint.step}" for line in differences]
        for line in self.forced:
            self.log(f"Warning: --force-resume: {line}. Comparisons with other runs will say so.")
        return self._with_own_adapter(_with_seed(config, self.stored.training.seed), self.stored)

    def _with_own_adapter(self, config: TrainConfig, stored: TrainConfig) -> TrainConfig:
        """Point adapter_path into the renamed run folder, if it was inside the old one."""
        adapter, log_dir = Path(config.backend.adapter_path), Path(stored.logging.log_dir).expanduser().parts
        own = self.path.absolute()
        before = own.with_name(re.sub(r"\.[0-9]+$", "", own.name))  # if it was set aside
        # The log_dir is stored as it was given, which may be relative to a folder that is not known.
        was_in = next(
            (one for one in adapter.parents if one == before or (log_dir and one.parts[-len(log_dir) :] == log_dir)),
            None,
        )
        if config.backend.adapter_path != stored.backend.adapter_path or was_in is None:
            return config
        moved = own / adapter.relative_to(was_in)
        is_set_aside = own.parent == was_in.parent and own.name.startswith(f"{was_in.name}.")
        if was_in.exists() and not moved.exists() and not is_set_aside:
            return config  # a folder elsewhere with the same name
        return config.model_copy(update={"backend": config.backend.model_copy(update={"adapter_path": str(moved)})})


def check_resume(
    config: TrainConfig, force: bool, log: Callable[[str], None]
) -> tuple[Checkpoint, TrainConfig, list[str]]:
    """The checkpoint to resume from, the settings it was trained with and, if forced, how they differ; raises if there
    is none, they differ, or log_dir holds another run."""
    resumed = Path(config.resume.from_).expanduser()
    if not resumed.is_dir():
        raise CheckpointError(f"there is no folder {resumed} to resume from.")
    if not (resumed / CONFIG_FILE).is_file():
        raise CheckpointError(f"{resumed} has no {CONFIG_FILE}, so there is nothing to resume.")
    checkpoint = Checkpoints(resumed, config.training.keep, log).newest()
    stored = with_absolute_paths(load_config(resumed / CONFIG_FILE))
    wanted = _with_seed(with_absolute_paths(config), stored.training.seed)
    # Paths change in config.toml when files move. The model is none: its name may be that of other weights.
    paths = {path for path in paths_where("path") if options_by_path()[path].facets.path != "or_id"}
    moved = find_moved_files(checkpoint.state, stored, wanted) | (options_by_path().keys() - paths)
    trained, digests = _trained_with(checkpoint, stored), digest_models(wanted)
    same_models = find_moved_models(checkpoint.state, trained, wanted, digests)
    differences = sorted(
        {
            *meaningful_differences(trained, wanted, paths | same_models),
            *meaningful_differences(stored, wanted, moved),
        }
    )
    changed = find_changed_models(checkpoint.state, digests)
    if (differences or changed) and not force:
        raise CheckpointError(
            f"{resumed} was trained with other settings:\n"
            + "\n".join(f"  {line}" for line in (*differences, *changed))
            + "\nA run with mixed settings cannot be compared with any other.  "
            "Try: keep the old settings, start a new run, or use --force-resume."
        )
    _require_free(Path(config.logging.log_dir).expanduser(), resumed)
    return checkpoint, stored, differences


def _require_free(target: Path, resumed: Path) -> None:
    """Raise if a run is to continue in a folder that holds another one."""
    if target.resolve() == resumed.resolve():
        return
    held = (target / name for name in (*FILES, "checkpoints", "rollouts", MANIFEST))
    if any(map(is_not_empty, held)):
        raise ConfigError(
            f"{target} already holds a run or a campaign, so the run of {resumed} cannot continue there.  "
            "Try: another --log-dir"
        )
    require_unoccupied(target)


def _trained_with(checkpoint: Checkpoint, stored: TrainConfig) -> TrainConfig:
    """The settings of a checkpoint; config.toml may have been edited since, or written by a run that did not get on."""
    text = checkpoint.state.get("config")
    name = f"the configuration in {checkpoint.path}"
    # Older versions wrote none.
    return parse_recorded(text, name) if text else stored


def restore_config(folder: Path, log: Callable[[str], None]) -> None:
    """Write a lost config.toml again, from the newest checkpoint."""
    text = Checkpoints(folder, 1, log).newest().state.get("config") if (folder / "checkpoints").is_dir() else None
    if not text:
        if folder.absolute().parent.name == "checkpoints":
            hint = f"  Try: --resume {folder.absolute().parents[1]}, which resumes from its newest checkpoint"
        else:
            inside = sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG_FILE}"))
            hint = f"  Try: a run in it, {list_some(inside)}" if inside else ""
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}, and no checkpoint with a copy of it.{hint}")
    replace_file(folder / CONFIG_FILE, text)
    log(f"Note: {folder / CONFIG_FILE} was missing, and is restored from the newest checkpoint.")


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The configuration with absolute paths, so that it means the same from another working directory."""

    def absolute(path: str, may_be_id: bool) -> str:
        found = Path(path).expanduser()
        return str(found.absolute()) if path and (found.is_dir() or not may_be_id) else path

    changes: dict[str, object] = {}
    for path, value in values_of(config).items():
        option = options_by_path()[path]
        if option.facets.path in ("absolute", "or_id"):
            may_be_id = option.facets.path == "or_id"
            is_list = isinstance(value, tuple)
            fixed = tuple(absolute(one, may_be_id) for one in value) if is_list else absolute(value, may_be_id)
            changes[path] = fixed
    return replace_values(config, changes)


def meaningful_differences(stored: TrainConfig, wanted: TrainConfig, also_free: Set[str] = frozenset()) -> list[str]:
    """Differing options that a resume must not change."""
    free = free_on_resume() | also_free
    return describe_differences(stored, wanted, options_by_path().keys() - free)


def describe_differences(stored: TrainConfig, wanted: TrainConfig, paths: Set[str]) -> list[str]:
    """Those of these options that differ, with both values."""
    before, after = values_of(stored), values_of(wanted)
    return [
        f"{options_by_path()[path].where}: {show_value(before.get(path))} -> {show_value(after.get(path))}"
        for path in sorted((before.keys() | after.keys()) & paths)
        if before.get(path) != after.get(path)
    ]


def has_work_left(config: TrainConfig, steps: int) -> bool:
    """Whether a resume of a run that finished after `steps` steps has steps to train, or something to evaluate."""
    resumed, log_dir = Path(config.resume.from_).expanduser(), Path(config.logging.log_dir).expanduser()
    stored, wanted = with_absolute_paths(load_config(resumed / CONFIG_FILE)), with_absolute_paths(config)
    is_other = bool(meaningful_differences(stored, _with_seed(wanted, stored.training.seed)))
    has_weights = Path(wanted.backend.adapter_path).exists() or wanted.backend.backend != "local"
    is_elsewhere = resumed.resolve() != log_dir.resolve()
    is_longer = _is_longer(wanted, stored, steps)
    return is_longer or is_other or stored.eval != wanted.eval or is_elsewhere or not has_weights


def _is_longer(wanted: TrainConfig, stored: TrainConfig, steps: int) -> bool:
    """Whether a run that ended after `steps` steps goes on."""
    training = wanted.training
    # The number of steps of an epoch is not known here.
    return training.epochs != stored.training.epochs if training.epochs else training.max_steps > steps


def _with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    """Set the seed of a run without one."""
    if config.training.seed >= 0:
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"seed": seed})})


def lock_folder(path: Path, setting: str = "--log-dir") -> TextIO:
    """Lock the folder, named by a `setting`, while the returned file is open; a kill releases it as well."""
    file = (path / LOCK_FILE).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        # The other process may not have written its number yet.
        process = f" (process {owner})" if owner else ""
        raise ConfigError(f"{path} is in use by another run{process}.  Try: another {setting}") from error
    except OSError:
        pass  # a file system without locks, where nobody can be kept out
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _copy_logs(source: Path, target: Path) -> None:
    recordings = [str(path.relative_to(source)) for path in find_recordings(source).values()]
    for name in (*FILES, *recordings):
        if (source / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
