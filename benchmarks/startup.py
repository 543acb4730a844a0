"""How soon does the command line answer, in CPU time of the child process?

    python benchmarks/startup.py

The floor is a Python that imports the libraries and does nothing. pydantic imports itself lazily, so that its import
alone loads next to none of it; what checks a configuration is held against a Python that also builds one model.
Exits 1 when an answer takes more than twice its floor, or half a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

RUNS = 15
MOST_SECONDS, MOST_TIMES_FLOOR = 0.5, 2.0
IMPORTS = "import click, rich, pydantic"
ONE_MODEL = f"{IMPORTS}\nclass Table(pydantic.BaseModel):\n    key: int = 1\nTable(key=2)"
BAD_CONFIG = "[training]\nlr = -1.0\nmax_stepz = 7\n\n[trainnning]\nbatch_size = 3.9\n"


@dataclass(frozen=True)
class Case:
    """A command, what it must exit with, and which floor it is held against."""

    name: str
    arguments: list[str]
    exit_code: int
    floor: str


def cpu_seconds(command: list[str], exit_code: int, folder: str) -> float:
    """User and system time of one run, which must end as expected."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != exit_code:
        sys.exit(f"{' '.join(command)} exited with {process.returncode}, not {exit_code}")
    return usage.ru_utime + usage.ru_stime


def measure(commands: dict[str, tuple[list[str], int]], folder: str) -> dict[str, float]:
    """Best of several rounds; rounds interleave the commands, so that a busy moment hits all alike."""
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(RUNS):
        for name, (command, exit_code) in commands.items():
            best[name] = min(best[name], cpu_seconds(command, exit_code, folder))
    return best


def main() -> int:
    """Print the table; 1 when a target is missed."""
    python = [sys.executable, "-c"]
    # What the installed script does, without depending on where it was installed.
    retrain = [*python, "import sys; from retrain.cli import main; sys.exit(main())"]
    cases = [
        Case("retrain --help", ["--help"], 0, "imports"),
        Case("retrain man --topic quickstart", ["man", "--topic", "quickstart"], 0, "imports"),
        Case("retrain bad.toml", ["bad.toml"], 2, "one model"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bad.toml").write_text(BAD_CONFIG, encoding="utf-8")
        floors = {"imports": ([*python, IMPORTS], 0), "one model": ([*python, ONE_MODEL], 0)}
        best = measure({**floors, **{c.name: ([*retrain, *c.arguments], c.exit_code) for c in cases}}, folder)
    print(f"CPU time, best of {RUNS}")
    print(f"{'command':<34}{'ms':>6}  {'/ imports':>9}  {'/ one model':>11}  target")
    for name in floors:
        print(f"{f'python, {name}':<34}{best[name] * 1e3:>6.0f}")
    missed = False
    for case in cases:
        seconds, times = best[case.name], [best[case.name] / best[floor] for floor in floors]
        good = seconds < MOST_SECONDS and seconds <= MOST_TIMES_FLOOR * best[case.floor]
        missed |= not good
        target = f"{MOST_TIMES_FLOOR:g}x {case.floor}: {'met' if good else 'MISSED'}"
        print(f"{case.name:<34}{seconds * 1e3:>6.0f}  {times[0]:>8.2f}x  {times[1]:>10.2f}x  {target}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
