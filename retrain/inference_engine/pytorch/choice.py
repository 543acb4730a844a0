"""How the engine samples on this device: what was asked for, what there is, and one line that says so."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from retrain.config.schema import Inference
from retrain.errors import ConfigError
from retrain.inference_engine.pytorch.cache import FP8
from retrain.inference_engine.pytorch.decoder import Decoder
from retrain.inference_engine.pytorch.eager import CachedForward, EagerDecoder
from retrain.inference_engine.pytorch.graphs import GraphDecoder, Kernels
from retrain.inference_engine.pytorch.own import OwnForward
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.modeling.compiling import compile_layers
from retrain.modeling.policy import Policy

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
    """What the engine is made of."""

    device: torch.device
    dtype: torch.dtype
    """What the sampling model computes in."""
    in_fp8: bool
    """Whether its matrices are kept in 8 bits."""
    cache_dtype: torch.dtype
    why_eager: str
    """Empty where our kernels and CUDA graphs run."""
    own_attention: str
    """Why the model attends by itself; empty where it attends through us."""

    @property
    def description(self) -> str:
        """One line for the start of a run."""
        how = "eager" if self.why_eager else "CUDA graphs"
        if self.device.type == "cuda" and self.why_eager:
            how += f" ({self.why_eager})"
        attention = "sdpa attention" if self.why_eager else "triton attention"
        if self.why_eager == FLASH and self.device.type != "cuda":
            attention += f" (which is what {FLASH} means on the {self.device.type.upper()})"
        if self.own_attention:
            attention = f"the model's own attention ({self.own_attention})"
        weights = "fp8" if self.in_fp8 else NAMES[self.dtype]
        return f"pytorch on {self.device.type}, {how}, {attention}, {weights} weights, {NAMES[self.cache_dtype]} cache"


def runs_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run on a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def choose(policy: Policy, inference: Inference) -> Choice:
    """Settle what is left open by the best there is, and refuse what cannot be had."""
    in_fp8 = inference.dtype == "fp8"
    dtype = policy.dtype if inference.dtype == "auto" else torch.bfloat16
    wanted = {"auto": dtype, "bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}[inference.kv_cache_dtype]
    choice = Choice(policy.device, dtype, in_fp8, wanted, _why_eager(policy, inference), policy.own_attention)
    if policy.own_attention:
        _refuse_wishes(inference, policy.own_attention)
    if in_fp8 and not _computes_in_fp8(policy.device):
        raise _refusal("dtype", "fp8", f"{_NEEDS_FP8}, and here is {_describe(policy.device)}")
    if wanted == FP8 and not choice.why_eager and not _computes_in_fp8(policy.device):
        raise _refusal("kv_cache_dtype", "fp8", f"{_NEEDS_FP8}, and here is {_describe(policy.device)}")
    return choice


_NEEDS_FP8 = "it needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell)"


def _why_eager(policy: Policy, inference: Inference) -> str:
    kernel = inference.attention_kernel
    if policy.own_attention:
        return policy.own_attention
    if kernel == "flash":
        return FLASH
    if runs_kernels(policy.device):
        return ""
    reason = "Triton is not installed" if policy.device.type == "cuda" else f"no CUDA GPU, but {policy.device.type}"
    if kernel == "triton":
        raise _refusal("attention_kernel", "triton", f"it needs a CUDA GPU and Triton, and here is: {reason}")
    return reason


def _refuse_wishes(inference: Inference, reason: str) -> None:
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
    return f"one of {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"


def _refusal(key: str, value: str, reason: str) -> ConfigError:
    others = ", ".join(name for name in TAKES[key] if name != value)
    return ConfigError(f'[inference] {key} = "{value}" is not for the pytorch engine here: {reason}.  Try: {others}')


def make_model(policy: Policy, choice: Choice) -> SamplingModel | None:
    """The copy that is sampled from; None where the policy itself is."""
    return None if choice.own_attention else SamplingModel(policy, choice.dtype, choice.in_fp8)


def make_decoder(policy: Policy, model: SamplingModel | None, choice: Choice, share: bool) -> Decoder:
    """What draws from it."""
    if model is None:
        return EagerDecoder(policy, lambda: OwnForward(policy), choice.cache_dtype, choice.description)
    if choice.why_eager:
        return EagerDecoder(
            policy, lambda: CachedForward(model, choice.cache_dtype, share), choice.cache_dtype, choice.description
        )
    decoder = GraphDecoder(model, load_kernels(), choice.cache_dtype, share, choice.description)
    if policy.device.type == "cuda":
        compile_layers(model.causal_lm)
        decoder.warm_up()
    return decoder


def load_kernels() -> Kernels:
    """Our kernels in Triton."""
    from retrain.inference_engine.pytorch import kernels  # noqa: PLC0415  (Triton exists only with CUDA)

    return kernels
