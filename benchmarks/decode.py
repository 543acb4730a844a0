"""Milliseconds per token of decoding, by the number of rows and the length of their prompt, against the floor.

    python benchmarks/decode.py [--model qwen3-4b] [--rows 1,8,32,64,128] [--context 67,4096] [--tokens 256]

The time of a token is the difference between two lengths of completions, so the prompt and the start do not count. Each
case runs once before it is measured: compilation and graph capture do not count either. The floor reads the weights and
the cache once, at the bandwidth of a large copy on this device.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from roofline import measure_bandwidth
from workloads import MODELS, NoText, random_model

from retrain.config import load_config
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling.attention import ATTENTION_NAME, register
from retrain.modeling.policy import Policy, adapt
from retrain.types import Sampling

REPEATS = 3


def decode_ms(engine: PyTorchEngine, prompt: np.ndarray, rows: int, tokens: int) -> float:
    """The best of a few: milliseconds per token of the longer completions beyond the shorter ones."""

    def seconds(length: int) -> float:
        begin = time.perf_counter()
        engine.generate([prompt], Sampling(max_tokens=length, n=rows))
        return time.perf_counter() - begin

    short, long = tokens // 4, tokens
    seconds(long)
    seconds(short)
    return min(seconds(long) - seconds(short) for _ in range(REPEATS)) / (long - short) * 1000


def floor_ms(policy: Policy, rows: int, context: float, bandwidth: float) -> float:
    """Reading every weight of the model and the keys and values of every row once."""
    model = policy.causal_lm.config
    size = next(policy.causal_lm.parameters()).element_size()
    head = model.head_dim or model.hidden_size // model.num_attention_heads
    cache = 2 * model.num_hidden_layers * model.num_key_value_heads * head * size * rows * context
    base = sum(p.numel() for name, p in policy.causal_lm.named_parameters() if "lora_" not in name)
    return (base * size + cache) / bandwidth / 1e6


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--rows", default="1,8,32,64,128")
    parser.add_argument("--context", default="67,4096")
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    register()
    config = load_config(None, {"model.lora_rank": 32, "training.max_tokens": args.tokens})
    policy = adapt(random_model(args.model, ATTENTION_NAME, device), config.model, config.lora, 0, lambda line: None)
    vocabulary = policy.vocabulary
    # An end token that random weights practically never draw.
    policy.stop_ids = (vocabulary - 1,)
    engine = PyTorchEngine(policy, config.inference, NoText(), lambda *_: None)
    bandwidth = measure_bandwidth(device)
    print(f"{args.model} on {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}")
    print(f"{engine.description}; a large copy moves {bandwidth:.0f} GB/s")
    print(f"{'rows':>6}{'prompt':>8}{'ms/token':>10}{'floor':>8}{'ratio':>7}{'tokens/s':>10}")
    for context in map(int, args.context.split(",")):
        prompt = np.random.default_rng(0).integers(10, vocabulary - 10, context)
        for rows in map(int, args.rows.split(",")):
            ms = decode_ms(engine, prompt, rows, args.tokens)
            least = floor_ms(policy, rows, context + 0.625 * args.tokens, bandwidth)
            print(
                f"{rows:>6}{context:>8}{ms:>10.2f}{least:>8.2f}{ms / least:>7.1f}{1000 * rows / ms:>10.0f}", flush=True
            )


if __name__ == "__main__":
    main()
