"""Roofline model: FLOPs and bytes of each phase of a step, and its minimum time on a GPU."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from dataclasses import dataclass

from retrain.capacity.memory import Shape, TrainingPlan, Workload
from retrain.capacity.sampling import SamplingPlan

# Share of the roofline that complete steps reach; measured 0.5 on an H200 with a 4B model (docs/benchmarks.md).
ROOFLINE_SHARE = 0.5
# GB/s from pinned host memory: PCIe 4.0 × 16.
HOST_BANDWIDTH = 25


@dataclass(frozen=True)
class Gpu:
    """Data sheet values of a GPU: dense bf16 throughput, memory bandwidth, memory."""

    name: str
    tflops: float
    bandwidth: float
    """GB/s."""
    memory: float
    """GB."""


# The longest matching name is used.
GPUS = (
    Gpu("GB200", 2500, 8000, 186),
    Gpu("B200", 2250, 8000, 180),
    Gpu("GH200", 989, 4000, 96),
    Gpu("H200", 989, 4800, 141),
    Gpu("H100 PCIe", 756, 2000, 80),
    Gpu("H100", 989, 3350, 80),
    Gpu("A100 40GB", 312, 1555, 40),
    Gpu("A100", 312, 2039, 80),
    Gpu("L40S", 362, 864, 48),
    Gpu("L4", 121, 300, 24),
    Gpu("A10G", 70, 600, 24),
    Gpu("RTX 5090", 209, 1792, 32),
    Gpu("RTX 4090", 165, 1008, 24),
    Gpu("RTX 3090", 71, 936, 24),
    Gpu("T4", 65, 320, 16),
)


def find_gpu(name: str) -> Gpu | None:
    """The GPU with a name such as `NVIDIA H200`, `h200` or `RTX4090`. Whole words count: an L40 is not an L4."""
    words = _words(name)
    known = [gpu for gpu in GPUS if _words(gpu.name) <= words or gpu.name.replace(" ", "").lower() in words]
    return max(known, key=lambda gpu: len(gpu.name), default=None)


def gpus_with_words(name: str) -> list[Gpu]:
    """GPUs whose name has these words and more, such as the RTX 4090 for `4090`."""
    words = _words(name)
    return [gpu for gpu in GPUS if words and words <= _words(gpu.name)]


def _words(name: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", name.lower()))


def gpus_with_memory(gigabytes: float) -> list[Gpu]:
    """GPUs with about this much memory."""
    return [gpu for gpu in GPUS if abs(gpu.memory - gigabytes) <= 0.05 * gigabytes]


def detect_gpu() -> Gpu | None:
    """The first GPU according to nvidia-smi, with its actual memory; None if there is none or it is unknown."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        name, mebibytes = output.splitlines()[0].rsplit(",", 1)
        gpu = find_gpu(name)
        return gpu and Gpu(name.strip(), gpu.tflops, gpu.bandwidth, int(mebibytes) * 2**20 / 1e9)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Phase:
    """One phase of a step."""

    name: str
    flops: float
    bytes: float

    def seconds(self, tflops: float, bandwidth: float) -> float:
        """Minimum time: the longer of compute and memory traffic. Bandwidth is in GB/s."""
        return max(self.flops / (tflops * 1e12), self.bytes / (bandwidth * 1e9))


