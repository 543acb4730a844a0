"""FLOPs and bytes of each phase of a step, and how fast a card could do them at best."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from retrain.capacity.memory import Shape, Workload

# Part of the roofline that whole steps reach; 0.5 was seen on an H200 with a 4B model (docs/benchmarks.md).
REACHED = 0.5


@dataclass(frozen=True)
class Card:
    """What a device can do at best, by its data sheet: dense bf16 products, memory traffic, memory."""

    name: str
    tflops: float
    bandwidth: float
    """GB/s."""
    memory: float
    """GB."""


# The longest name that a device's name contains counts.
CARDS = (
    Card("B200", 2250, 8000, 180),
    Card("H200", 989, 4800, 141),
    Card("H100 PCIe", 756, 2000, 80),
    Card("H100", 989, 3350, 80),
    Card("A100-SXM4-40GB", 312, 1555, 40),
    Card("A100", 312, 2039, 80),
    Card("L40S", 362, 864, 48),
    Card("L4", 121, 300, 24),
    Card("A10G", 70, 600, 24),
    Card("RTX 5090", 209, 1792, 32),
    Card("RTX 4090", 165, 1008, 24),
    Card("RTX 3090", 71, 936, 24),
    Card("T4", 65, 320, 16),
)


def find_card(name: str) -> Card | None:
    """The card of the table that a name such as `NVIDIA H200` or `h200` means."""
    known = [card for card in CARDS if card.name.lower() in name.lower()]
    return max(known, key=lambda card: len(card.name), default=None)


def detect_card() -> Card | None:
    """The first GPU here, by nvidia-smi, with its own memory; None where there is none or the table lacks it."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        name, mebibytes = told.splitlines()[0].rsplit(",", 1)
        card = find_card(name)
        return card and Card(name.strip(), card.tflops, card.bandwidth, int(mebibytes) * 2**20 / 1e9)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Phase:
    """Work that is done in one go."""

    name: str
    flops: float
    bytes: float

    def seconds(self, tflops: float, bandwidth: float) -> float:
        """At best: whichever of arithmetic and memory takes longer. Bandwidth is in GB/s."""
        return max(self.flops / (tflops * 1e12), self.bytes / (bandwidth * 1e9))


def sampling_phases(shape: Shape, work: Workload) -> list[Phase]:
    """Prompts once a group, then a token of every completion at a time, if all of them run to the end."""
    layers, head = shape.layers * shape.layer_parameters, shape.vocabulary * shape.hidden
    prompts = work.prompts * work.prompt_tokens
    prefill = 2 * layers * prompts + _attention(shape, work.prompt_tokens, 0) * work.prompts
    sampled = work.completions * work.max_tokens
    # Keys and values are read once a token, over a row that grows.
    cached = shape.cached_values * work.cache_width * sampled * (work.prompt_tokens + work.max_tokens / 2)
    weights = (layers + head) * work.width
    decode = 2 * (layers + head) * sampled + _attention(shape, work.max_tokens, work.prompt_tokens) * work.completions
    adapted = shape.adapted_parameters(work.target_modules) if work.rank else 0
    return [
        Phase("adapter folding", 2 * work.rank * adapted, 2 * adapted * work.width),
        Phase("prefill", prefill, layers * work.width),
        Phase("decode", decode, work.max_tokens * weights + cached),
    ]


def training_phases(shape: Shape, work: Workload, recomputed_layers: int = 0) -> list[Phase]:
    """One step over all completions, prompts computed once a group; frozen matrices have no gradient of their own."""
    head = shape.vocabulary * shape.hidden
    trained = work.trained_parameters(shape)
    adapter, whole = (trained, 1) if work.rank else (0, 2)
    layers = shape.layers * shape.layer_parameters
    predicted = work.completions * work.max_tokens
    tokens = work.prompts * work.prompt_tokens + predicted
    attention = (
        _attention(shape, work.prompt_tokens, 0) * work.prompts
        + _attention(shape, work.max_tokens, work.prompt_tokens) * work.completions
    )
    forward = 2 * (layers + adapter) * tokens + attention
    again = forward * recomputed_layers / shape.layers
    # Flash attention's backward pass does five products where its forward pass does two.
    backward = (2 * whole * layers + 4 * adapter) * tokens + 2.5 * attention
    # Numbers that a layer writes and reads again, roughly those it keeps.
    traffic = 2 * tokens * shape.layers * work.width * (6 * shape.hidden + 3 * shape.queries + 3 * shape.intermediate)
    return [
        Phase("train forward", forward + 2 * head * predicted, traffic + layers * work.width),
        Phase(
            "train backward", backward + again + 2 * (1 + whole) * head * predicted, 2 * traffic + layers * work.width
        ),
        Phase("optimiser", 15 * trained, trained * (4 * 4 + 3 * 4 + 2)),
    ]


def _attention(shape: Shape, queries: int, before: int) -> float:
    """Causal attention of `queries` tokens that follow `before` others, in all layers: two products."""
    seen = queries * before + queries * queries / 2
    return 4.0 * shape.layers * shape.queries * seen


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step at the roofline."""

    sample: float
    train: float

    @property
    def likely(self) -> float:
        """What a step takes where it reaches as much of the roofline as was seen."""
        return (self.sample + self.train) / REACHED


def step_time(shape: Shape, work: Workload, card: Card, recomputed_layers: int = 0) -> StepTime:
    """The roofline of a step's two halves."""
    halves = (sampling_phases(shape, work), training_phases(shape, work, recomputed_layers))
    sample, train = (sum(phase.seconds(card.tflops, card.bandwidth) for phase in half) for half in halves)
    return StepTime(sample, train)
