"""The memory that `retrain plan` foretells against what PyTorch allocated at its peak, for several model shapes.

    python benchmarks/memory.py [--models qwen3-4b,llama-1b] [--prompts 4] [--group 16] [--tokens 512] [--json FILE]

Each model has random weights and rank-32 adapters on all linear layers. Measured: a sampled batch; then a training step
with the cache still held, without recompute, with half of the layers recomputed, and with all. Needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workloads import MODELS, PROMPT, NoText, random_model

from retrain.capacity.memory import ADAPTER_BYTES, MOMENT_BYTES, Shape, TrainingCost, read_shape, workload_of
from retrain.capacity.plan import plan_memory

GIB = 2**30


def measure(name: str, prompts: int, group: int, tokens: int) -> list[dict[str, Any]]:
    from retrain.backends.local.learner import Learner
    from retrain.config import load_config
    from retrain.inference_engine.pytorch import PyTorchEngine
    from retrain.modeling.attention import ATTENTION_NAME, register
    from retrain.modeling.policy import adapt
    from retrain.modeling.sampling import training_distribution
    from retrain.types import Datum

    register()
    options = {"training.max_tokens": tokens, "training.group_size": group, "training.batch_size": prompts}
    config = load_config(None, options)
    model = random_model(name, ATTENTION_NAME, "cuda")
    vocabulary = model.config.vocab_size
    shape = read_shape(model.config.to_dict())
    assert shape is not None
    policy = adapt(model, config.model, config.lora, 0, lambda line: None)
    policy.stop_ids = (vocabulary - 1,)
    learner = Learner(policy, config, print)
    engine = PyTorchEngine(policy, config.inference, NoText(), lambda *_: None)
    rng = np.random.default_rng(0)
    asked = [rng.integers(10, vocabulary - 10, PROMPT) for _ in range(prompts)]
    planned = plan_memory(shape, workload_of(config, PROMPT))
    held = planned.weights + planned.sampling_copy + planned.adapter + planned.kv_cache
    rows = []
    engine.generate(asked, training_distribution(config))
    torch.cuda.synchronize()
    # Moments exist only once a step was taken.
    sampling_estimate = planned.sampling_peak - planned.adapter * MOMENT_BYTES // ADAPTER_BYTES[2]
    rows.append({"model": name, "what": "sampling", "estimate": sampling_estimate, "measured": peak()})
    groups = engine.generate(asked, training_distribution(config))
    datums = [
        Datum(
            p, c.token_ids_T, c.logprobs_T, np.full(len(c.token_ids_T), rng.normal()), np.ones(len(c.token_ids_T), bool)
        )
        for p, completions in zip(asked, groups, strict=True)
        for c in completions
    ]
    learner.step(datums)
    learner.memory.cost = None  # No plan of its own: the number of recomputed layers is set here.
    for recomputed in (0, shape.layers // 2, shape.layers):
        learner.memory.recomputed_layers = recomputed
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        learner.step(datums)
        fed = max(packed_tokens(batch) for batch in learner.split(datums))
        estimate = held + training_bytes(shape, config.model.lora_rank, fed, recomputed)
        what = f"training, {recomputed} of {shape.layers} layers recomputed, {fed} tokens"
        rows.append({"model": name, "what": what, "estimate": estimate, "measured": peak()})
    engine.shutdown()
    return rows


def training_bytes(shape: Shape, rank: int, tokens: int, recomputed: int) -> int:
    return TrainingCost(shape, rank, 2).bytes(tokens, recomputed)


def packed_tokens(batch: list[Any]) -> int:
    from retrain.modeling.packing import pack

    return pack(batch, torch.device("cpu"), False).token_ids.shape[1]


def peak() -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/memory.py needs a GPU: PyTorch measures what it allocates only there.", file=sys.stderr)
        return 2
    rows = []
    for name in args.models.split(","):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        rows += measure(name, args.prompts, args.group, args.tokens)
    print(f"\nmemory on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'model':14}{'estimate':>10}{'measured':>10}{'off by':>8}  what")
    for row in rows:
        off = row["estimate"] / row["measured"] - 1
        print(f"{row['model']:14}{row['estimate'] / GIB:10.2f}{row['measured'] / GIB:10.2f}{off:8.0%}  {row['what']}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
