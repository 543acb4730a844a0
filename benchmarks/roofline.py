"""Bytes and FLOPs of each phase of a step against the ceilings measured on the device it runs on.

    python benchmarks/roofline.py [--workload w1] [--measured step.json] [--device cpu]

The ceilings are a large copy and a large matrix product, the best of several. `--measured` takes the file that
`benchmarks/step.py --json` wrote, and says what share of the roofline that step reached.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from workloads import MODELS, PROMPT, WORKLOADS

from retrain.capacity.memory import Workload, read_shape
from retrain.capacity.roofline import Phase, sampling_phases, training_phases

# Enough for full speed on a large GPU; the CPU is there with less.
COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
MATRIX = {"cuda": 8192, "cpu": 1024}
REPEATS = 5


def best_seconds(work: Callable[[], object], device: str) -> float:
    """The shortest of several runs, after one that warms up."""
    times = []
    for _ in range(REPEATS + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def measure_bandwidth(device: str) -> float:
    """GB/s of a copy, reads and writes together."""
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES[device] / best_seconds(lambda: target.copy_(source), device) / 1e9


def measure_tflops(device: str) -> float:
    """TFLOP/s of a square product: bf16 on a GPU, float32 on the CPU."""
    size = MATRIX[device]
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    out = torch.empty_like(matrix)
    calls = 10 if device == "cuda" else 1

    def work() -> None:
        for _ in range(calls):
            torch.mm(matrix, matrix, out=out)

    return calls * 2 * size**3 / best_seconds(work, device) / 1e12


def workload_for(name: str, width: int, sampled: float | None) -> Workload:
    """`sampled`: tokens that a measured step drew in all, where completions ended early."""
    chosen = WORKLOADS[name]
    mean = round(sampled / (chosen.prompts * chosen.group)) if sampled else chosen.tokens
    return Workload(
        chosen.prompts, chosen.group, PROMPT, mean,
        rank=32, target_modules="all-linear", width=width, cache_width=width,
    )  # fmt: skip


def print_phases(phases: list[Phase], tflops: float, bandwidth: float) -> float:
    total = 0.0
    for phase in phases:
        seconds = phase.seconds(tflops, bandwidth)
        arithmetic = phase.flops / (tflops * 1e12)
        bound = "arithmetic" if arithmetic >= seconds else "memory"
        print(f"{phase.name:16}{phase.flops / 1e12:12.2f}{phase.bytes / 1e9:12.2f}{seconds:10.3f}  {bound}")
        total += seconds
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[name for name in WORKLOADS if name != "long"], default=None)
    parser.add_argument("--measured", type=Path, default=None, help="a file written by step.py --json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text(encoding="utf-8")) if args.measured else None
    name = args.workload or (measured["workload"] if measured else "w1" if args.device == "cuda" else "w4")
    shape = read_shape({"model_type": MODELS[WORKLOADS[name].model].family, **MODELS[WORKLOADS[name].model].shape})
    assert shape is not None
    sampled = measured["rows"]["retrain"].get("tokens") if measured else None
    work = workload_for(name, 2 if args.device == "cuda" else 4, sampled)
    bandwidth, tflops = measure_bandwidth(args.device), measure_tflops(args.device)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name} on {gpu}, torch {torch.__version__}: copies {bandwidth:,.0f} GB/s, products {tflops:,.2f} TFLOP/s")
    print(f"{'':16}{'TFLOP':>12}{'GB':>12}{'s at best':>10}  bound by")
    halves = {
        "sample": print_phases(sampling_phases(shape, work), tflops, bandwidth),
        "train": print_phases(training_phases(shape, work), tflops, bandwidth),
    }
    print(f"{'step':40}{sum(halves.values()):10.3f}  sampling {halves['sample']:.3f}, training {halves['train']:.3f}")
    for side, row in (measured["rows"] if measured else {}).items():
        for half, best in (*halves.items(), ("step", sum(halves.values()))):
            if f"{half}_s" in row:
                print(f"{side}: {half} took {row[f'{half}_s']:.3f} s, {best / row[f'{half}_s']:.0%} of the roofline")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
