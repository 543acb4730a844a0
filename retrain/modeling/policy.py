"""The policy: a Hugging Face causal LM with a LoRA adapter, or fully fine-tuned, as backbone and head."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from retrain.builtin import resolve_model
from retrain.config.schema import Lora, Model
from retrain.errors import BackendError, ConfigError
from retrain.modeling.adapter import add_adapter
from retrain.modeling.attention import ATTENTION_NAME, Attention, PackedAttention, Scoring, attending, register
from retrain.modeling.causal_lm import CausalLM, module_of
from retrain.modeling.files import CONTEXT_KEYS, MERGE_HINT, find_model, is_mixture
from retrain.modeling.quantization import quantize_layers, quantized_layers
from retrain.modeling.tokens import Tokenizer, explain_missing_model
from retrain.modeling.torch_internals import cpu_computes_bf16
from retrain.runtime.permissions import share_weights
from retrain.runtime.text import list_some, plural
from retrain.runtime.threads import FairLock
from retrain.seeding import derive_seed

# Marks a folder of fully fine-tuned weights, which newer weights may replace.
WHOLE_MARK = "retrain.json"
# Ampere, the first GPUs that compute in bf16.
BF16_CAPABILITY = (8, 0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Policy:
    """The model that samples and learns."""

    adapted: nn.Module
    """The module with the trainable parameters: a PeftModel, or the model itself."""
    device: torch.device
    context_length: int
    stop_ids: tuple[int, ...]
    attention_fallback_reason: str = ""
    """Why the model uses its own attention; empty where it uses ours."""
    tokenizer: Tokenizer | None = None
    """Saved with a fully fine-tuned model, so that its folder can be loaded."""
    is_trained_while_sampled: bool = False
    """Whether another policy trains over the same frozen tensors while this one is being sampled from."""
    training_bytes: int = 0
    """Memory that training wants on this device, beside the weights."""

    def __post_init__(self) -> None:
        self.turns = FairLock()
        """Held by a thread while it runs the model or a sampling model over its weights."""
        model: Any = self.adapted
        has_adapter = isinstance(model, PeftModel)
        self.rank = int(model.peft_config["default"].r) if has_adapter else 0
        """Rank of the adapter; 0 in full fine-tuning."""
        self.causal_lm: CausalLM = model.get_base_model() if has_adapter else model
        self.layers = int(self.causal_lm.config.get_text_config().num_hidden_layers)
        self.vocabulary = int(self.causal_lm.get_output_embeddings().weight.shape[0])
        parameter = next(self.causal_lm.parameters())
        self.dtype: torch.dtype = parameter.dtype
        self.quantization = next((layer.kind for layer in quantized_layers(module_of(self.causal_lm))), "none")
        """Quantization of the base model's matrices, as in `[model] quantization`."""
        # Read once: `to_dict` copies, and `head` runs for every token.
        settings = self.causal_lm.config.get_text_config().to_dict()
        self.logits_divisor: float | None = settings.get("logits_scaling")
        self.logits_factor: float | None = settings.get("logit_scale")
        self.logits_cap: float | None = settings.get("final_logit_softcapping")
        self.attention_cap: float | None = settings.get("attn_logit_softcapping") or None
        shape = self.causal_lm.config.get_text_config()
        self.head_size = int(settings.get("head_dim") or shape.hidden_size // shape.num_attention_heads)

    @property
    def peft(self) -> Any:
        """The adapted module as a PeftModel."""
        assert isinstance(self.adapted, PeftModel)
        return self.adapted

    @property
    def cache_bytes_per_token(self) -> int:
        """KV cache size of one token."""
        settings = self.causal_lm.config.get_text_config()
        values = settings.to_dict()
        # Some families name neither: every head then has its own keys, and heads split the width.
        heads = values.get("num_key_value_heads") or settings.num_attention_heads
        return 2 * self.layers * int(heads) * self.head_size * self.dtype.itemsize

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attention | Tensor) -> Tensor:
        """Last hidden states of a (batch, tokens) input."""
        if self.attention_fallback_reason:
            assert isinstance(attend, PackedAttention), "the model's own attention takes packed sequences only"
            return attend.run_padded(self.causal_lm.base_model, token_ids)
        return last_hidden(self.causal_lm, token_ids, positions, attend=attend)

    @property
    def has_plain_head(self) -> bool:
        """Whether the head is a plain matrix product."""
        head = self.causal_lm.get_output_embeddings()
        scaled = self.logits_divisor or self.logits_factor or self.logits_cap
        return type(head) is nn.Linear and head.bias is None and not scaled

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, with the scaling or capping of the model family."""
        logits: Tensor = self.causal_lm.get_output_embeddings()(hidden)
        if self.logits_divisor:
            logits = logits / self.logits_divisor
        if self.logits_factor:
            logits = logits * self.logits_factor
        return torch.tanh(logits / self.logits_cap) * self.logits_cap if self.logits_cap else logits

    def clone_with_new_adapter(self) -> Policy:
        """A policy over the same frozen tensors, with its own copy of the adapter."""
        adapter = {id(parameter) for parameter in self.adapted.parameters() if parameter.requires_grad}
        tensors = [*self.adapted.parameters(), *self.adapted.buffers()]
        shared = {id(tensor): tensor for tensor in tensors if id(tensor) not in adapter}
        clone = copy.deepcopy(self.adapted, shared)
        return Policy(clone, self.device, self.context_length, self.stop_ids, self.attention_fallback_reason)

    def save_adapter(self, path: Path) -> None:
        """Write the adapter in PEFT layout, or the fine-tuned model in Hugging Face layout."""
        if not self.rank:
            self.causal_lm.save_pretrained(str(path))
            mark = {"base_model": str(self.causal_lm.config.name_or_path)}
            (path / WHOLE_MARK).write_text(json.dumps(mark), encoding="utf-8")
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(str(path))
            share_weights(path)
            return
        with warnings.catch_warnings():
            # PEFT checks on the Hub whether the base model's embeddings changed, and warns when offline.
            warnings.simplefilter("ignore")
            self.peft.save_pretrained(str(path), save_embedding_layers=False)
        share_weights(path)

    def adapter_state(self) -> dict[str, Tensor]:
        """The adapter's tensors by name, not copied."""
        return {name: p.data for name, p in self.adapted.named_parameters() if p.requires_grad}

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        """Copy tensors into the adapter."""
        current = self.adapter_state()
        if current.keys() != state.keys():
            raise BackendError("the saved weights do not match this model; was another model trained?")
        for name, tensor in current.items():
            tensor.copy_(state[name])


