"""What a campaign costs: one run alone, several runs each in its own process, and the same runs sharing one model.

    python benchmarks/campaign.py [--runs 4] [--steps 5] [--layers 0] [--width 512] [--device cpu]

Without --layers the embedded model learns arithmetic. With it, a random Qwen3 model of that size is trained on random
rewards: what a step costs does not depend on what it learns. Wall and CPU time are of the whole command, all processes
together; memory is the most that they held at once, as Linux counts it (shared pages once), and on a GPU what
nvidia-smi says. "per run" is the CPU time of a run against that of one alone; on a busy machine it says more than wall
time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CAMPAIGN = """
[backend]
devices = "{device}"
[model]
model = "{model}"
lora_rank = 16
[training]
batch_size = 4
group_size = 8
max_tokens = 48
temperature = 0.8
lr = 1e-3
save_every = 1000
[data]
source = "arithmetic"
[reward]
type = "custom"
custom_module = "benchmark_reward"
workers = 1
[plugins]
search_paths = ["."]
[logging]
log_dir = "{name}"
[campaign]
seeds = {seeds}
max_steps = {steps}
share_model = {share}
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
"""
REWARD = "def score(response, reference):\n    return float(sum(map(ord, response)) % 2)\n"


def write_model(folder: Path, layers: int, width: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    from retrain.builtin import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:tiny"))
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=512, **shape, **heads, **ends)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"random model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")


def processes_below(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def memory_of(root: int) -> int:
    """Bytes of a process and all below it; pages that several share are divided among them."""
    total = 0
    for process in processes_below(root):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def cpu_seconds() -> float:
    """Of everything this process started and that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def gpu_memory() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20


def measure(folder: Path, name: str, seeds: list[int], share: bool, options: argparse.Namespace) -> dict[str, float]:
    model = str(folder / "model") if options.layers else "builtin:tiny"
    text = CAMPAIGN.format(
        device=options.device, model=model, name=name, seeds=seeds, steps=options.steps, share=str(share).lower()
    )
    (folder / f"{name}.toml").write_text(text)
    started, before = time.perf_counter(), cpu_seconds()
    process = subprocess.Popen(
        [sys.executable, "-m", "retrain", f"{name}.toml"], cwd=folder, stdout=subprocess.DEVNULL, env=os.environ
    )
    most = most_gpu = 0
    while process.poll() is None:
        most = max(most, memory_of(process.pid))
        if options.device != "cpu":
            most_gpu = max(most_gpu, gpu_memory())
        time.sleep(1.0)
    assert process.returncode == 0, f"{name} failed; see {folder}"
    runs = json.loads((folder / name / "manifest.json").read_text())["runs"]
    assert [run["step"] for run in runs] == [options.steps] * len(seeds)
    wall, cpu = time.perf_counter() - started, cpu_seconds() - before
    return {"wall": wall, "cpu": cpu, "memory": most, "gpu": most_gpu}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="retrain_campaign_") as scratch:
        folder = Path(scratch)
        (folder / "benchmark_reward.py").write_text(REWARD)
        if options.layers:
            write_model(folder / "model", options.layers, options.width)
        seeds = list(range(1, options.runs + 1))
        cases = {
            "one run": ("one", seeds[:1], False),
            f"{options.runs} runs, a process each": ("apart", seeds, False),
            f"{options.runs} runs, one model": ("shared", seeds, True),
        }
        results = {title: measure(folder, *case, options) for title, case in cases.items()}
    first = next(iter(results.values()))
    print("| | wall s | CPU s | per run | memory MB | GPU MB |\n|---|---|---|---|---|---|")
    for title, (_, used, _) in cases.items():
        r = results[title]
        share = r["cpu"] / len(used) / first["cpu"]
        memory, gpu = r["memory"] / 1e6, r["gpu"] / 1e6
        print(f"| {title} | {r['wall']:.1f} | {r['cpu']:.1f} | {share:.2f} | {memory:.0f} | {gpu:.0f} |")


if __name__ == "__main__":
    main()
