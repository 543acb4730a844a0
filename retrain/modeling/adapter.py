"""The LoRA adapter of a policy: which modules it adapts, and how it is made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from retrain.config.schema import Lora, Model
from retrain.errors import BackendError, ConfigError
from retrain.modeling.causal_lm import CausalLM, is_projection, module_of
from retrain.modeling.quantization import QuantizedLinear
from retrain.seeding import derive_seed


def add_adapter(causal_lm: CausalLM, model: Model, lora: Lora, seed: int) -> PeftModel:
    """A model with a fresh adapter as `[lora]` asks for it."""
    targets: str | list[str] = lora.target_modules
    if targets != "all-linear":
        targets = [name.strip() for name in lora.target_modules.split(",") if name.strip()]
        _check_targets(targets, causal_lm, model.model)
    adapter = LoraConfig(
        r=model.lora_rank,
        lora_alpha=lora.alpha or 2 * model.lora_rank,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=_find_routers(causal_lm) if targets == "all-linear" else None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(derive_seed(seed, "adapter"))
    try:
        with warnings.catch_warnings():
            # GPT-2 has transposed matrices; PEFT corrects for that but still warns.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            # PEFT has patterns for kinds of experts that a model may not have.
            warnings.filterwarnings("ignore", message="The following (alpha|rank)_pattern keys did not match")
            # The adapter has the model's precision; the optimizer keeps float32 masters.
            with one_thread():
                adapted = get_peft_model(causal_lm, adapter, autocast_adapter_dtype=False).eval()
            _cast_adapter(adapted)
        # PEFT keeps a set, whose order in adapter_config.json would differ between equal runs.
        used = adapted.peft_config["default"]
        used.target_modules = sorted(used.target_modules)
    # PEFT looks for attributes that some kinds of experts lack.
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"[lora] target_modules = {lora.target_modules!r} does not fit {model.model}: {error}  {_advise(causal_lm)}"
        ) from error
    except RuntimeError as error:
        # On a CPU, PyTorch has no exception of its own for this, and other words on x86_64 than on aarch64.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise BackendError(
            f"an adapter of rank {model.lora_rank} does not fit into memory: {error}  Try: a smaller [model] lora_rank"
        ) from error
    if any(isinstance(module, ParamWrapper) for module in adapted.modules()):
        raise ConfigError(
            f"{model.model} keeps its experts in one tensor, whose adapters cannot be merged here.  "
            f"{_advise(causal_lm)}"
        )
    return adapted


def _find_routers(causal_lm: CausalLM) -> list[str] | None:
    """Names of linear layers that return more than a product, such as PhiMoE's routers: PEFT cannot adapt them."""
    modules = module_of(causal_lm).named_modules()
    linear = {path: module for path, module in modules if isinstance(module, nn.Linear)}
    routers = (
        path for path, module in linear.items() if not (isinstance(module, QuantizedLinear) or is_projection(module))
    )
    return sorted({path.rpartition(".")[2] for path in routers}) or None


def _advise(causal_lm: CausalLM) -> str:
    """The linear modules of the attention, which can be adapted in any model."""
    modules = module_of(causal_lm).named_modules()
    linear = {path for path, module in modules if isinstance(module, nn.Linear) and "lora_" not in path}
    parts = {path.removesuffix(".base_layer").rpartition(".") for path in linear}
    names = sorted({name for parent, _, name in parts if "attn" in parent or "attention" in parent})
    return f'Try: [lora] target_modules = "{",".join(names)}"'


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one CPU thread: hundreds of small matrices would each wait for threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_targets(targets: Sequence[str], causal_lm: CausalLM, name: str) -> None:
    """Reject names that match no module; PEFT ignores them if another name matches."""
    modules = dict(module_of(causal_lm).named_modules())
    unknown = [target for target in targets if not any(f".{path}".endswith(f".{target}") for path in modules)]
    if unknown:
        linear = (path for path, module in modules.items() if isinstance(module, nn.Linear | Conv1D))
        known = sorted({path.rpartition(".")[2] for path in linear})
        raise ConfigError(
            f"[lora] target_modules: {name} has no module {', '.join(map(repr, unknown))}.  Try: {', '.join(known)}"
        )


def _cast_adapter(adapted: PeftModel) -> None:
    """Give the adapter the model's precision; over a quantized matrix PEFT makes it in float32."""
    dtype = next(adapted.get_base_model().parameters()).dtype
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
