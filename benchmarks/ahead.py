"""What `overlap` and `async_steps = 1` gain: the same run on a server, sampling in turn with training, overlapped with
it within each step, and a step ahead of it.

    python benchmarks/ahead.py [--steps 8] [--seconds 3] [--url http://localhost:8000 --model FOLDER]

Each is run twice, the second time in the other order. With a url it is a vLLM server that serves the model of that
folder with adapters of rank 4. Without one it is a process of its own, the loopback server of the tests over a small
model: each request waits there for up to `--seconds`, as if an accelerator decoded elsewhere and groups had different
lengths, and gets random tokens with their true log-probs, which costs this machine little. The trainer computes here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from e2e.runs import fake_config, rows, train_quietly
from e2e.tiny import write_model, write_tokenizer
from inference_engine.loopback import Loopback

from retrain.inference_engine.http.proof import Row
from retrain.types import Sampling

PARTS = ("step_time_s", "sample_time_s", "train_time_s")
MODES: dict[str, dict[str, Any]] = {
    "sequential": {"training__overlap": False},
    "`overlap = true`": {"training__overlap": True},
    "`async_steps = 1`": {"training__async_steps": 1},
}
# The shortest wait for a reply, as a fraction of the longest.
SHORTEST = 0.2


class Scripted(Loopback):
    """Scores random tokens in place of sampling them one by one."""

    longest_s: float = 0.0

    def choices(self, body: dict[str, Any], adapter: dict[str, Any] | None) -> list[dict[str, Any]]:
        rng, prompt = np.random.default_rng(body["seed"]), np.array(body["prompt"])
        time.sleep(self.longest_s * rng.uniform(SHORTEST, 1))
        drawn = rng.integers(3, self.policy.vocabulary, (body["n"], body["max_tokens"]))
        drawn = np.where(np.isin(drawn, self.policy.stop_ids), 2, drawn)
        drawn_rows = [Row(prompt, ids, np.zeros(len(ids), np.float32)) for ids in drawn]
        options = {key: body[key] for key in ("max_tokens", "temperature", "repetition_penalty")}
        with self.lock:
            self.policy.load_adapter_state(self.base if adapter is None else adapter)
            logprobs = self.scorer.logprobs(drawn_rows, Sampling(**options))
        return [
            {"index": at, "token_ids": ids.tolist(), "logprobs": {"token_logprobs": values.tolist()}}
            for at, (ids, values) in enumerate(zip(drawn, logprobs, strict=True))
        ]


def serve(model: Path, port: Any, seconds: float) -> None:
    with Scripted(model) as server:
        server.longest_s = seconds
        port.value = server.port
        while True:
            time.sleep(60)


def run(model: Path, url: str, folder: Path, mode: str, steps: int, scripted: bool) -> list[dict[str, Any]]:
    folder.mkdir()
    options = {
        "backend__backend": "local",
        "backend__devices": "cpu",
        "inference__engine": "vllm",
        "inference__url": url,
        "inference__wait_s": 300.0,
        "model__lora_rank": 4,
        "training__max_steps": steps,
        "training__batch_size": 8,
        "training__group_size": 16,
        "training__max_tokens": 48,
        "reward__custom_function": "score_length",
    }
    if scripted:
        # Its tokens are uniform, which the check of a server's samples accepts at this temperature alone.
        options["training__temperature"] = 100.0
    result, _ = train_quietly(fake_config(model, folder, **options | MODES[mode]))
    return rows(result.log_dir)


def compare(model: Path, url: str, scratch: Path, steps: int, scripted: bool = False) -> None:
    print("8 prompts of 16 completions, medians over the steps after the second")
    print("| steps | step | sampling waited for | training after it | staleness | largest ratio |")
    print("|---|---|---|---|---|---|")
    for at, mode in enumerate((*MODES, *reversed(MODES))):
        done = run(model, url, scratch / str(at), mode, steps, scripted)[2:]
        step, sample, train = (statistics.median(row[part] for row in done) for part in PARTS)
        largest, stale = max(row["ratio_max"] for row in done), done[-1]["staleness"]
        print(f"| {mode} | {step:.2f} s | {sample:.2f} s | {train:.2f} s | {stale} | {largest:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--url", default="")
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.url:
            compare(args.model, args.url, Path(scratch), args.steps)
            return
        model = write_tokenizer(write_model(Path(scratch) / "model", "qwen3", layers=3))
        port = multiprocessing.Value("i", 0)
        server = multiprocessing.Process(target=serve, args=(model, port, args.seconds), daemon=True)
        server.start()
        while not port.value:
            time.sleep(0.05)
        compare(model, f"http://127.0.0.1:{port.value}", Path(scratch), args.steps, scripted=True)
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
