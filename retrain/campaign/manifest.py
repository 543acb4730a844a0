"""manifest.json: settings and versions of a campaign and the state of each run. Replaced atomically."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

from retrain.campaign.plan import RUNS, Run
from retrain.config import TrainConfig
from retrain.errors import CheckpointError
from retrain.runtime.version import version
from retrain.storage.checkpoint import replace_file
from retrain.storage.logs import MANIFEST
from retrain.types import JsonObject

FORMAT = 1
# Packages whose version can change results.
_PACKAGES = ("torch", "transformers", "peft", "numpy", "datasets", "math-verify", "verifiers", "tinker", "ray")

Record = JsonObject


class Manifest:
    """The contents of manifest.json; every change is written immediately."""

    def __init__(self, folder: Path, table: Record | None = None) -> None:
        self.folder = folder
        self.table = table or {"format": FORMAT, "started": now(), "runs": [], "sessions": []}

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of an existing campaign."""
        return cls(folder, read_table(folder))

    @property
    def version(self) -> str:
        """The version of retrain that last ran the campaign."""
        return str(self.table["versions"]["retrain"])

    def begin(self, config: TrainConfig, runs: Sequence[Run]) -> None:
        """Record the start of a session; known runs keep their records."""
        assert config.campaign is not None
        known = {record["name"]: record for record in self.table["runs"]}
        conditions = dict.fromkeys(run.condition for run in runs)
        self.table |= {
            "status": "running",
            "ended": None,
            "config": {name: table for name, table in config.model_dump(by_alias=True).items() if table is not None},
            "conditions": [
                {"name": name, "overrides": overrides}
                for name, overrides in zip(conditions, config.campaign.conditions, strict=True)
            ],
            "seeds": list(config.campaign.seeds),
            "versions": find_versions(),
            "git": find_git_state(),
            "host": platform.node(),
            "runs": [known.pop(run.name, None) or _new_record(run) for run in runs] + list(known.values()),
        }
        self.table["sessions"].append({"started": now(), "process": os.getpid(), "command": sys.argv})
        for run in runs:
            self[run.name]["max_steps"] = run.max_steps
        self.write()

    def __getitem__(self, name: str) -> Record:
        return next(record for record in self.table["runs"] if record["name"] == name)

    def update(self, name: str, **fields: object) -> None:
        """Update the record of a run."""
        self[name].update(fields)
        self.write()

    def end(self, status: str) -> None:
        """Record the status at the end of a session."""
        self.table |= {"status": status, "ended": now()}
        self.write()

    def write(self) -> None:
        """Replace the file atomically; JSON has no dates, which TOML has."""
        replace_file(self.folder / MANIFEST, json.dumps(self.table, indent=1, ensure_ascii=False, default=str))


def read_table(folder: Path) -> Record:
    """Read the manifest of a campaign folder."""
    path = folder / MANIFEST
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it is not a campaign.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        found = table.get("format") if isinstance(table, dict) else None
        raise CheckpointError(f"{path} has format {found!r}; this version of retrain reads {FORMAT}.")
    return table


def now() -> str:
    """The current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def find_versions() -> dict[str, str]:
    """Versions of Python, retrain and the packages that affect results."""
    versions = {"python": platform.python_version(), "retrain": version()}
    for package in _PACKAGES:
        try:
            versions[package] = installed(package)
        except PackageNotFoundError:
            continue
    return versions


def find_git_state() -> dict[str, object] | None:
    """Commit, branch and whether the working directory has changes; None outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "branch": _git("branch", "--show-current"), "dirty": bool(_git("status", "--porcelain"))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _new_record(run: Run) -> Record:
    return {
        "name": run.name,
        "condition": run.condition,
        "seed": run.seed,
        "folder": f"{RUNS}/{run.name}",
        "status": "pending",
        "attempts": 0,
        "seconds": 0.0,
    }
