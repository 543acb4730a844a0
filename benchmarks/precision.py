"""What each precision of the sampling weights and of the KV cache costs and gains.

    python benchmarks/precision.py [--workload w1 | embedded] [--json FILE]

Each row samples the workload twice and shows the second time; then the trainer scores the same tokens in its own
precision: `|Δ|` is the mean absolute difference of log-probs, `ratio` the mean importance ratio, `KL` what a run would
log as kl_sample_train. The workloads of step.py have random weights and serve for speed; `embedded` is the embedded
model in bf16 on its own task, and serves for errors. Needs a GPU; what this one cannot do is shown with its refusal.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workloads import PROMPT, WORKLOADS, NoText, random_model, stop_tokens

CHOICES = (
    {}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}, {"dtype": "fp8"},
    {"dtype": "fp8", "kv_cache_dtype": "fp8"}, {"attention_kernel": "flash"},
)  # fmt: skip
# Rows scored by the trainer; enough for a mean over tens of thousands of tokens.
SCORED = 32


def measure(policy: Any, config: Any, prompts: list[np.ndarray]) -> dict[str, float]:
    from retrain.backends.local.learner import Learner
    from retrain.inference_engine.pytorch import build
    from retrain.modeling.sampling import training_distribution
    from retrain.types import Datum

    engine = build(policy, config.inference, NoText(), lambda *_: None)
    sampling = training_distribution(config)
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        groups = engine.generate(prompts, sampling)
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
    engine.shutdown()
    rows = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    learner = Learner(policy, config, lambda line: None)
    differences = []
    with torch.no_grad():
        for prompt, c in rows[:: max(1, len(rows) // SCORED)]:
            ones = np.ones(len(c.token_ids_T))
            packed = learner.pack([Datum(prompt, c.token_ids_T, c.logprobs_T, ones, ones.astype(bool))])
            differences.append((learner.logprobs(packed) - packed.sampled_logprobs).double().cpu().numpy())
    difference = np.concatenate(differences)
    ratio = np.exp(difference)
    surprisal = -np.concatenate([c.logprobs_T for _, c in rows]).mean()
    return {
        "sample_s": took,
        "tokens_per_s": sum(len(c.token_ids_T) for _, c in rows) / took,
        "error": float(np.abs(difference).mean()),
        "ratio": float(ratio.mean()),
        "kl": float((ratio - 1 - difference).mean()),
        "surprisal": float(surprisal),
    }


def embedded_policy(config: Any) -> tuple[Any, list[np.ndarray]]:
    """The embedded model in bf16 and prompts it knows: trained weights, so that errors mean something."""
    from retrain.data import load_examples
    from retrain.modeling.policy import load_policy
    from retrain.modeling.tokens import PromptEncoder, load_tokenizer

    policy = load_policy(config.model, config.lora, 0, torch.device("cuda", 0), lambda line: None)
    encoder = PromptEncoder(load_tokenizer(config.model.model), "", 0, lambda line: None)
    return policy, [encoder.encode(example) for example in load_examples(config.data, ())[:64]]


def random_policy(workload: Any, config: Any) -> tuple[Any, list[np.ndarray]]:
    """A real shape with random weights, for speed; what it errs by says nothing about a trained model."""
    from retrain.modeling.attention import ATTENTION_NAME, register
    from retrain.modeling.policy import adapt

    register()
    model = random_model(workload.model, ATTENTION_NAME, "cuda")
    policy = adapt(model, config.model, config.lora, 0, lambda line: None)
    policy.stop_ids = tuple(stop_tokens(workload, model.config.vocab_size))
    rng = np.random.default_rng(0)
    return policy, [rng.integers(10, model.config.vocab_size - 10, PROMPT) for _ in range(workload.prompts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "embedded"], default="w1")
    parser.add_argument("--json", type=Path, default=None, help="write all numbers to this file as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/precision.py needs a GPU: the kernels it compares run nowhere else.", file=sys.stderr)
        return 2
    from retrain.config import load_config
    from retrain.errors import ConfigError

    if args.workload == "embedded":
        options: dict[str, Any] = {
            "model.model": "builtin:tiny",
            "data.source": "arithmetic",
            "training.max_tokens": 48,
        }
        policy, prompts = embedded_policy(load_config(None, options))
    else:
        load = WORKLOADS[args.workload]
        options = {"training.max_tokens": load.tokens, "training.group_size": load.group}
        policy, prompts = random_policy(load, load_config(None, options))
    print(f"{args.workload} on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'attention':>10}{'weights':>9}{'cache':>7}{'sample':>9}{'tokens/s':>10}{'|Δ|':>10}{'ratio':>8}{'KL':>10}")
    results = []
    for choice in CHOICES:
        config = load_config(None, options | {f"inference.{k}": v for k, v in choice.items()})
        names = [choice.get(key, "auto") for key in ("attention_kernel", "dtype", "kv_cache_dtype")]
        try:
            row = measure(policy, config, prompts)
        except ConfigError as error:
            print(f"{names[0]:>10}{names[1]:>9}{names[2]:>7}  {error}", flush=True)
            continue
        numbers = f"{row['sample_s']:9.2f}{row['tokens_per_s']:10.0f}{row['error']:10.5f}"
        numbers += f"{row['ratio']:8.4f}{row['kl']:10.6f}"
        print(f"{names[0]:>10}{names[1]:>9}{names[2]:>7}{numbers}", flush=True)
        results.append({"choice": choice, **row})
        gc.collect()
        torch.cuda.empty_cache()
    print(f"mean surprisal of a token: {results[0]['surprisal']:.2f} nats")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
