"""One RLVR step, ours against a peer's, on the same workload in one process tree.

    python benchmarks/step.py --workload w1 [--peer trl|trl-vllm|vllm] [--free GIB] [--quantization nf4] [--overlap]

Weights are random and so are rewards: the time of a step does not depend on what it learns. Completions end at the cap,
or, where a workload says so, at any of a set of stop tokens, which spreads their lengths. `long` trains on one sequence
of 16,384 tokens with activations recomputed, without sampling. Each side runs in a process of its own, with the same
model, adapter, prompts and lengths, the peer with its usual settings. With `--peer trl`, `trl-retrain` is the same
script with retrain's import; in `trl-vllm`, TRL samples with vLLM on the same GPU. The peer `vllm` only samples, with
the adapter. `--free` holds memory back, as on a smaller GPU. With `--overlap`, complete groups are trained on while
others are still being sampled, and `train` is the time left after that. Numbers are of the last step of each; with
several rounds the sides take turns and the median counts. A peer cut off by --peer-timeout shows what it had done. `CPU
s` is what a step cost all threads of its process, which tells more than seconds on a machine that others use.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workloads import PROMPT, WORKLOADS, NoText, Workload, hold_back, random_model, random_prompts, stop_tokens

Numbers = dict[str, float]
UNKNOWN = math.nan


def synchronize(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else UNKNOWN


def report(numbers: dict[str, Any]) -> None:
    """A line for the parent process: what is known so far."""
    print("metrics", json.dumps({key: round(float(value), 4) for key, value in numbers.items()}), flush=True)


def run_ours(workload: Workload, device: str, args: argparse.Namespace) -> None:
    from retrain.backends.local import LocalBackend
    from retrain.backends.local.learner import Learner
    from retrain.backends.local.memory import training_bytes
    from retrain.backends.local.precision import make_agreement
    from retrain.config import load_config
    from retrain.inference_engine.pytorch import PyTorchEngine, StreamingPyTorchEngine
    from retrain.modeling.attention import ATTENTION_NAME, register
    from retrain.modeling.compiling import start_compiler
    from retrain.modeling.policy import adapt
    from retrain.modeling.quantization import quantize_layers
    from retrain.modeling.sampling import training_distribution
    from retrain.types import Completion, Datum

    register()
    alone = workload.prompts * workload.group == 1
    options = {
        "model.lora_rank": workload.rank,
        "training.max_tokens": workload.tokens,
        "training.group_size": max(2, workload.group),
        "training.batch_size": workload.prompts,
        "memory.gradient_checkpointing": alone,
        "training.deterministic": {"true": True, "false": False}.get(args.deterministic, args.deterministic),
        "model.quantization": args.quantization,
        "training.overlap": args.overlap,
    }
    config = load_config(None, options)
    if device == "cuda":
        start_compiler()
    model = random_model(workload.model, ATTENTION_NAME, device)
    vocabulary = model.config.vocab_size
    if args.quantization != "none":
        quantize_layers(model, args.quantization, torch.device(device))
    started = synchronize(device)
    policy = adapt(model, config.model, config.lora, 0, lambda line: None)
    policy.stop_ids = tuple(stop_tokens(workload, vocabulary))
    learner = Learner(policy, config, print)
    rng = np.random.default_rng(0)
    prompts = random_prompts(workload, vocabulary)
    policy.is_trained_while_sampled = args.overlap
    policy.training_bytes = training_bytes(policy, config)
    kind = StreamingPyTorchEngine if args.overlap else PyTorchEngine
    backend = None if alone else LocalBackend(learner, kind(policy, config.inference, NoText(), lambda *_: None))
    if backend is not None and not args.unchecked:
        learner.agreement = make_agreement(config, policy, backend.engine, print)
    sampling = training_distribution(config)
    datums_P: dict[int, list[Datum]] = {}

    def score(at: int, completions: list[Completion]) -> None:
        datums_P[at] = [
            Datum(
                prompts[at], c.token_ids_T, c.logprobs_T, np.full(len(c.token_ids_T), rng.normal()),
                np.ones(len(c.token_ids_T), bool), at, copy,
            )
            for copy, c in enumerate(completions)
        ]  # fmt: skip
        if args.overlap and backend is not None:
            backend.accumulate(at, datums_P[at])

    for step in range(args.steps):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin, cpu = synchronize(device), time.process_time()
        datums_P.clear()
        if backend is None:
            made_up = rng.integers(10, vocabulary - 10, workload.tokens)
            score(0, [Completion(made_up, np.zeros(workload.tokens, np.float32), "", "length")])
        elif isinstance(engine := backend.sampler(step), StreamingPyTorchEngine):
            engine.generate_each(prompts, sampling, score)
        else:
            for at, completions in enumerate(engine.generate(prompts, sampling)):
                score(at, completions)
        sampled = time.perf_counter() if args.overlap else synchronize(device)
        datums = [datum for at in sorted(datums_P) for datum in datums_P[at]]
        lengths = [len(datum.completion_ids_T) for datum in datums]
        numbers: dict[str, Any] = {"sample_s": sampled - begin, "tokens": sum(lengths), "longest": max(lengths)}
        report(numbers)
        metrics = learner.step(datums, step) if backend is None else backend.train_step(datums, step)
        done = synchronize(device)
        numbers |= {"train_s": done - sampled, "step_s": done - begin, "peak_gib": peak_gib(device)}
        numbers["step_cpu_s"] = time.process_time() - cpu
        numbers["train_tokens_per_s"] = (sum(lengths) + PROMPT * len(datums)) / (done - sampled)
        numbers |= {"ratio_mean": metrics["ratio_mean"], "ratio_max": metrics["ratio_max"]}
        if step == 0:
            print(f"first step done {done - started:.1f} s after the weights were there", flush=True)
        report(numbers)


def run_trl(workload: Workload, steps: int, device: str, tokenizer_folder: str, package: str, has_vllm: bool) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback

    # The same script; only the import differs.
    trl: Any = importlib.import_module(package)
    GRPOConfig, GRPOTrainer = trl.GRPOConfig, trl.GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, padding_side="left")
    model = random_model(workload.model, "sdpa", device)
    stops = stop_tokens(workload, model.config.vocab_size)
    sampling: dict[str, Any] = {"generation_kwargs": {"eos_token_id": stops, "pad_token_id": 2}}
    if has_vllm:
        # vLLM loads the weights from a folder.
        folder = tempfile.mkdtemp()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model.name_or_path = folder
        sampling = {
            "generation_kwargs": {"ignore_eos": True, "stop_token_ids": stops}, "use_vllm": True,
            "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4,
            "vllm_max_model_length": 2 * PROMPT + workload.tokens,
        }  # fmt: skip
    rng = random.Random(0)
    # The tokenizer is a small one: single digits make a prompt of about the wanted length.
    text = "".join(str(rng.randrange(10)) + "+" for _ in range(PROMPT // 2 - 2))
    adapter = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    completions = workload.prompts * workload.group
    micro = min(16, completions)
    begun = cpu = 0.0
    numbers: Numbers = {}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal begun, cpu
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begun, cpu = synchronize(device), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = synchronize(device) - begun
            numbers.update(train_s=step - numbers["sample_s"], step_s=step, peak_gib=peak_gib(device))
            # Logged by our trainer only: TRL does not compare its sampler with its trainer.
            ratios = {
                f"ratio_{name}": values[-1]
                for name in ("mean", "max")
                if (values := trainer._metrics["train"].get(f"importance_ratio/{name}"))
            }
            report(numbers | ratios | {"step_cpu_s": time.process_time() - cpu})

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [rng.random() for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": [text] * 64}),
        processing_class=tokenizer,
        peft_config=adapter if workload.rank else None,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), max_steps=steps, num_generations=workload.group,
            max_completion_length=workload.tokens, per_device_train_batch_size=micro,
            gradient_accumulation_steps=completions // micro, temperature=0.7, beta=0.0, bf16=device == "cuda",
            gradient_checkpointing=device == "cuda", learning_rate=4e-5, report_to=[], save_strategy="no",
            use_cpu=device == "cpu", logging_steps=1000, **sampling,
        ),
    )  # fmt: skip
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = synchronize(device)
        out = generate(*args, **kwargs)
        lengths = [len(ids) for ids in out[1]]
        numbers.clear()
        numbers.update(sample_s=synchronize(device) - begin, tokens=sum(lengths), longest=max(lengths))
        report(numbers)
        return out

    trainer._generate = timed
    trainer.train()


def run_vllm(workload: Workload, steps: int, device: str) -> None:
    """Sampling only, as a trainer asks for it: token ids in, token ids and their log-probs out, an adapter applied."""
    from peft import LoraConfig, get_peft_model
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    folder = Path(tempfile.mkdtemp())
    model = random_model(workload.model, "sdpa", device)
    vocabulary = model.config.vocab_size
    model.save_pretrained(folder / "model")
    adapter = get_peft_model(
        model, LoraConfig(r=workload.rank, lora_alpha=2 * workload.rank, target_modules="all-linear")
    )
    adapter.save_pretrained(folder / "adapter")
    del model, adapter
    if device == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        # What --free holds back counts as used by others.
        share = {"gpu_memory_utilization": 0.92 * free / total}
    else:
        share = {}
    engine = LLM(
        model=str(folder / "model"), skip_tokenizer_init=True, enable_lora=True, max_lora_rank=workload.rank,
        max_model_len=PROMPT + workload.tokens, max_num_seqs=workload.prompts * workload.group,
        dtype="bfloat16" if device == "cuda" else "float32", **share,
    )  # fmt: skip
    sampling = SamplingParams(
        n=workload.group, max_tokens=workload.tokens, temperature=0.7, logprobs=0, detokenize=False,
        stop_token_ids=stop_tokens(workload, vocabulary), ignore_eos=True,
    )  # fmt: skip
    prompts: Any = [{"prompt_token_ids": ids.tolist()} for ids in random_prompts(workload, vocabulary)]
    for _ in range(steps):
        begin = time.perf_counter()
        groups = engine.generate(
            prompts, sampling, use_tqdm=False, lora_request=LoRARequest("adapter", 1, str(folder / "adapter"))
        )
        lengths = [len(completion.token_ids) for group in groups for completion in group.outputs]
        report({"sample_s": time.perf_counter() - begin, "tokens": sum(lengths), "longest": max(lengths)})


def measure(side: str, command: list[str], timeout: float, threads: int) -> Numbers:
    """Run one side; the last numbers it reported, NaN where it did not get that far."""
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    numbers: Numbers = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        alarm = threading.Timer(timeout, process.kill) if timeout else None
        if alarm is not None:
            alarm.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("metrics "):
                latest = json.loads(line.removeprefix("metrics "))
                # A finished step is worth more than the half of the next one.
                if "step_s" in latest or "step_s" not in numbers:
                    numbers = latest
            print(side, line.removeprefix("metrics "), end="", flush=True)
        code = process.wait()
        if alarm is not None:
            alarm.cancel()
    if code:
        print(f"{side} ended early, with code {code}", flush=True)
    return numbers


def medians(rounds: list[Numbers]) -> Numbers:
    keys = {key for numbers in rounds for key in numbers}
    return {key: statistics.median(n[key] for n in rounds if key in n) for key in sorted(keys)}


def print_table(title: str, rows: dict[str, Numbers]) -> None:
    print(f"\n{title}")
    heads = ("sample", "train", "step", "tokens", "tokens/s", "CPU s", "peak GiB", "ratio")
    print(" " * 12 + "".join(f"{head:>{width}}" for head, width in zip(heads, (9, 9, 9, 9, 10, 9, 10, 8), strict=True)))
    ours = rows["retrain"]
    for name, row in rows.items():
        times = "".join(f"{row.get(key, UNKNOWN):9.2f}" for key in ("sample_s", "train_s", "step_s"))
        # A side that only samples is compared with our sampling; a step that was cut off took at least that long.
        whole = "step_s" if "step_s" in row or name != "vllm" else "sample_s"
        least = row.get(whole, row.get("sample_s", UNKNOWN))
        tokens, mark = row.get("tokens", UNKNOWN), "" if whole in row else ">"
        ratio = f"{mark}{least / ours.get(whole, UNKNOWN):.1f}"
        cost = f"{row.get('step_cpu_s', UNKNOWN):9.1f}{row.get('peak_gib', UNKNOWN):10.1f}"
        print(f"{name:12}{times}{tokens:9.0f}{tokens / least:10.0f}{cost}{ratio:>8}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="w1")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer", choices=["trl", "trl-vllm", "vllm"], default=None)
    parser.add_argument("--peer-steps", type=int, default=1)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peer installed")
    parser.add_argument(
        "--peer-timeout", type=float, default=0.0, help="seconds after which the peer is cut off; 0 never"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often both take their turn")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of each side; 0 leaves them be")
    parser.add_argument("--deterministic", choices=["auto", "true", "false"], default="auto", help="ours only")
    parser.add_argument("--unchecked", action="store_true", help="ours without comparing every row's log-probs")
    parser.add_argument("--quantization", choices=["none", "int8", "nf4"], default="none", help="ours only")
    parser.add_argument("--overlap", action="store_true", help="ours only: train while sampling")
    parser.add_argument("--free", type=float, default=0.0, help="GiB of GPU memory to leave free; 0 leaves all")
    parser.add_argument("--json", type=Path, default=None, help="write all numbers to this file as well")
    default = Path(__file__).parents[1] / "retrain" / "builtin" / "tiny"
    parser.add_argument("--tokenizer", default=str(default), help="any tokenizer folder with a chat template")
    parser.add_argument(
        "--side", choices=["retrain", "trl", "trl-retrain", "trl-vllm", "vllm"], default=None, help="run one side only"
    )
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    device = "cuda" if torch.cuda.is_available() and args.workload != "w4" else "cpu"
    if device == "cpu" and args.workload != "w4":
        print(f"{args.workload} needs a GPU, and there is none here.  Try: --workload w4", file=sys.stderr)
        return 2
    if args.free and device != "cuda":
        parser.error("--free holds back GPU memory, and this workload runs on the CPU")
    if args.overlap and device != "cuda":
        parser.error("--overlap trains beside the running batch of a GPU, and this workload runs on the CPU")
    if args.side and args.free:
        hold_back(args.free)
    if args.side == "vllm":
        run_vllm(workload, args.steps, device)
        return 0
    if args.side == "retrain":
        run_ours(workload, device, args)
        return 0
    if args.side:
        package = "retrain.grpo" if args.side == "trl-retrain" else "trl"
        run_trl(workload, args.steps, device, args.tokenizer, package, args.side == "trl-vllm")
        return 0
    sides = {"retrain": (sys.executable, args.steps, 0.0)}
    if args.peer == "trl":
        sides["trl-retrain"] = (args.peer_python, args.steps, 0.0)
    if args.peer:
        sides[args.peer] = (args.peer_python, args.peer_steps, args.peer_timeout)
    rounds_by_side: dict[str, list[Numbers]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, (python, steps, timeout) in sides.items():
            command = [python, __file__, "--side", side, "--workload", args.workload, "--steps", str(steps)]
            command += ["--tokenizer", args.tokenizer, "--deterministic", args.deterministic, "--free", str(args.free)]
            command += ["--quantization", args.quantization, *(["--unchecked"] if args.unchecked else [])]
            command += ["--overlap"] if args.overlap else []
            rounds_by_side[side].append(measure(side, command, timeout, args.threads))
    rows = {side: medians(rounds) for side, rounds in rounds_by_side.items()}
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    memory = f", {args.free:g} GiB free" if args.free else ""
    base = f", {args.quantization}" if args.quantization != "none" else ""
    base += ", overlapped" if args.overlap else ""
    title = f"{args.workload}{base} on {gpu}{memory}, torch {torch.__version__}"
    print_table(title, rows)
    if args.json:
        text = json.dumps({"title": title, "workload": args.workload, "rows": rows, "rounds": rounds_by_side}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all("sample_s" in row or "step_s" in row for row in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
