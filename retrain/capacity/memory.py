"""What a step needs: bytes by part and seconds by roofline, from a model's shape and a configuration alone.

Nothing here imports torch or touches a device. `retrain plan` and `explain` print it; the local learner plans its
micro-batches by the same arithmetic and corrects it by what it measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.config import TrainConfig
from retrain.runtime.devices import is_on_cpu

# Tokens a micro-batch has where memory allows: enough to keep the largest GPUs busy.
MICRO_BATCH = 9216
# Below this a GPU idles between kernels; recomputing activations then costs less than still smaller micro-batches.
SMALL_MICRO_BATCH = 4096
# Float32 bytes of logits that one slice of the vocabulary product may stand for.
LOGITS_SLICE = 512 << 20
# Part of a card's memory that a plan leaves alone: CUDA's own, the allocator's gaps.
SPARE = 0.06
# Weight, gradient, float32 master, its gradient, and the two moments of AdamW; float32 adapters are their own masters.
ADAPTER_BYTES = {2: 2 + 2 + 4 + 4 + 8, 4: 4 + 4 + 8}
# How long a prompt is taken to be by those who cannot know.
PROMPT_TOKENS = 256
MEMORY_PARTS = ("weights", "sampling_copy", "adapter", "kv_cache", "activations", "logits")
_CACHE_BLOCK = 128
_CACHE_SPARE_TOKENS = 16


@dataclass(frozen=True)
class Shape:
    """A dense decoder as its config.json tells it. Sizes are of one layer."""

    hidden: int
    layers: int
    queries: int
    """Heads times head size."""
    keys: int
    """Key heads times head size."""
    intermediate: int
    vocabulary: int
    tied: bool
    gated: bool
    """Whether the MLP multiplies two projections."""
    norms_queries: bool
    """Whether queries and keys are normalised, which keeps them a second time for the backward pass."""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Linear maps of a layer, (in, out), by the names that most families give them."""
        attention = {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
        }
        gate = {"gate_proj": (self.hidden, self.intermediate)} if self.gated else {}
        mlp = {"up_proj": (self.hidden, self.intermediate), "down_proj": (self.intermediate, self.hidden)}
        return attention | gate | mlp

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's linear maps."""
        return sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def parameters(self) -> int:
        """All weights: layers, norms and embeddings."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.layer_parameters + 2 * self.hidden) + self.hidden + embeddings

    @property
    def cached_values(self) -> int:
        """Numbers that the KV cache holds for one token."""
        return 2 * self.layers * self.keys

    def adapter_parameters(self, rank: int, target_modules: str) -> int:
        """rank × (in + out) for each adapted map."""
        names = [name.strip() for name in target_modules.split(",")]
        sizes = [sum(size) for name, size in self.matrices.items() if names == ["all-linear"] or name in names]
        return self.layers * rank * sum(sizes)

    def adapted_parameters(self, target_modules: str) -> int:
        """Weights of the maps that are adapted, of which sampling keeps a folded copy."""
        names = [name.strip() for name in target_modules.split(",")]
        chosen = [a * b for name, (a, b) in self.matrices.items() if names == ["all-linear"] or name in names]
        return self.layers * sum(chosen)


# Families that keep a normed and an unnormed copy of queries and keys.
_NORMED_FAMILIES = ("qwen3", "gemma3", "gemma3_text", "olmo2", "cohere2")
_UNGATED_FAMILIES = ("gpt2", "gpt_neox", "phi", "opt", "gptj", "falcon")


def read_shape(config: Mapping[str, Any]) -> Shape | None:
    """The shape in a config.json; None where it is not that of a dense decoder."""
    told = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert isinstance(told, Mapping)
    family = str(told.get("model_type", ""))

    def first(*names: str) -> int:
        return int(next(told[name] for name in names if told.get(name) is not None))

    if any(told.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    try:
        hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
        head = int(told.get("head_dim") or hidden // heads)
        key_heads = int(told.get("num_key_value_heads") or heads)
        intermediate = int(told.get("intermediate_size") or told.get("n_inner") or 4 * hidden)
        layers, vocabulary = first("num_hidden_layers", "n_layer"), first("vocab_size")
    except (StopIteration, TypeError, ValueError, ZeroDivisionError):
        return None
    if min(hidden, heads, head, key_heads, intermediate, layers, vocabulary) < 1:
        return None
    return Shape(
        hidden, layers, heads * head, key_heads * head, intermediate, vocabulary,
        tied=bool(told.get("tie_word_embeddings", family == "gpt2")),
        gated=family not in _UNGATED_FAMILIES,
        norms_queries=family in _NORMED_FAMILIES,
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingCost:
    """Bytes of a forward and backward pass in compiled layers."""

    shape: Shape
    rank: int
    width: int
    """Bytes of a number."""
    correction: float = 1.0
    """What was measured over what was estimated."""

    @property
    def layer(self) -> float:
        """Kept for the backward pass by one layer for one token.

        Both norms' inputs and outputs; queries, keys and values as attention takes them and its output; their
        projections once more where they are normed; the MLP's projections and their product; what lies between the two
        adapter matrices of each map. The frozen matrices themselves need no inputs, but the adapters do.
        """
        s = self.shape
        attention = 2 * s.queries + 2 * s.keys + (s.queries + s.keys if s.norms_queries else 0)
        mlp = (3 if s.gated else 2) * s.intermediate
        numbers = 4 * s.hidden + attention + mlp + self.rank * len(s.matrices)
        return self.correction * self.width * numbers

    @property
    def boundary(self) -> float:
        """Kept by one recomputed layer for one token: its input."""
        return self.correction * self.width * self.shape.hidden

    def logits(self, tokens: int) -> int:
        """Logits of one slice of rows and their slope."""
        return 2 * self.width * min(LOGITS_SLICE // 4, tokens * self.shape.vocabulary)

    def bytes(self, tokens: int, recomputed: int = 0) -> int:
        """Activations of a micro-batch at their largest, the first `recomputed` layers keeping their inputs alone.

        On top comes one layer's worth: of the gradients that flow through a layer, or of a layer computed again.
        """
        s = self.shape
        kept = (s.layers - recomputed) * self.layer + recomputed * self.boundary
        ends = 4 * self.width * s.hidden
        return int(tokens * (kept + self.layer + ends)) + self.logits(tokens)


@dataclass(frozen=True)
class TrainingPlan:
    """How a step is cut up."""

    micro_batch_tokens: int
    recomputed_layers: int
    bytes: int
    fits: bool


def plan_training(cost: TrainingCost, room: float, longest: int, wanted: int = 0, always: bool = False) -> TrainingPlan:
    """The largest micro-batches and fewest recomputed layers that `room` bytes allow for sequences of `longest` tokens.

    `wanted` fixes the micro-batch; `always` recomputes every layer.
    """
    layers = cost.shape.layers
    most = max(wanted or MICRO_BATCH, longest)
    least = most if wanted else max(longest, min(SMALL_MICRO_BATCH, most))
    for recomputed in [layers] if always else range(layers + 1):
        tokens = _tokens_that_fit(cost, room, recomputed, most)
        if tokens >= least:
            return TrainingPlan(tokens, recomputed, cost.bytes(tokens, recomputed), True)
    tokens = most if wanted else max(longest, _tokens_that_fit(cost, room, layers, most))
    needed = cost.bytes(tokens, layers)
    return TrainingPlan(tokens, layers, needed, needed <= room)


def _tokens_that_fit(cost: TrainingCost, room: float, recomputed: int, most: int) -> int:
    if cost.bytes(most, recomputed) <= room:
        return most
    slices = cost.logits(most)
    slope = (cost.bytes(most, recomputed) - slices) / most
    return max(0, math.floor((room - slices) / slope))


@dataclass(frozen=True)
class Workload:
    """As much of a run as memory and time depend on."""

    prompts: int
    group: int
    prompt_tokens: int
    max_tokens: int
    rank: int
    target_modules: str
    width: int
    cache_width: int
    micro_batch_tokens: int = 0
    recompute: bool = False
    samples_here: bool = True
    """Whether this process samples as well, with a folded copy of the adapted matrices and a cache."""
    keeps_reference: bool = False
    """Whether a frozen copy of the whole model stays beside the one that learns."""

    @property
    def completions(self) -> int:
        """Completions a step."""
        return self.prompts * self.group

    def trained_parameters(self, shape: Shape) -> int:
        """Weights that learn: the adapter's, or all of them for rank 0."""
        return shape.adapter_parameters(self.rank, self.target_modules) if self.rank else shape.parameters

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.max_tokens