def last_hidden(causal_lm: CausalLM, token_ids: Tensor, positions: Tensor, **more: Attention | Tensor) -> Tensor:
    """Run the backbone with our attention."""
    inputs = {"input_ids": token_ids, "position_ids": positions, "use_cache": False}
    return causal_lm.base_model(**inputs, **more).last_hidden_state


def load_policy(model: Model, lora: Lora, seed: int, device: torch.device, log: Callable[[str], None]) -> Policy:
    """Load the model onto a device and give it a fresh adapter."""
    register()
    if is_mixture(find_model(model.model)):
        # Of these, many cannot be adapted, and they take long to load.
        check_architecture(model, lora)
    return adapt(_load_causal_lm(model, choose_dtype(model.dtype, device, log), device), model, lora, seed, log)


def check_architecture(model: Model, lora: Lora) -> None:
    """Raise if a model cannot be adapted or states no context length, by its config.json: no weights are read."""
    if model.init_kwargs:
        return  # they may change its settings
    try:
        settings = AutoConfig.from_pretrained(resolve_model(model.model))
        with torch.device("meta"):
            causal_lm: CausalLM = AutoModelForCausalLM.from_config(settings)
            _require_parts(causal_lm, model.model)
            adapted = add_adapter(causal_lm, model, lora, seed=0) if model.lora_rank else module_of(causal_lm)
            Policy(adapted, causal_lm.device, read_context(causal_lm, model.model), ())
            # A forward pass without numbers; some models need them.
            with suppress(RuntimeError, NotImplementedError):
                _check_cache(causal_lm, model.model)
    except (OSError, ValueError) as error:
        raise ConfigError(_explain_unloaded(model.model, error)) from error


def _explain_unloaded(name: str, error: Exception) -> str:
    """Why a model could not be loaded; transformers answers with a list of all its classes if it reads images."""
    with suppress(OSError, ValueError):
        settings = AutoConfig.from_pretrained(resolve_model(name))
        if type(settings) not in MODEL_FOR_CAUSAL_LM_MAPPING and "auto_map" not in settings.to_dict():
            return (
                f"{name} ({settings.model_type}) is not a model that transformers loads as a causal language model.  "
                "Try: a text model, such as the one of its family without images"
            )
    return explain_missing_model(name, error)


