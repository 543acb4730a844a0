"""Chooses how the engine samples on this device, from the options and the hardware."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer

from retrain.capacity.sampling import Merging, leaves_unmerged, merges_in_place
from retrain.config.schema import Inference
from retrain.errors import ConfigError
from retrain.inference_engine.pytorch.cache import FP8, free_memory
from retrain.inference_engine.pytorch.decode_step import Kernels
from retrain.inference_engine.pytorch.decoder import Decoder
from retrain.inference_engine.pytorch.eager import CachedForward, EagerDecoder
from retrain.inference_engine.pytorch.graphs import GraphDecoder
from retrain.inference_engine.pytorch.native import NativeForward
from retrain.inference_engine.pytorch.weights import SamplingModel, SmallBatch
from retrain.modeling.compiling import compile_layers
from retrain.modeling.policy import Policy
from retrain.modeling.triton_internals import runs_triton

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", FP8: "fp8", torch.int8: "int8"}
TAKES = {
    "attention_kernel": ("default", "flash", "triton"),
    "dtype": ("auto", "bf16", "fp8"),
    "kv_cache_dtype": ("auto", "bf16", "fp8", "int8"),
}
FLASH = 'attention_kernel = "flash"'
# Ada; the first GPUs that compute with 8-bit floats.
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Choice:
    """The chosen components of the engine."""

    device: torch.device
    dtype: torch.dtype
    """Compute precision of the sampling model."""
    in_fp8: bool
    """Whether its matrices are stored in 8 bits."""
    cache_dtype: torch.dtype
    eager_reason: str
    """Why decoding is eager; empty where the Triton kernels and CUDA graphs run."""
    attention_fallback_reason: str
    """Why the model uses its own attention; empty where it uses ours."""
    quantization: str = "none"
    """Quantization of the base model, which is then sampled from with the adapter unmerged."""
    merging: Merging = "copies"
    """Whether the adapter is merged: into copies, into the policy's own matrices if memory is short, or not at all."""

    @property
    def description(self) -> str:
        """Printed at the start of a run."""
        how = "eager" if self.eager_reason else "CUDA graphs"
        if self.device.type == "cuda" and self.eager_reason:
            how += f" ({self.eager_reason})"
        attention = "sdpa attention" if self.eager_reason else "triton attention"
        if self.eager_reason == FLASH and self.device.type != "cuda":
            attention += f" ({FLASH} on the {self.device.type.upper()})"
        if self.attention_fallback_reason:
            attention = f"the model's own attention ({self.attention_fallback_reason})"
        weights = "fp8" if self.in_fp8 else NAMES[self.dtype]
        if self.quantization != "none":
            weights = self.quantization
        weights += {"copies": "", "in-place": " merged-in-place", "never": " unmerged"}[self.merging]
        return f"pytorch on {self.device.type}, {how}, {attention}, {weights} weights, {NAMES[self.cache_dtype]} cache"


