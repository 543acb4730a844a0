"""Memory of a step by component and by phase, as the engine and the learner will divide it.

Imports no torch. `retrain plan` and `explain` print it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from retrain.capacity.memory import (
    ADAPTER_BYTES,
    CONTEXT_BYTES,
    GRADIENT_BYTES,
    MOMENT_BYTES,
    SPARE,
    Shape,
    TrainingCost,
    TrainingPlan,
    Workload,
    plan_training,
    wanted_training,
)
from retrain.capacity.sampling import (
    BLOCK,
    BYTES_PER_LOGIT,
    SMALLEST,
    Merging,
    SamplingPlan,
    beside_logits,
    blocks_for,
    cache_share,
    dense_capacity,
    largest_running_batch,
    leaves_unmerged,
    merges_in_place,
)

MEMORY_PARTS = ("weights", "sampling_copy", "adapter", "kv_cache", "activations", "logits")
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a step by component, and the peaks of its two phases."""

    weights: int
    sampling_copy: int
    adapter: int
    """Trainable parameters with gradients, float32 masters and moments."""
    gradients: int
    """The part of `adapter` that only training holds."""
    kv_cache: int
    activations: int
    logits: int
    sampling: SamplingPlan
    training: TrainingPlan
    frees_cache: bool
    """Whether the KV cache is freed before training."""

    @property
    def sampling_peak(self) -> int:
        """Bytes while sampling."""
        held = self.weights + self.sampling_copy + self.adapter - self.gradients
        return held + self.kv_cache + self.sampling.logits

    @property
    def training_peak(self) -> int:
        """Bytes while training."""
        held = self.weights + self.sampling_copy + self.adapter + (0 if self.frees_cache else self.kv_cache)
        return held + self.activations + self.logits

    @property
    def total(self) -> int:
        """Peak bytes of a step."""
        return max(self.sampling_peak, self.training_peak)

    @property
    def fits(self) -> bool:
        """Whether one completion can be sampled, and one micro-batch trained on."""
        return self.sampling.fits and self.training.fits


def plan_memory(shape: Shape, work: Workload, memory: int | None = None, parameters: int | None = None) -> MemoryPlan:
    """Memory of a step, on a GPU with `memory` bytes or one that is large enough.

    `parameters` is the number of weights in the model's files, if known.
    """
    cost = TrainingCost(shape, work.rank, work.width)
    weights = work.weight_bytes(shape, parameters or shape.parameters) * (2 if work.keeps_reference else 1)
    trained = work.trained_parameters(shape)
    adapter = trained * (ADAPTER_BYTES[work.width] - (0 if work.rank else work.width))
    gradients = trained * GRADIENT_BYTES[work.width]
    # Of several runs over one model, only the one that steps has gradients.
    adapter += (work.sharing - 1) * (adapter - gradients)
    usable = _UNLIMITED if memory is None else max(memory - CONTEXT_BYTES, 0)
    free = max(usable - weights - adapter + gradients, 0)
    # The engine is built before the first step allocates the moments.
    sampling = _plan_sampling(shape, work, free, free + trained * MOMENT_BYTES, usable)
    room = math.inf if memory is None else usable * (1 - SPARE) - weights - adapter - sampling.copies
    wanted = plan_training(cost, math.inf, work.longest, work.micro_batch_tokens, work.recompute)
    # An eager sampler keeps no cache; others free it if keeping it would force smaller micro-batches.
    frees = not work.overlaps and (not work.sampler.is_paged or room - sampling.cache < wanted.bytes)
    room -= 0 if frees else sampling.cache
    training = plan_training(cost, room, work.longest, work.micro_batch_tokens, work.recompute)
    # A step may have fewer tokens than the learner's micro-batches may hold.
    tokens = min(training.micro_batch_tokens, work.completions * work.longest)
    activations = cost.bytes(tokens, training.recomputed_layers)
    training = TrainingPlan(tokens, training.recomputed_layers, activations, activations <= room)
    logits = cost.logits(tokens)
    return MemoryPlan(
        weights, sampling.copies, adapter, gradients, sampling.cache, activations - logits, logits,
        sampling, training, frees and sampling.cache > 0,
    )  # fmt: skip


def _plan_sampling(shape: Shape, work: Workload, free: int, free_at_start: int, usable: int) -> SamplingPlan:
    if not work.samples_here:
        return SamplingPlan(None, 0, 0, 0, work.completions, True)
    merging, copies = _choose_merging(shape, work, free_at_start, usable)
    room = max(free - copies, 0)
    rows = min(work.prompts, work.sampler.prompts_at_once or work.prompts) * work.group
    running = min(max(rows, SMALLEST), largest_running_batch(shape.vocabulary, room))
    logits = running * shape.vocabulary * BYTES_PER_LOGIT
    token = work.cache_bytes_per_token(shape)
    if not work.sampler.is_paged:
        row = dense_capacity(work.longest) * token
        limit = room if work.sampler.cache_room is None else min(room, work.sampler.cache_room)
        at_once = min(cache_share(limit) // row, rows)
        return SamplingPlan(merging, copies, max(at_once, 1) * row, logits, max(at_once, 1), at_once > 0)
    needed = blocks_at_limits(work, rows)
    fitting = cache_share(beside_logits(running, shape.vocabulary, room)) // (BLOCK * token)
    least = blocks_for(work.longest) + 1
    cache = min(needed, max(fitting, least)) * BLOCK * token
    at_once = min(running, rows, rows * fitting // needed)
    return SamplingPlan(merging, copies, cache, logits, max(at_once, 1), fitting >= least)


def blocks_at_limits(work: Workload, rows: int) -> int:
    """Blocks of a cache that holds every row at its limit: a group shares the full blocks of its prompt, every row has
    one to spare, and there is a scratch block."""
    shared = (work.group - 1) * (work.prompt_tokens // BLOCK) if work.sampler.shares_prompts else 0
    return rows * (blocks_for(work.longest) + 1) - rows // work.group * shared + 1


def _choose_merging(shape: Shape, work: Workload, free: int, usable: int) -> tuple[Merging | None, int]:
    """How the adapter is merged, and the bytes of weights that only sampling uses."""
    if not work.rank:
        return None, 0
    adapter = work.trained_parameters(shape)
    is_unmerged = leaves_unmerged(work.sampler.merge_adapter, shape.parameters + adapter, work.width)
    if work.quantization != "none" or is_unmerged:
        return "never", adapter * work.width
    copies = shape.adapted_parameters(work.target_modules) * (work.sampler.copy_width or work.width)
    cost = TrainingCost(shape, work.rank, work.width)
    training = wanted_training(cost, usable, work.longest, adapter, work.micro_batch_tokens, work.recompute)
    if work.sampler.may_merge_in_place and merges_in_place(copies, free, training):
        return "in-place", 0
    return "copies", copies


def largest_batch(shape: Shape, work: Workload, memory: int, parameters: int | None = None) -> int:
    """Maximum prompts per step whose completions are all sampled at once; 0 if not even one prompt's are."""

    def fits(prompts: int) -> bool:
        plan = plan_memory(shape, replace(work, prompts=prompts), memory, parameters)
        return plan.fits and plan.sampling.at_once >= prompts * work.group

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= 1 << 20 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