def read_context(causal_lm: CausalLM, name: str) -> int:
    """The context length that a model's settings state."""
    settings = causal_lm.config.get_text_config()
    stated = [settings.to_dict().get(key) for key in CONTEXT_KEYS]
    with suppress(AttributeError):
        # Families that use another name have this one as well.
        stated.insert(0, settings.max_position_embeddings)
    found = next((value for value in stated if isinstance(value, int) and value > 0), None)
    if found is None:
        raise ConfigError(
            f"{name} does not state its context length.  "
            f'Try: add "{CONTEXT_KEYS[0]}" to its config.json, with the length of the texts that it was trained on'
        )
    return found


def choose_dtype(name: str, device: torch.device, log: Callable[[str], None]) -> torch.dtype:
    """The precision of the weights: `auto` is float32 on a CPU, and bf16 on GPUs that compute in it."""
    is_cpu = device.type == "cpu"
    computes_bf16 = cpu_computes_bf16() if is_cpu else torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    where = "CPU" if is_cpu else "GPU"
    if name == "auto":
        if not is_cpu and not computes_bf16:
            log("Note: this GPU does not compute in bf16, so the model is in fp32, which takes twice the memory.")
        name = "bf16" if computes_bf16 and not is_cpu else "fp32"
    elif name == "bf16" and not computes_bf16:
        log(f'Warning: this {where} does not compute in bf16, so bf16 is emulated.  Try: [model] dtype = "fp32"')
        # Hides PyTorch's own warning, which has a C++ stack trace (on ARM, at the first matmul).
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    return DTYPES[name]