def choose(policy: Policy, inference: Inference) -> Choice:
    """Resolve `auto` options to the best available choice; raises for unsupported ones."""
    in_fp8 = inference.dtype == "fp8"
    dtype = policy.dtype if inference.dtype == "auto" else torch.bfloat16
    wanted = {"auto": dtype, "bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}[inference.kv_cache_dtype]
    merging: Merging = "copies" if in_fp8 or dtype != policy.dtype else _choose_merging(policy, inference)
    choice = Choice(
        policy.device, dtype, in_fp8, wanted, _eager_reason(policy, inference), policy.attention_fallback_reason,
        policy.quantization,
        merging,
    )  # fmt: skip
    if policy.attention_fallback_reason:
        _check_unused_options(inference, policy.attention_fallback_reason)
    if in_fp8 and not _computes_in_fp8(policy.device):
        raise _unsupported("dtype", "fp8", f"{_NEEDS_FP8}, this is {_describe(policy.device)}")
    if wanted == FP8 and not choice.eager_reason and not _computes_in_fp8(policy.device):
        raise _unsupported("kv_cache_dtype", "fp8", f"{_NEEDS_FP8}, this is {_describe(policy.device)}")
    return choice


def _choose_merging(policy: Policy, inference: Inference) -> Merging:
    if not policy.rank or policy.quantization != "none" or policy.attention_fallback_reason:
        return "copies"
    parameters = sum(parameter.numel() for parameter in policy.adapted.parameters())
    if leaves_unmerged(inference.merge_adapter, parameters, policy.dtype.itemsize):
        return "never"
    return "in-place" if _is_copy_too_large(policy) else "copies"


def _is_copy_too_large(policy: Policy) -> bool:
    """Whether merged copies of the adapted matrices would take too much of the memory that is left."""
    if policy.device.type != "cuda" or policy.is_trained_while_sampled:
        return False
    adapted = [m.get_base_layer().weight for m in policy.adapted.modules() if isinstance(m, LoraLayer)]
    copies = sum(int(weight.nbytes) for weight in adapted)
    return merges_in_place(copies, free_memory(policy.device), policy.training_bytes)


_NEEDS_FP8 = "it needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell)"


def _eager_reason(policy: Policy, inference: Inference) -> str:
    kernel = inference.attention_kernel
    if policy.attention_fallback_reason:
        return policy.attention_fallback_reason
    if kernel == "flash":
        return FLASH
    if runs_triton(policy.device):
        return ""
    reason = "Triton is not installed" if policy.device.type == "cuda" else f"no CUDA GPU, but {policy.device.type}"
    if kernel == "triton":
        raise _unsupported("attention_kernel", "triton", f"it needs a CUDA GPU and Triton, but: {reason}")
    return reason


def _check_unused_options(inference: Inference, reason: str) -> None:
    for key in TAKES:
        default = Inference.model_fields[key].default
        if getattr(inference, key) != default:
            raise ConfigError(
                f'[inference] {key} = "{getattr(inference, key)}" has no effect on this model, which samples with its '
                f'own attention and cache: {reason}.  Try: {key} = "{default}"'
            )


def _computes_in_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the {device.type.upper()}"
    return f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"


def _unsupported(key: str, value: str, reason: str) -> ConfigError:
    others = ", ".join(name for name in TAKES[key] if name != value)
    return ConfigError(
        f'[inference] {key} = "{value}" is not supported by the pytorch engine here: {reason}.  Try: {others}'
    )


def make_model(policy: Policy, choice: Choice) -> SamplingModel | None:
    """The model that is sampled from; None where that is the policy itself."""
    if choice.attention_fallback_reason:
        return None
    products = None if choice.eager_reason or policy.device.type != "cuda" else load_small_batch()
    return SamplingModel(policy, choice.dtype, choice.in_fp8, choice.merging, products)


def make_decoder(policy: Policy, model: SamplingModel | None, choice: Choice, share: bool) -> Decoder:
    """The decoder that samples from it."""
    if model is None:
        return EagerDecoder(policy, lambda: NativeForward(policy), choice.cache_dtype, choice.description)
    if choice.eager_reason:
        return EagerDecoder(
            policy, lambda: CachedForward(model, choice.cache_dtype, share), choice.cache_dtype, choice.description
        )
    decoder = GraphDecoder(model, load_kernels(), choice.cache_dtype, share, choice.description)
    if policy.device.type == "cuda":
        compile_layers(model.causal_lm, is_sampled=True)
        decoder.warm_up()
    return decoder


def load_small_batch() -> SmallBatch:
    """Products of a few rows in Triton."""
    from retrain.inference_engine.pytorch import small_batch  # noqa: PLC0415  (Triton exists only with CUDA)

    return small_batch


def load_kernels() -> Kernels:
    """The Triton kernels."""
    from retrain.inference_engine.pytorch import kernels  # noqa: PLC0415  (Triton exists only with CUDA)

    return kernels
