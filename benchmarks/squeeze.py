"""Seconds and memory of analyzing and compressing a 128-rank adapter shaped like a 4B model's, 252 layers.

    python benchmarks/squeeze.py [--layers 36] [--rank 128] [--compress-to 32]

Targets: the analysis takes at most 20 s on two cores, and its memory stays within twice the adapter. It runs in one
thread, and its processor time is held against the target: on a machine that others use, the clock says little.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_SECONDS, MOST_TIMES = 20.0, 2.0
# (in, out) of the seven matrices of a layer of Qwen3-4B.
SHAPES = {
    "self_attn.q_proj": (2560, 4096),
    "self_attn.k_proj": (2560, 1024),
    "self_attn.v_proj": (2560, 1024),
    "self_attn.o_proj": (4096, 2560),
    "mlp.gate_proj": (2560, 9728),
    "mlp.up_proj": (2560, 9728),
    "mlp.down_proj": (9728, 2560),
}
CHILD = """
import json, resource, sys, time
import torch
from retrain.squeeze import analyze_adapter, compress_adapter
torch.set_num_threads(1)
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
bare, started, worked = peak(), time.perf_counter(), cpu()
if sys.argv[1] == "analyze":
    print(analyze_adapter(sys.argv[2]).table(), file=sys.stderr)
else:
    compress_adapter(sys.argv[2], sys.argv[2] + "_small", int(sys.argv[3]))
print(json.dumps([time.perf_counter() - started, cpu() - worked, peak() - bare]))
"""


def write_adapter(folder: Path, layers: int, rank: int) -> int:
    """A random adapter whose singular values decay, in float32; returns its bytes."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    decay = torch.exp(-torch.arange(rank) / (rank / 4))
    tensors = {}
    for layer in range(layers):
        for name, (width, height) in SHAPES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(height, rank, generator=generator) * decay
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(SHAPES)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def main() -> int:
    """Print the table; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--compress-to", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "adapter"
        folder.mkdir()
        size = write_adapter(folder, given.layers, given.rank)
        print(f"{7 * given.layers} layers, rank {given.rank}, {size / 1e9:.2f} GB in float32")
        print(f"{'':<10}{'seconds':>9}{'CPU s':>8}{'memory':>10}{'/ adapter':>11}")
        missed = False
        for task in ("analyze", "compress"):
            command = [sys.executable, "-c", CHILD, task, str(folder), str(given.compress_to)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seconds, cpu, memory = json.loads(done.stdout)
            print(f"{task:<10}{seconds:>9.1f}{cpu:>8.1f}{memory / 1e9:>7.2f} GB{memory / size:>10.2f}x")
            missed |= task == "analyze" and (cpu > MOST_SECONDS or memory > MOST_TIMES * size)
    print(f"targets of the analysis: {'MISSED' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
