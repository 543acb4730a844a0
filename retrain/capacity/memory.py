"""Memory of weights and of training, from the model's shape and the configuration.

Imports no torch. The local learner plans micro-batches with these formulas and corrects them by measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from retrain.capacity.sampling import Sampler
from retrain.config import TrainConfig
from retrain.runtime.devices import cache_memory, is_on_cpu
from retrain.types import JsonObject

# Tokens per micro-batch where memory allows: enough to saturate the largest GPUs.
MICRO_BATCH = 9216
# Limit for micro-batches of two long sequences, which are trained 7% faster together than one by one.
LARGEST_MICRO_BATCH = 18432
# Below this a GPU idles between kernels: recomputing activations is cheaper than smaller micro-batches.
SMALL_MICRO_BATCH = 4096
# Maximum float32 bytes of one slice of logits.
LOGITS_SLICE = 512 << 20
# Share of GPU memory reserved for allocator fragmentation.
SPARE = 0.06
# CUDA context, kernels and workspaces; derived from two runs with little free memory (docs/capacity-planning.md).
CONTEXT_BYTES = 700 << 20
# Bytes per trained weight, by width: gradients of the weight and of its float32 master; two AdamW moments; and the sum
# of all these with the weight and its master. float32 weights are their own masters.
GRADIENT_BYTES = {2: 2 + 4, 4: 4}
MOMENT_BYTES = 8
ADAPTER_BYTES = {2: 2 + 4 + GRADIENT_BYTES[2] + MOMENT_BYTES, 4: 4 + GRADIENT_BYTES[4] + MOMENT_BYTES}
# Bytes per weight of quantized matrices; NF4 has a float32 scale per 64 weights.
QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
# Assumed prompt length where it is unknown.
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """Shape of a dense decoder, from its config.json. Sizes are per layer."""

    hidden: int
    layers: int
    queries: int
    """Heads times head size."""
    keys: int
    """Key heads times head size."""
    key_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    gated: bool
    """Whether the MLP multiplies two projections."""
    norms_queries: bool
    """Whether queries and keys are normalized, which stores them twice for the backward pass."""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Linear layers (in, out) by their usual names."""
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
        """Parameters of one layer's linear layers."""
        return sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def parameters(self) -> int:
        """All parameters: layers, norms and embeddings."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.layer_parameters + 2 * self.hidden) + self.hidden + embeddings

    @property
    def cached_values(self) -> int:
        """Values per token in the KV cache."""
        return 2 * self.layers * self.keys

    def _adapted(self, target_modules: str) -> list[tuple[int, int]]:
        names = [name.strip() for name in target_modules.split(",")]
        return [size for name, size in self.matrices.items() if names == ["all-linear"] or name in names]

    def adapter_parameters(self, rank: int, target_modules: str) -> int:
        """rank × (in + out) per adapted layer."""
        return self.layers * rank * sum(map(sum, self._adapted(target_modules)))

    def adapted_parameters(self, target_modules: str) -> int:
        """Parameters of the adapted layers, of which sampling keeps a merged copy."""
        return self.layers * sum(a * b for a, b in self._adapted(target_modules))


# Families that normalize queries and keys.
_NORMED_FAMILIES = ("qwen3", "gemma3", "gemma3_text", "olmo2", "cohere2")
_UNGATED_FAMILIES = ("gpt2", "gpt_neox", "phi", "opt", "gptj", "falcon")


def has_experts(settings: Mapping[str, object]) -> bool:
    """Whether the settings of a language model are those of a mixture of experts; some dense ones have zero experts."""
    return any(value for key, value in settings.items() if key.endswith("experts"))


def read_shape(config: JsonObject) -> Shape | None:
    """The shape in a config.json; None if it is not a dense decoder."""
    settings = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert isinstance(settings, Mapping)
    family = str(settings.get("model_type", ""))

    def first(*names: str) -> int:
        return int(next(settings[name] for name in names if settings.get(name) is not None))

    if has_experts(settings):
        return None
    try:
        hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
        head = int(settings.get("head_dim") or hidden // heads)
        key_heads = int(settings.get("num_key_value_heads") or heads)
        intermediate = int(settings.get("intermediate_size") or settings.get("n_inner") or 4 * hidden)
        layers, vocabulary = first("num_hidden_layers", "n_layer"), first("vocab_size")
    except (StopIteration, TypeError, ValueError, ZeroDivisionError):
        return None
    if min(hidden, heads, head, key_heads, intermediate, layers, vocabulary) < 1:
        return None
    return Shape(
        hidden, layers, heads * head, key_heads * head, key_heads, intermediate, vocabulary,
        tied=bool(settings.get("tie_word_embeddings", family == "gpt2")),
        gated=family not in _UNGATED_FAMILIES,
        norms_queries=family in _NORMED_FAMILIES,
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingCost:
    """Activation memory of a forward and backward pass in compiled layers."""

    shape: Shape
    rank: int
    width: int
    """Bytes per value."""
    correction: float = 1.0
    """Measured over estimated memory."""

    @property
    def layer(self) -> float:
        """Bytes per token that a layer keeps for the backward pass.

        Inputs and outputs of both norms; queries, keys, values and output of attention; their projections again where
        they are normalized; the MLP's projections and their product; the output of each LoRA A matrix. Frozen
        matrices need no inputs, but the adapters do.
        """
        s = self.shape
        attention = 2 * s.queries + 2 * s.keys + (s.queries + s.keys if s.norms_queries else 0)
        mlp = (3 if s.gated else 2) * s.intermediate
        numbers = 4 * s.hidden + attention + mlp + self.rank * len(s.matrices)
        return self.correction * self.width * numbers

    @property
    def boundary(self) -> float:
        """Bytes per token that a recomputed layer keeps: its input."""
        return self.correction * self.width * self.shape.hidden

    def logits(self, tokens: int) -> int:
        """One slice of logits and its gradient."""
        return 2 * self.width * min(LOGITS_SLICE // 4, tokens * self.shape.vocabulary)

    def bytes(self, tokens: int, recomputed: int = 0) -> int:
        """Peak activations of a micro-batch, with the first `recomputed` layers keeping their inputs only.

        Includes one more layer, for gradients in flight or the layer being recomputed.
        """
        s = self.shape
        kept = (s.layers - recomputed) * self.layer + recomputed * self.boundary
        ends = 4 * self.width * s.hidden
        return int(tokens * (kept + self.layer + ends)) + self.logits(tokens)


@dataclass(frozen=True)
class TrainingPlan:
    """Micro-batch size and recomputed layers of a step."""

    micro_batch_tokens: int
    recomputed_layers: int
    bytes: int
    fits: bool


def plan_training(cost: TrainingCost, room: float, longest: int, wanted: int = 0, always: bool = False) -> TrainingPlan:
    """The largest micro-batches and fewest recomputed layers that `room` bytes allow for sequences of `longest` tokens.

    `wanted` fixes the micro-batch; `always` recomputes every layer.
    """
    layers = cost.shape.layers
    most = max(wanted or min(max(MICRO_BATCH, 2 * longest), LARGEST_MICRO_BATCH), longest)
    least = most if wanted else max(longest, min(SMALL_MICRO_BATCH, most))
    for recomputed in [layers] if always else range(layers + 1):
        tokens = _tokens_that_fit(cost, room, recomputed, most)
        if tokens >= least:
            return TrainingPlan(tokens, recomputed, cost.bytes(tokens, recomputed), True)
    tokens = most if wanted else max(longest, _tokens_that_fit(cost, room, layers, most))
    needed = cost.bytes(tokens, layers)
    return TrainingPlan(tokens, layers, needed, needed <= room)


def wanted_training(
    cost: TrainingCost, usable: float, longest: int, trained: int, micro_batch_tokens: int = 0, recompute: bool = False
) -> int:
    """Bytes beside the weights with which training works at its usual speed, of `usable` bytes in all."""
    plan = plan_training(cost, math.inf, longest, micro_batch_tokens or MICRO_BATCH, recompute)
    return plan.bytes + trained * (MOMENT_BYTES + GRADIENT_BYTES[cost.width]) + math.ceil(SPARE * usable)


def _tokens_that_fit(cost: TrainingCost, room: float, recomputed: int, most: int) -> int:
    if cost.bytes(most, recomputed) <= room:
        return most
    slices = cost.logits(most)
    slope = (cost.bytes(most, recomputed) - slices) / most
    return max(0, math.floor((room - slices) / slope))


@dataclass(frozen=True)
class Workload:
    """The parameters of a run that memory and time depend on."""

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
    """Whether this process also samples."""
    sampler: Sampler = field(default_factory=Sampler)
    overlaps: bool = False
    """Whether training begins before sampling ends, so that both need their memory at once."""
    keeps_reference: bool = False
    """Whether a frozen copy of the model is kept as the reference."""
    quantization: str = "none"
    has_cache_scales: bool = False
    """Whether the cache has a float32 scale per token and head."""
    sharing: int = 1
    """Runs that share the model, each with its own adapter; they step in turn."""

    def cache_bytes_per_token(self, shape: Shape) -> int:
        """Keys and values of one token in all layers."""
        scales = 2 * shape.layers * shape.key_heads * 4 if self.has_cache_scales else 0
        return shape.cached_values * self.cache_width + scales

    @property
    def matrix_width(self) -> float:
        """Bytes per weight of the layers' matrices."""
        return QUANTIZED_BYTES.get(self.quantization, self.width)

    def weight_bytes(self, shape: Shape, parameters: int) -> int:
        """Bytes of a model's weights; of quantized matrices one at a time is also dequantized."""
        matrices = shape.layers * shape.layer_parameters
        largest = max(rows * columns for rows, columns in shape.matrices.values())
        dequantized = largest * self.width if self.quantization != "none" else 0
        return int((parameters - matrices) * self.width + matrices * self.matrix_width) + dequantized

    @property
    def completions(self) -> int:
        """Completions per step."""
        return self.prompts * self.group

    def trained_parameters(self, shape: Shape) -> int:
        """Trainable parameters: the adapter's, or all for rank 0."""
        return shape.adapter_parameters(self.rank, self.target_modules) if self.rank else shape.parameters

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.max_tokens