def workload_of(config: TrainConfig, prompt_tokens: int) -> Workload:
    """The workload of a configuration; how long prompts are it cannot know."""
    width = {"fp32": 4, "bf16": 2, "auto": 4 if is_on_cpu(config.backend.devices) else 2}[config.model.dtype]
    return Workload(
        config.training.batch_size, config.training.group_size, prompt_tokens, config.training.max_tokens,
        config.model.lora_rank, config.lora.target_modules, width,
        cache_width={"auto": width, "bf16": 2, "fp8": 1, "int8": 1}[config.inference.kv_cache_dtype],
        micro_batch_tokens=config.memory.micro_batch_tokens, recompute=config.memory.gradient_checkpointing,
        samples_here=config.inference.engine == "pytorch" and "," not in config.backend.devices,
        keeps_reference=bool(config.kl.beta and not config.model.lora_rank)
        and not config.memory.offload_untrained_models,
    )  # fmt: skip


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device by part, at the moment of a step that needs most."""

    weights: int
    sampling_copy: int
    adapter: int
    """What learns, with its gradient, float32 master and moments."""
    kv_cache: int
    activations: int
    logits: int
    training: TrainingPlan

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.sampling_copy + self.adapter + self.kv_cache + self.activations + self.logits


def plan_memory(shape: Shape, work: Workload, memory: int | None = None) -> MemoryPlan:
    """What a step of this workload holds at its peak, on a card of `memory` bytes or one that is large enough."""
    cost = TrainingCost(shape, work.rank, work.width)
    weights = shape.parameters * work.width * (2 if work.keeps_reference else 1)
    # A model that is trained as a whole is sampled from as it is, and its weights are counted already.
    copy = shape.adapted_parameters(work.target_modules) * work.width if work.samples_here and work.rank else 0
    held = ADAPTER_BYTES[work.width] - (0 if work.rank else work.width)
    adapter = work.trained_parameters(shape) * held
    cache = cache_bytes(shape, work) if work.samples_here else 0
    room = math.inf if memory is None else memory * (1 - SPARE) - weights - copy - adapter - cache
    training = plan_training(cost, room, work.longest, work.micro_batch_tokens, work.recompute)
    # A step may have fewer tokens than a micro-batch holds.
    tokens = min(training.micro_batch_tokens, work.completions * work.longest)
    activations = cost.bytes(tokens, training.recomputed_layers)
    logits = cost.logits(tokens)
    return MemoryPlan(weights, copy, adapter, cache, activations - logits, logits, training)


def cache_bytes(shape: Shape, work: Workload) -> int:
    """A dense cache: every completion has room for the longest prompt and all its tokens."""
    capacity = -(-(work.longest + _CACHE_SPARE_TOKENS) // _CACHE_BLOCK) * _CACHE_BLOCK
    return work.completions * capacity * shape.cached_values * work.cache_width


def largest_batch(shape: Shape, work: Workload, memory: int) -> int:
    """Most prompts a step whose completions are sampled in one wave and trained on within `memory`; 0 when none fit."""

    def fits(prompts: int) -> bool:
        plan = plan_memory(shape, _with_prompts(work, prompts), memory)
        return plan.training.fits and plan.total <= memory * (1 - SPARE)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= 1 << 20 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with_prompts(work: Workload, prompts: int) -> Workload:
    return Workload(**{**vars(work), "prompts": prompts})
