"""How soon does `retrain ui` show a very long run, and how much memory does it take?

    python benchmarks/ui.py [FOLDER]

Writes a run of 100,000 steps with 2 GB of completions to FOLDER (kept for the next time) or to a temporary folder, and
opens it: the time from the start of the command to the first answer with curves and a verdict, the time until every
row and completion was read, the time to fetch a page of completions, and the largest resident memory of the server.
Exits 1 when the first answer takes more than 2 seconds after the server is up, or the server more than 150 MB.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from retrain.config import load_config
from retrain.config.load import dump_config
from retrain.storage.logs import EVALS, GENERATIONS, METRICS

STEPS, GROUP_SIZE, CHARACTERS = 100_000, 8, 10_000
COMPLETION_BYTES = 2_000_000_000
MOST_SECONDS, MOST_MB = 2.0, 150.0


def write_run(folder: Path) -> None:
    """A run as a long training leaves it: 40 metrics per step, long completions."""
    if (folder / "trainer_state.json").exists():
        return
    (folder / "emergence").mkdir(parents=True, exist_ok=True)
    named = {"training.max_steps": STEPS, "training.group_size": GROUP_SIZE, "model.model": "builtin:tiny"}
    (folder / "config.toml").write_text(dump_config(load_config(None, named)))
    draw = random.Random(0)
    with (folder / METRICS).open("w") as file:
        for step in range(STEPS):
            rate = 1 - math.exp(-3 * step / STEPS)
            row = {"step": step, "condition": "grpo", "correct_rate": rate, "mean_reward": rate, "batch_size": 8}
            row |= {"step_time_s": 3.0, "sample_time_s": 2.0, "tokens_per_s": 4000.0, "exec_entropy_mean": 1 - rate / 2}
            row |= {f"env/part_{number}": draw.random() for number in range(31)}
            file.write(json.dumps(row) + "\n")
    with (folder / EVALS).open("w") as file:
        for step in range(0, STEPS + 1, STEPS // 50):
            rate = 0.1 + 0.8 * step / STEPS
            row = {"step": step, "eval_pass_at_1": rate, "eval_ci_low": rate - 0.03, "eval_ci_high": rate + 0.03}
            file.write(json.dumps(row | {"eval_pass_at_k": rate, "k": 1, "correct": [1], "counted": [1]}) + "\n")
    words = "".join(draw.choice("abcdefgh ") for _ in range(4 * CHARACTERS))
    groups = COMPLETION_BYTES // (GROUP_SIZE * CHARACTERS)
    with (folder / GENERATIONS).open("w", buffering=1 << 20) as file:
        for number in range(groups):
            for _ in range(GROUP_SIZE):
                start = draw.randrange(3 * CHARACTERS)
                row = {"step": number * STEPS // groups, "prompt": f"question {number % 1000}"}
                row |= {"completion": words[start : start + CHARACTERS], "reward": 1.0, "num_tokens": 900}
                file.write(json.dumps(row | {"outcome": "right"}) + "\n")
    (folder / "trainer_state.json").write_text(json.dumps({"status": "finished", "step": STEPS}))


def ask(address: str) -> dict:
    """One answer of the server."""
    with urllib.request.urlopen(address, timeout=600) as reply:
        return dict(json.loads(reply.read()))


def megabytes(process: int, field: str) -> float:
    """Memory of a process: VmRSS now, VmHWM at most."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def cpu_seconds(process: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path) -> bool:
    """Open the run and print the figures; returns whether they are within the limits."""
    started = time.monotonic()
    command = [sys.executable, "-u", "-m", "retrain", "ui", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[2]
            serving = time.monotonic()
            print(f"server up after        {serving - started:6.2f} s")
            while not (first := ask(f"{address}/data.json"))["runs"] or "head" not in first:
                time.sleep(0.05)
            opened = time.monotonic() - serving
            used = cpu_seconds(server.pid)
            print(f"first curves after     {opened:6.2f} s ({len(first['runs'][0]['steps'])} points per line)")
            print(f"  CPU time until then  {used:6.2f} s, with the start of Python")
            while (run := ask(f"{address}/data.json")["runs"][0])["loading"] < 1 or run["index"]["read"] < 1:
                time.sleep(0.5)
            print(f"everything read after  {time.monotonic() - serving:6.2f} s ({run['index']['total']:,} completions)")
            size = len(json.dumps(run)) / 2**20
            begun = time.monotonic()
            groups = ask(f"{address}/groups.json?step=50000")["groups"]
            print(f"one step's completions {time.monotonic() - begun:6.2f} s ({len(groups)} groups)")
            known = f"{run['id']}:{run['version']}:{run['epoch']}:{run['size']}:{run['rows']}"
            begun = time.monotonic()
            delta = len(json.dumps(ask(f"{address}/data.json?known={known}&head={first['head_version']}")))
            print(f"a poll without news    {time.monotonic() - begun:6.2f} s ({delta} bytes; all of it {size:.1f} MiB)")
            most = megabytes(server.pid, "VmHWM")
            print(f"memory of the server   {megabytes(server.pid, 'VmRSS'):6.0f} MB, at most {most:.0f} MB")
        finally:
            server.kill()
    return opened <= MOST_SECONDS and most <= MOST_MB


def main() -> int:
    """Write the run if needed, and measure."""
    if len(sys.argv) > 1:
        write_run(Path(sys.argv[1]))
        return 0 if measure(Path(sys.argv[1])) else 1
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder))
        return 0 if measure(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
