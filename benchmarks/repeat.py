"""Does one file with one seed give one result? Runs it several times on a busy machine and compares the logs.

    python benchmarks/repeat.py [--runs 8] [--threads 2] [--kill 2] [--model random] [--ballast 20] [-- retrain flags]

Every run is a process of its own with `--threads` threads, while `--load` others keep the cores busy; `--parallel` runs
are active at once. `--kill` runs are cut by SIGKILL after a random step and resumed, on a GPU with `--ballast` GiB less
free memory. `--model random` is a random Qwen3 of 8 layers and width 1024, large enough for every kernel that a real
model uses. A run differs when any metric of any step (times aside), evaluation, completion or weight differs in any
digit. Exits with 1 if one does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from retrain.storage.logs import EVALS, GENERATIONS, METRICS

TIMES = ("_time_s", "_per_s")
LOGS = (METRICS, EVALS, GENERATIONS)
BUSY = "while True: sum(i * i for i in range(10000))"
BALLAST = "import sys, time, torch; held = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device='cuda'); "
BALLAST += "print('held', flush=True); time.sleep(3600)"


def score(response: str, reference: str) -> float:
    """A reward that a random model gets half of the time, and that any other character changes."""
    return float(zlib.crc32(response.encode()) % 2)


def write_random_model(folder: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from retrain.builtin import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:tiny"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Harness:
    def __init__(self, options: argparse.Namespace, folder: Path, flags: list[str]) -> None:
        self.options, self.folder, self.flags = options, folder, flags

    def start(self, arguments: list[str], name: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.options.threads),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        output = (self.folder / f"{name}.txt").open("ab")
        command = [sys.executable, "-m", "retrain", *arguments]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=self.folder)

    def logs(self, name: str) -> Path:
        return self.folder / name

    def arguments(self, name: str) -> list[str]:
        return [*self.flags, "--log-dir", str(self.logs(name)), "--adapter-path", f"{self.logs(name)}_adapter"]

    def run(self, name: str, arguments: list[str]) -> None:
        if self.start(arguments, name).wait():
            raise SystemExit(f"{name} failed:\n{(self.folder / f'{name}.txt').read_text()[-3000:]}")

    def run_cut(self, name: str) -> None:
        """SIGKILL after a random step, then resume."""
        process = self.start(self.arguments(name), name)
        steps = random.randint(3, self.options.steps - 1)
        metrics = self.logs(name) / "metrics.jsonl"
        while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < steps):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        print(f"{name}: killed after step {steps}", flush=True)
        with ExitStack() as stack:
            if self.options.ballast:
                command = [sys.executable, "-c", BALLAST, str(self.options.ballast)]
                holder = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
                stack.callback(holder.kill)
                assert holder.stdout is not None and holder.stdout.readline()
            self.run(name, ["--resume", str(self.logs(name))])

    def timed(self, name: str, is_cut: bool) -> tuple[dict[str, str], float]:
        started = time.perf_counter()
        if is_cut:
            self.run_cut(name)
        else:
            self.run(name, self.arguments(name))
        return digest(self.logs(name)), time.perf_counter() - started


def digest(logs: Path) -> dict[str, str]:
    """A digest of each row of the logs, and of the weights after the last step."""
    weights = max((logs / "checkpoints").glob("step_*/adapter/adapter_model.safetensors"))
    digests = {"weights": hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}
    for name in LOGS:
        for number, line in enumerate((logs / name).read_text().splitlines()):
            row = {key: value for key, value in json.loads(line).items() if not key.endswith(TIMES)}
            digests[f"{name}:{number}"] = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:12]
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--kill", type=int, default=2, help="how many of the runs are killed and resumed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--load", type=int, default=2, help="busy processes beside the runs")
    parser.add_argument("--parallel", type=int, default=1, help="runs that are active at once")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ballast", type=int, default=0, help="GiB of GPU memory taken away while a run is resumed")
    parser.add_argument("--model", default="builtin:tiny", help="a model, or random")
    parser.add_argument("--devices", default="cpu")
    own, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        model = str(write_random_model(folder / "model")) if own.model == "random" else own.model
        (folder / "run.toml").touch()
        flags = ["run.toml", "--model", model, "--devices", own.devices, "--data-source", "arithmetic", "--max-tokens"]
        flags += ["64", "--max-steps", str(own.steps), "--save-every", "2", "--seed", "1", "--lr", "1e-3"]
        flags += [
            "--eval-every",
            "4",
            "--eval-max-examples",
            "16",
            "--reward-type",
            "custom",
            "--reward-custom-module",
            "repeat",
        ]
        harness = Harness(own, folder, [*flags, *(part for part in extra if part != "--")])
        for _ in range(own.load):
            stack.callback(subprocess.Popen([sys.executable, "-c", BUSY]).kill)
        results: list[dict[str, str]] = []
        cut = range(own.runs - own.kill, own.runs)
        with ThreadPoolExecutor(own.parallel) as pool:
            for number, (result, seconds) in enumerate(
                pool.map(lambda number: harness.timed(f"run{number}", number in cut), range(own.runs))
            ):
                results.append(result)
                different = [key for key in results[0] | result if results[0].get(key) != result.get(key)]
                verdict = f"{len(different)} rows differ, first {different[0]}" if different else "equal"
                print(f"run{number}: {len(result)} rows, {seconds:.0f} s, {verdict}", flush=True)
        kinds = Counter(json.dumps(result) for result in results)
        print(f"{own.runs} runs, {own.kill} of them killed and resumed, {own.threads} threads: {len(kinds)} result(s)")
    sys.exit(len(kinds) > 1)


if __name__ == "__main__":
    main()