def sampling_phases(shape: Shape, work: Workload, sampling: SamplingPlan | None = None) -> list[Phase]:
    """Prefill once per group, then decode all completions to `max_tokens`, at once unless the plan has them take turns.

    Every turn reads all weights for every token, and dequantizes those that are quantized.
    """
    layers, head = shape.layers * shape.layer_parameters, shape.vocabulary * shape.hidden
    prompts = work.prompts * work.prompt_tokens
    prefill = 2 * layers * prompts + _attention(shape, work.prompt_tokens, 0) * work.prompts
    sampled = work.completions * work.max_tokens
    # Keys and values of a growing row are read for every token.
    cached = work.cache_bytes_per_token(shape) * sampled * (work.prompt_tokens + work.max_tokens / 2)
    weights = (layers + head) * work.width
    decode = 2 * (layers + head) * sampled + _attention(shape, work.max_tokens, work.prompt_tokens) * work.completions
    is_merged = work.quantization == "none" and (sampling is None or sampling.merging != "never")
    adapted = shape.adapted_parameters(work.target_modules) if work.rank and is_merged else 0
    turns = work.completions / sampling.at_once if sampling is not None else 1
    return [
        Phase("adapter folding", 2 * work.rank * adapted, 2 * adapted * work.width),
        Phase("prefill", prefill, layers * work.width),
        Phase("decode", decode, turns * work.max_tokens * weights + cached),
        *_dequantization(shape, work, turns * work.max_tokens + 1),
    ]


def training_phases(shape: Shape, work: Workload, plan: TrainingPlan | None = None) -> list[Phase]:
    """One step over all completions, prompts once per group; frozen matrices have no weight gradients.

    Without a plan, it is one micro-batch and nothing is recomputed.
    """
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
    recomputed = plan.recomputed_layers / shape.layers if plan is not None else 0
    micro_batches = math.ceil(tokens / plan.micro_batch_tokens) if plan is not None else 1
    again = forward * recomputed
    # Flash attention: five products in the backward pass, two in the forward pass.
    backward = (2 * whole * layers + 4 * adapter) * tokens + 2.5 * attention
    # Activations that a layer writes and reads, approximately those it keeps.
    traffic = 2 * tokens * shape.layers * work.width * (6 * shape.hidden + 3 * shape.queries + 3 * shape.intermediate)
    return [
        Phase("train forward", forward + 2 * head * predicted, traffic + layers * work.width),
        Phase(
            "train backward", backward + again + 2 * (1 + whole) * head * predicted, 2 * traffic + layers * work.width
        ),
        # Again in the backward pass, and in a forward pass that is repeated.
        *_dequantization(shape, work, micro_batches * (2 + recomputed)),
        Phase("optimizer", 15 * trained, trained * (4 * 4 + 3 * 4 + 2)),
    ]


def _dequantization(shape: Shape, work: Workload, passes: float) -> list[Phase]:
    """Quantized matrices are read and written in bf16 before every product, which then reads those.

    These are kernels of their own, so their time adds to that of the products. For a few rows there is one kernel for
    both with `nf4`; how much it saves has not been measured.
    """
    if work.quantization == "none":
        return []
    matrices = shape.layers * shape.layer_parameters
    return [Phase("dequantization", 0, passes * matrices * (work.matrix_width + work.width))]


def _attention(shape: Shape, queries: int, before: int) -> float:
    """FLOPs of causal attention of `queries` tokens after `before` others, in all layers."""
    seen = queries * before + queries * queries / 2
    return 4.0 * shape.layers * shape.queries * seen


@dataclass(frozen=True)
class StepTime:
    """Minimum seconds of a step."""

    sample: float
    train: float

    @property
    def likely(self) -> float:
        """Expected seconds, at the measured share of the roofline."""
        return (self.sample + self.train) / ROOFLINE_SHARE


def step_time(
    shape: Shape, work: Workload, gpu: Gpu, training: TrainingPlan | None = None, sampling: SamplingPlan | None = None
) -> StepTime:
    """Minimum time of sampling and training."""
    halves = (sampling_phases(shape, work, sampling), training_phases(shape, work, training))
    sample, train = (sum(phase.seconds(gpu.tflops, gpu.bandwidth) for phase in half) for half in halves)
    if sampling is not None and sampling.merging == "in-place":
        # The matrices are restored from the host after sampling.
        sample += shape.adapted_parameters(work.target_modules) * work.width / (HOST_BANDWIDTH * 1e9)
    return StepTime(sample, train)
