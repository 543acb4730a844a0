"""Rules about the model, its devices and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator

from retrain.config.options import option_issue
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue
from retrain.plugins import SERVER_ENGINES


def check_dropout(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Sampling and training in parallel would share one random generator, and runs would not be reproducible."""
    split = "," in config.backend.devices
    ahead = "several [backend] devices" if split else "[training] async_steps"
    if config.lora.dropout and (split or (config.training.async_steps and config.samples_separately)):
        yield option_issue(
            "lora.dropout",
            f"does not go with {ahead}.",
            "Try: dropout = 0.0",
            ("lora", "backend", "training", "inference"),
        )


def check_sampling_device(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A sampler on a server uses no device of this machine."""
    server = config.inference.engine in SERVER_ENGINES
    if config.backend.backend == "local" and server and "," in config.backend.devices:
        yield option_issue(
            "backend.devices",
            f"names several, but [inference] engine {json.dumps(config.inference.engine)} samples on a server.",
            f'Try: devices = "{config.backend.devices.split(",")[-1].strip()}"; [training] async_steps = 1 overlaps',
            ("backend", "inference"),
        )


def check_full_training(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Servers and services take adapters; a full model is trained and sampled in this process."""
    if config.model.lora_rank:
        return
    if config.backend.backend == "tinker":
        yield option_issue(
            "model.lora_rank",
            "= 0 trains the full model, and tinker trains adapters.",
            "Try: lora_rank = 32",
            ("model", "backend"),
        )
    if config.inference.engine in SERVER_ENGINES:
        yield option_issue(
            "model.lora_rank",
            f"= 0 trains the full model, and the engine {json.dumps(config.inference.engine)} is given adapters.",
            'Try: [inference] engine = "pytorch"',
            ("model", "inference"),
        )


def check_quantization(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Quantized matrices are frozen, kept whole by each process, and sampled from in this process."""
    if config.model.quantization == "none" or config.backend.backend == "tinker":
        return
    value = f"= {json.dumps(config.model.quantization)}"
    if not config.model.lora_rank:
        yield option_issue(
            "model.quantization",
            f"{value} freezes the weights below an adapter, and lora_rank = 0 trains them.",
            'Try: lora_rank = 32, or quantization = "none"',
            ("model",),
        )
    if config.inference.engine in SERVER_ENGINES:
        yield option_issue(
            "model.quantization",
            f"{value} trains different weights than the engine {json.dumps(config.inference.engine)} samples from.",
            'Try: [inference] engine = "pytorch", or quantization = "none"',
            ("model", "inference"),
        )
    elif config.inference.dtype == "fp8":
        yield option_issue(
            "model.quantization",
            f'{value} is also what is sampled from, so [inference] dtype = "fp8" cannot be.',
            'Try: [inference] dtype = "auto"',
            ("model", "inference"),
        )
    if config.distributed.fsdp:
        yield option_issue(
            "model.quantization",
            f"{value} does not go with [distributed] fsdp, which shards weights in floating point.",
            'Try: fsdp = false, or quantization = "none"',
            ("model", "distributed"),
        )


def check_micro_batches(config: TrainConfig) -> Iterator[ConfigIssue]:
    """The number and the size of micro-batches determine each other."""
    if config.memory.micro_batches and config.memory.micro_batch_rows:
        yield option_issue(
            "memory.micro_batches", "and micro_batch_rows both size the micro-batches.", "Set one of them.", ("memory",)
        )


def check_sharding(config: TrainConfig) -> Iterator[ConfigIssue]:
    """FSDP2 shards weights over the processes of one local run; they are gathered where needed."""
    if config.backend.backend != "local" or not config.distributed.fsdp:
        return
    if config.campaign is not None:
        yield option_issue(
            "distributed.fsdp",
            "needs several processes, but each run of a [campaign] is one.",
            "Try: leave it out",
            ("distributed", "backend"),
        )
    if not config.distributed.gather_for_generation and config.inference.engine == "pytorch":
        yield option_issue(
            "distributed.gather_for_generation",
            '= false leaves no rank with full weights, which [inference] engine "pytorch" samples from.',
            'Try: gather_for_generation = true, or engine = "vllm"',
            ("distributed", "inference"),
        )


def check_student_weights(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A student without its own model is sampled from the policy's weights, which must not be sharded."""
    shares = config.teaching.enabled and not config.teaching.student_model and config.model.lora_rank
    if shares and config.distributed.fsdp:
        yield option_issue(
            "teaching.student_model",
            "is empty: the student would be the policy's own weights, which [distributed] fsdp shards.",
            f"Try: student_model = {json.dumps(config.model.model)}",
            ("teaching", "model", "distributed"),
        )


def check_batch_size_bounds(config: TrainConfig) -> Iterator[ConfigIssue]:
    """The minimum batch size may not exceed the maximum."""
    pressure = config.backpressure
    if pressure.max_batch_size < pressure.min_batch_size:
        yield option_issue(
            "backpressure.max_batch_size",
            f"is {pressure.max_batch_size}, below min_batch_size = {pressure.min_batch_size}.",
            f"Try: max_batch_size = {pressure.min_batch_size}",
            ("backpressure",),
        )