def adapt(causal_lm: CausalLM, model: Model, lora: Lora, seed: int, log: Callable[[str], None]) -> Policy:
    """Add a fresh adapter to a loaded model, except in full fine-tuning, and check that it is supported."""
    _require_parts(causal_lm, model.model)
    causal_lm.eval().requires_grad_(not model.lora_rank)
    adapted = add_adapter(causal_lm, model, lora, seed) if model.lora_rank else module_of(causal_lm)
    quantized = sum(layer.in_features * layer.out_features for layer in quantized_layers(adapted))
    total = quantized + sum(p.numel() for p in adapted.parameters())
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    log(f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {100 * trainable / total:.4f}")
    context, reason = read_context(causal_lm, model.model), find_attention_fallback(causal_lm)
    policy = Policy(adapted, causal_lm.device, context, _stop_ids(causal_lm), reason)
    _check_head(policy, model.model)
    if policy.attention_fallback_reason:
        _check_cache(causal_lm, model.model)
    return policy


def _require_parts(causal_lm: CausalLM, name: str) -> None:
    try:
        int(causal_lm.config.get_text_config().num_attention_heads)
    except (AttributeError, TypeError) as error:
        reason = "it has no attention (no num_attention_heads in its config.json).  Try: a model with attention"
        raise _unsupported(causal_lm, name, reason) from error
    backbone: object = causal_lm.base_model
    if backbone is causal_lm:
        raise _unsupported(causal_lm, name, "its layers cannot be run without its head.  Try: another model")


def _unsupported(causal_lm: CausalLM, name: str, error: object) -> BackendError:
    return BackendError(f"{name} ({type(causal_lm).__name__}) cannot be trained here: {error}")


def fresh_adapter(policy: Policy, seed: int) -> list[Tensor]:
    """Initial tensors of this policy's adapter under another seed."""
    before = {name for name, _ in policy.adapted.named_parameters()}
    torch.manual_seed(derive_seed(seed, "adapter"))
    # The same calls in the same order as for the first adapter, to draw the same numbers.
    policy.peft.add_adapter("fresh", policy.peft.peft_config["default"], autocast_adapter_dtype=False)
    tensors = [p.data.to(policy.dtype) for name, p in policy.adapted.named_parameters() if name not in before]
    policy.peft.delete_adapter("fresh")
    return tensors


def _load_causal_lm(model: Model, dtype: torch.dtype, device: torch.device) -> CausalLM:
    # Its progress bar would break up the start-up lines.
    transformers_logging.disable_progress_bar()
    try:
        try:
            causal_lm = _load_onto(device, model, dtype, ATTENTION_NAME)
        except KeyError as error:
            if error.args != (ATTENTION_NAME,):
                raise
        else:
            if not find_attention_fallback(causal_lm):
                return causal_lm
            del causal_lm
        return _load_onto(device, model, dtype, None)
    except torch.OutOfMemoryError as error:
        raise BackendError(f"{model.model} does not fit into the memory of {device}: {error}") from error
    except (TypeError, StrictDataclassError) as error:
        if not model.init_kwargs:
            raise
        raise ConfigError(f"[model] init_kwargs = {model.init_kwargs} does not fit {model.model}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(_explain_unloaded(model.model, error)) from error


def _load_onto(device: torch.device, model: Model, dtype: torch.dtype, attention: str | None) -> CausalLM:
    loaded: CausalLM
    loaded, report = AutoModelForCausalLM.from_pretrained(
        resolve_model(model.model),
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
        **model.init_kwargs,
    )
    # transformers fills them with random numbers.
    missing = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if missing:
        raise ConfigError(
            f"the model {model.model!r} lacks {plural(len(missing), 'weight')} of a causal language model: "
            f"{list_some(missing)}.  Try: a complete model; a classifier or an embedding model has no language head"
        )
    if any(isinstance(module, BaseTunerLayer) for module in module_of(loaded).modules()):
        raise ConfigError(f"the model {model.model!r} is an adapter, not a model.  {MERGE_HINT}")
    if model.quantization != "none":
        quantize_layers(loaded, model.quantization, device)
    return loaded.to(device)


def _stop_ids(causal_lm: CausalLM) -> tuple[int, ...]:
    ids = causal_lm.generation_config.eos_token_id
    if ids is None:
        ids = causal_lm.config.get_text_config().eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)


@torch.no_grad()
def find_attention_fallback(causal_lm: CausalLM) -> str:
    """Why the model must use its own attention; empty if every layer uses ours."""
    calls: list[int] = []

    class Counting(PackedAttention):
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
            calls.append(layer)
            return super().attend(layer, query, key, value, scoring)

    ids = torch.arange(4, device=causal_lm.device)[None] % int(causal_lm.get_output_embeddings().weight.shape[0])
    counting = Counting([ids.shape[1]], causal_lm.device)
    # Given to both kinds of models: those that are trained, and those that are only sampled from.
    with suppress(TypeError, AttributeError), attending(counting):
        last_hidden(causal_lm, ids, ids, attend=counting)
    if calls == list(range(int(causal_lm.config.get_text_config().num_hidden_layers))):
        return ""
    return f"{type(causal_lm).__name__} does not use transformers' attention interface in every layer"


@torch.no_grad()
def _check_head(policy: Policy, name: str) -> None:
    """Compare our backbone and head with the model's forward pass."""
    ids = torch.arange(4, device=policy.device)[None] % policy.vocabulary
    attend = PackedAttention([ids.shape[1]], policy.device)
    ours_only: dict[str, object] = {} if policy.attention_fallback_reason else {"attend": attend}
    try:
        own = policy.causal_lm(input_ids=ids, use_cache=False, **ours_only).logits
        ours = policy.head(policy.hidden(ids, torch.arange(4, device=policy.device)[None], attend))
    except (TypeError, AttributeError) as error:
        raise _unsupported(policy.causal_lm, name, error) from error
    # NaN is equal to nothing, so it would count as a difference.
    if not ours.isfinite().all():
        raise BackendError(
            f"{name}: its weights give logits that are not finite (NaN or infinite).  "
            "Try: copy or download it again, or an earlier checkpoint of it"
        )
    if not torch.allclose(own.float(), ours.float(), atol=1e-3, rtol=1e-2):
        raise BackendError(f"{name} changes its logits after the last layer in an unsupported way.")


@torch.no_grad()
def _check_cache(causal_lm: CausalLM, name: str) -> None:
    """Raise for a model that is sampled from as transformers runs it, if it does not keep its state in a cache."""
    ids = torch.arange(4, device=causal_lm.device)[None] % int(causal_lm.get_output_embeddings().weight.shape[0])
    output: Any = causal_lm(input_ids=ids, use_cache=True)
    if not isinstance(output.get("past_key_values"), Cache):
        raise _unsupported(
            causal_lm, name, "it does not keep its state in a cache of transformers.  Try: another model"
        )
