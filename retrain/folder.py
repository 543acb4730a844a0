"""The run's folder: taken by one run at a time, never overwritten, picked up again by a resume."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from retrain.checkpoint import STATE_FILE, Checkpoint, Checkpoints
from retrain.config import TrainConfig, dump_config, load_config
from retrain.config.rules import values_of
from retrain.errors import CheckpointError, ConfigError
from retrain.recording import drop_recordings
from retrain.seeding import fresh_seed
from retrain.tracking.jsonl import FILES, cut_logs

CONFIG_FILE = "config.toml"

# A resume may change these: they say how long, where and how fast, not what is being learnt.
FREE_TO_CHANGE = (
    "backend.devices", "backend.adapter_path", "training.max_steps", "training.save_every", "training.keep",
    "training.record", "memory.", "eval.", "reward.timeout_s", "reward.workers", "logging.", "resume.", "plugins.",
    "inference.url", "campaign.", "squeeze.",
)  # fmt: skip


class RunFolder:
    """A locked log_dir with its resolved configuration, and the checkpoint to go on from, if any."""

    def __init__(self, config: TrainConfig, force_resume: bool, say: Callable[[str], None]) -> None:
        self.path = Path(config.logging.log_dir)
        self.say = say
        self.checkpoint: Checkpoint | None = None
        resumed = Path(config.resume.from_) if config.resume.from_ else None
        try:
            if resumed is None:
                self._step_aside_earlier_run()
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = _lock(self.path)
            try:
                self.config = self._take_over(config, resumed, force_resume)
            except BaseException:
                self.lock.close()
                raise
        except OSError as error:
            raise ConfigError(f"[logging] log_dir = {str(self.path)!r} cannot be written to: {error}.") from error

    def close(self) -> None:
        """Let another run have the folder."""
        self.lock.close()

    def _take_over(self, config: TrainConfig, resumed: Path | None, force: bool) -> TrainConfig:
        """Settle the configuration and write it down, in one go: without it nothing could be resumed."""
        config = self._resume(config, resumed, force) if resumed else _with_seed(config, fresh_seed())
        draft = self.path / f".{CONFIG_FILE}"
        draft.write_text(dump_config(config), encoding="utf-8")
        os.replace(draft, self.path / CONFIG_FILE)
        return config

    def _step_aside_earlier_run(self) -> None:
        """An earlier run in the same place is renamed, never overwritten."""
        if not any((self.path / name).exists() for name in (STATE_FILE, *FILES)):
            return
        _lock(self.path).close()
        number = next(n for n in range(1, 1_000_000) if not Path(f"{self.path}.{n}").exists())
        os.rename(self.path, f"{self.path}.{number}")
        self.say(f"{self.path} held an earlier run; it is now {self.path}.{number} (to go on with it: --resume).")

    def _resume(self, config: TrainConfig, resumed: Path, force: bool) -> TrainConfig:
        if not (resumed / STATE_FILE).is_file():
            raise CheckpointError(f"{resumed} has no {STATE_FILE}, so there is nothing to resume.")
        stored = load_config(resumed / CONFIG_FILE)
        config = _with_seed(config, stored.training.seed)
        differences = meaningful_differences(stored, config)
        if differences and not force:
            raise CheckpointError(
                f"{resumed} was trained with other settings:\n"
                + "\n".join(f"  {line}" for line in differences)
                + "\nA run that changes its meaning on the way cannot be compared with any other.  "
                "Try: leave them as they were, start a new run, or insist with --force-resume."
            )
        self.checkpoint = Checkpoints(resumed, config.training.keep, self.say).newest()
        if resumed.resolve() != self.path.resolve():
            _copy_logs(resumed, self.path)
        cut_logs(self.path, self.checkpoint.state["log_sizes"])
        drop_recordings(self.path, self.checkpoint.step)
        Checkpoints(self.path, config.training.keep, self.say).drop_after(self.checkpoint.step)
        self.say(f"Resuming from {self.checkpoint.path} at step {self.checkpoint.step}.")
        return config


def meaningful_differences(stored: TrainConfig, wanted: TrainConfig) -> list[str]:
    """Options that differ and would change what the run means."""
    before, after = values_of(stored), values_of(wanted)
    return [
        f"{path}: {before.get(path)!r} -> {after.get(path)!r}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and not path.startswith(FREE_TO_CHANGE)
    ]


def _with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    """Settle the seed of a run that asked for none."""
    if config.training.seed >= 0:
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"seed": seed})})


def _lock(path: Path) -> TextIO:
    """Hold the folder for as long as the returned file is open; the system lets go even after a kill."""
    file = (path / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise ConfigError(f"{path} is in use by another run (process {owner}).  Try: another --log-dir") from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _copy_logs(source: Path, target: Path) -> None:
    if any((target / name).exists() for name in FILES):
        raise ConfigError(
            f"{target} already holds a run, so that of {source} cannot go on there.  Try: another --log-dir"
        )
    for name in FILES:
        if (source / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