def workload_of(config: TrainConfig, prompt_tokens: int) -> Workload:
    """The workload of a configuration, given the prompt length, which `max_prompt_tokens` limits."""
    prompt_tokens = min(prompt_tokens, config.training.max_prompt_tokens or prompt_tokens)
    width = {"fp32": 4, "bf16": 2, "auto": 4 if is_on_cpu(config.backend.devices) else 2}[config.model.dtype]
    campaign = config.campaign
    return Workload(
        config.training.batch_size, config.training.group_size, prompt_tokens, config.training.max_tokens,
        config.model.lora_rank, config.lora.target_modules, width,
        cache_width={"auto": width, "bf16": 2, "fp8": 1, "int8": 1}[config.inference.kv_cache_dtype],
        micro_batch_tokens=config.memory.micro_batch_tokens, recompute=config.memory.gradient_checkpointing,
        samples_here=config.inference.engine == "pytorch" and "," not in config.backend.devices,
        sampler=_sampler_of(config, width),
        overlaps=config.training.overlap is True,
        keeps_reference=bool(config.kl.beta and not config.model.lora_rank)
        and not config.memory.offload_untrained_models,
        quantization=config.model.quantization, has_cache_scales=config.inference.kv_cache_dtype == "int8",
        sharing=max(1, campaign.max_workers) if campaign is not None and campaign.share_model else 1,
    )  # fmt: skip


def _sampler_of(config: TrainConfig, width: int) -> Sampler:
    inference, on_cpu = config.inference, is_on_cpu(config.backend.devices)
    copy_width = {"bf16": 2, "fp8": 1}.get(inference.dtype, width)
    # Weights in another precision are copies in any case.
    is_other = copy_width != width
    return Sampler(
        merge_adapter="always" if is_other else inference.merge_adapter,
        may_merge_in_place=not (is_other or on_cpu or config.training.overlap is True),
        copy_width=copy_width,
        is_paged=not on_cpu and inference.attention_kernel != "flash",
        shares_prompts=inference.prefix_caching,
        prompts_at_once=config.training.prompts_per_sampling,
        cache_room=cache_memory() if on_cpu else None,
    )
