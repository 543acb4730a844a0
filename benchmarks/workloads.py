"""The models and workloads that the benchmarks of a step share: real shapes, random weights."""

from __future__ import annotations

import atexit
import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

PROMPT = 67
# An end token that random weights practically never draw.
NEVER = 151_935

QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
QWEN3_4B = QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_06B = QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True,
}  # fmt: skip


class NoText:
    """In the tokenizer's place: what is sampled is counted, never read."""

    def batch_decode(self, rows: list[Any], skip_special_tokens: bool) -> list[str]:
        return [""] * len(rows)


@dataclass(frozen=True)
class Model:
    family: str
    shape: dict[str, Any]


MODELS = {
    "qwen3-4b": Model("qwen3", QWEN3_4B),
    "qwen3-0.6b": Model("qwen3", QWEN3_06B),
    "smollm2-135m": Model("llama", SMOLLM2),
    "llama-1b": Model("llama", LLAMA_1B),
}


@dataclass(frozen=True)
class Workload:
    model: str
    prompts: int
    group: int
    tokens: int
    stops: int = 0
    """How many tokens of the vocabulary end a completion."""
    rank: int = 32
    """That of the adapter; 0 is full fine-tuning."""


WORKLOADS = {
    "w1": Workload("qwen3-4b", 8, 16, 512),
    "w2": Workload("qwen3-4b", 8, 16, 2048, stops=240),
    "w3": Workload("qwen3-0.6b", 32, 16, 1024),
    "w4": Workload("smollm2-135m", 4, 4, 64),
    "w5": Workload("qwen3-4b", 8, 16, 10_240, stops=76),
    "full": Workload("qwen3-0.6b", 8, 16, 512, rank=0),
    "full-4b": Workload("qwen3-4b", 8, 16, 512, rank=0),
    "long": Workload("qwen3-4b", 1, 1, 16_384 - PROMPT),
}


def random_model(name: str, attention: str, device: str) -> Any:
    """A model of a real shape: bf16 on a GPU, float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    model = MODELS[name]
    common = {"max_position_embeddings": 40_960, "attn_implementation": attention, "pad_token_id": 2, **model.shape}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            if model.family == "llama":
                return LlamaForCausalLM(LlamaConfig(eos_token_id=0, **common))
            return Qwen3ForCausalLM(Qwen3Config(eos_token_id=NEVER, **common))
    finally:
        torch.set_default_dtype(torch.float32)


def random_prompts(workload: Workload, vocabulary: int) -> list[Any]:
    """Token ids, the same for us and for a peer that samples from ids."""
    rng = np.random.default_rng(0)
    return [rng.integers(10, vocabulary - 10, PROMPT) for _ in range(workload.prompts)]


BALLAST = """import sys, time, torch
free, _ = torch.cuda.mem_get_info()
taken = int(free - float(sys.argv[1]) * 2**30)
held = torch.empty(max(taken, 0), dtype=torch.uint8, device="cuda")
print("held" if taken >= 0 else f"this GPU has only {free / 2**30:.1f} GiB free", flush=True)
time.sleep(3600)"""


def hold_back(free_gib: float) -> None:
    """Another process takes GPU memory until this much is free, as on a smaller GPU; it ends with this one."""
    command = [sys.executable, "-c", BALLAST, str(free_gib)]
    ballast = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(ballast.kill)
    assert ballast.stdout is not None
    if (said := ballast.stdout.readline().strip()) != "held":
        raise SystemExit(f"--free {free_gib:g}: {said or 'the process that holds memory back failed'}.")


def stop_tokens(workload: Workload, vocabulary: int) -> list[int]:
    """What ends a completion, the same for us and for a peer."""
    if not workload.stops:
        return [vocabulary - 1]
    return random.Random(1).sample(range(1000, vocabulary), workload.stops)
