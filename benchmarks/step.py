"""One RLVR step, ours against a peer's, on the same workload in one process tree.

    python benchmarks/step.py --workload w1 [--peer trl] [--steps 3] [--peer-steps 1] [--tokenizer DIR]

Weights are random and so are rewards: the time of a step does not depend on what it learns. Completions end at the cap,
or, where a workload says so, at any of a set of stop tokens, which spreads their lengths. `long` trains on one sequence
of 16,384 tokens with activations recomputed, without sampling. The peer runs in a process of its own, with its usual
settings and the same model, adapter, prompts and lengths. Numbers are of the last step of each.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_06B = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
PROMPT = 67
# An end token that random weights practically never draw.
NEVER = 151_935


@dataclass(frozen=True)
class Workload:
    family: str
    shape: dict[str, int]
    prompts: int
    group: int
    tokens: int
    stops: int = 0
    """How many tokens of the vocabulary end a completion."""


WORKLOADS = {
    "w1": Workload("qwen3", QWEN3_4B, 8, 16, 512),
    "w2": Workload("qwen3", QWEN3_4B, 8, 16, 2048, stops=240),
    "w3": Workload("qwen3", QWEN3_06B, 32, 16, 1024),
    "w4": Workload("llama", SMOLLM2, 4, 4, 64),
    "long": Workload("qwen3", QWEN3_4B, 1, 1, 16_384 - PROMPT),
}


def random_model(workload: Workload, attention: str, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common = dict(
        max_position_embeddings=40_960, attn_implementation=attention, tie_word_embeddings=True, **workload.shape
    )
    torch.manual_seed(0)
    if workload.family == "llama":
        config = LlamaConfig(vocab_size=49_152, num_key_value_heads=3, eos_token_id=0, pad_token_id=2, **common)
        return LlamaForCausalLM(config).to(device)
    config = Qwen3Config(
        vocab_size=151_936, num_key_value_heads=8, head_dim=128, eos_token_id=NEVER, pad_token_id=2, **common
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def stop_tokens(workload: Workload, vocabulary: int) -> list[int]:
    if not workload.stops:
        return [vocabulary - 1]
    return random.Random(1).sample(range(1000, vocabulary), workload.stops)


def synchronise(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_ours(workload: Workload, steps: int, device: str) -> dict[str, float]:
    from retrain.backends.local import LocalBackend
    from retrain.backends.local.attention import ATTENTION_NAME, register
    from retrain.backends.local.learner import Learner
    from retrain.backends.local.model import adapt
    from retrain.config import load_config
    from retrain.inference_engine.pytorch import PyTorchEngine
    from retrain.sampling import training_distribution
    from retrain.types import Datum

    register()
    alone = workload.prompts * workload.group == 1
    options = {
        "training.max_tokens": workload.tokens,
        "training.group_size": max(2, workload.group),
        "training.batch_size": workload.prompts,
        "memory.gradient_checkpointing": alone,
    }
    config = load_config(None, options)
    model = random_model(workload, ATTENTION_NAME, device)
    vocabulary = model.config.vocab_size
    started = synchronise(device)
    policy = adapt(model, config.model, config.lora, 0, lambda line: None)
    policy.stop_ids = tuple(stop_tokens(workload, vocabulary))
    learner = Learner(policy, config, print)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, vocabulary - 10, PROMPT) for _ in range(workload.prompts)]
    backend = (
        None if alone else LocalBackend(learner, PyTorchEngine(policy, config.inference, _NoText(), lambda *_: None))
    )
    sampling = training_distribution(config)
    numbers: dict[str, float] = {}
    for step in range(steps):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = synchronise(device)
        if backend is None:
            rows = [
                (prompts[0], rng.integers(10, vocabulary - 10, workload.tokens), np.zeros(workload.tokens, np.float32))
            ]
        else:
            groups = backend.sampler(step).generate(prompts, sampling)
            rows = [(p, c.token_ids_T, c.logprobs_T) for p, g in zip(prompts, groups, strict=True) for c in g]
        sampled = synchronise(device)
        datums = [
            Datum(p, ids, logprobs, np.full(len(ids), rng.normal()), np.ones(len(ids), bool))
            for p, ids, logprobs in rows
        ]
        told = learner.step(datums)
        done = synchronise(device)
        tokens = sum(len(ids) for _, ids, _ in rows)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
        numbers = {
            "sample_s": sampled - begin, "train_s": done - sampled, "step_s": done - begin, "tokens": tokens,
            "longest": max(len(ids) for _, ids, _ in rows), "peak_gib": peak,
            "train_tokens_per_s": (tokens + PROMPT * len(rows)) / (done - sampled),
            "ratio_mean": told["ratio_mean"], "ratio_max": told["ratio_max"],
        }  # fmt: skip
        if step == 0:
            print(f"ours: first step done {done - started:.1f} s after the weights were there", flush=True)
        print("ours", json.dumps({k: round(float(v), 4) for k, v in numbers.items()}), flush=True)
    return numbers


class _NoText:
    def batch_decode(self, rows: list[Any], skip_special_tokens: bool) -> list[str]:
        return [""] * len(rows)


def run_trl(workload: Workload, steps: int, device: str, tokenizer_folder: str) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, padding_side="left")
    model = random_model(workload, "sdpa", device)
    stops = stop_tokens(workload, model.config.vocab_size)
    rng = random.Random(0)
    # The tokenizer is a small one: single digits make a prompt of about the wanted length.
    text = "".join(str(rng.randrange(10)) + "+" for _ in range(PROMPT // 2 - 2))
    completions = workload.prompts * workload.group
    micro = min(16, completions)
    times: dict[str, float] = {}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times["begin"] = synchronise(device)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = synchronise(device) - times["begin"]
            peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
            told = {"sample_s": times["sample"], "train_s": step - times["sample"], "step_s": step, "peak_gib": peak}
            print("peer", json.dumps(told | {"tokens": times["tokens"]}), flush=True)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [rng.random() for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": [text] * 64}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), max_steps=steps, num_generations=workload.group,
            max_completion_length=workload.tokens, per_device_train_batch_size=micro,
            gradient_accumulation_steps=completions // micro, temperature=0.7, beta=0.0, bf16=device == "cuda",
            gradient_checkpointing=device == "cuda", learning_rate=4e-5, report_to=[], save_strategy="no",
            use_cpu=device == "cpu", generation_kwargs={"eos_token_id": stops, "pad_token_id": 2},
        ),
    )  # fmt: skip
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = synchronise(device)
        out = generate(*args, **kwargs)
        times["sample"] = synchronise(device) - begin
        times["tokens"] = float(sum(len(ids) for ids in out[1]))
        return out

    trainer._generate = timed
    trainer.train()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer", choices=["trl"], default=None)
    parser.add_argument("--peer-steps", type=int, default=1)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peer installed")
    default = Path(__file__).parents[1] / "retrain" / "builtin" / "tiny"
    parser.add_argument("--tokenizer", default=str(default), help="any tokenizer folder with a chat template")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    device = "cuda" if torch.cuda.is_available() and args.workload != "w4" else "cpu"
    if args.as_peer:
        run_trl(workload, args.peer_steps, device, args.tokenizer)
        return 0
    rows = {"retrain": run_ours(workload, args.steps, device)}
    if args.peer:
        command = [args.peer_python, __file__, "--as-peer", "--workload", args.workload, "--tokenizer", args.tokenizer]
        result = subprocess.run(
            [*command, "--peer-steps", str(args.peer_steps)], capture_output=True, text=True, check=False
        )
        told = [json.loads(line[5:]) for line in result.stdout.splitlines() if line.startswith("peer ")]
        if not told:
            print(result.stdout[-2000:], result.stderr[-4000:], file=sys.stderr)
            return 1
        rows[args.peer] = told[-1]
    print(
        f"\n{args.workload} on {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}"
    )
    print(f"{'':10}{'sample':>9}{'train':>9}{'step':>9}{'tokens':>9}{'peak GiB':>10}{'ratio':>8}")
    ours = rows["retrain"]["step_s"]
    for name, row in rows.items():
        times = "".join(f"{row[key]:9.2f}" for key in ("sample_s", "train_s", "step_s"))
        print(f"{name:10}{times}{row['tokens']:9.0f}{row['peak_gib']:10.1f}{row['step_s'] / ours:8.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
