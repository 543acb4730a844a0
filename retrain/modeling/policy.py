"""The policy: a Hugging Face causal LM with a LoRA adapter, or trained as a whole, as a backbone and a head."""

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
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from retrain.builtin import resolve_model
from retrain.config.schema import Lora, Model
from retrain.errors import BackendError, ConfigError
from retrain.modeling.attention import ATTENTION_NAME, Attention, PackedAttention, register
from retrain.modeling.tokens import explain_missing_model
from retrain.seeding import derive_seed

# Beside the weights of a model that was trained as a whole: a folder with it may be replaced by newer ones.
WHOLE_MARK = "retrain.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Policy:
    """The model that samples and learns."""

    adapted: Any
    """What holds the parameters that learn: the model with its adapter, or the model itself."""
    device: torch.device
    context_length: int
    stop_ids: tuple[int, ...]
    own_attention: str = ""
    """Why the model attends by itself; empty where it attends through us."""
    tokenizer: Any = None
    """Written beside a whole model, so that its folder can be loaded like any other."""

    def __post_init__(self) -> None:
        has_adapter = isinstance(self.adapted, PeftModel)
        self.rank = int(self.adapted.peft_config["default"].r) if has_adapter else 0
        """That of the adapter; 0 where the whole model learns."""
        self.causal_lm: Any = self.adapted.get_base_model() if has_adapter else self.adapted
        self.layers = int(self.causal_lm.config.get_text_config().num_hidden_layers)
        self.vocabulary = int(self.causal_lm.get_output_embeddings().weight.shape[0])
        parameter = next(self.causal_lm.parameters())
        self.dtype: torch.dtype = parameter.dtype
        # Looked up once: a configuration copies itself when read as a table, and `head` runs at every token.
        told = self.causal_lm.config.get_text_config().to_dict()
        self.logits_divisor: float | None = told.get("logits_scaling")
        self.logits_factor: float | None = told.get("logit_scale")
        self.logits_cap: float | None = told.get("final_logit_softcapping")

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        settings = self.causal_lm.config.get_text_config()
        told = settings.to_dict()
        # Some families name neither; then every head has its own keys, and heads share the width.
        heads = told.get("num_key_value_heads") or settings.num_attention_heads
        size = told.get("head_dim") or settings.hidden_size // settings.num_attention_heads
        return 2 * self.layers * int(heads) * int(size) * self.dtype.itemsize

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Last hidden states of a (batch, tokens) input."""
        if self.own_attention:
            assert isinstance(attend, PackedAttention), "a model that attends by itself knows packed sequences only"
            return attend.run_padded(self.causal_lm.base_model, token_ids)
        return last_hidden(self.causal_lm, token_ids, positions, attend)

    @property
    def has_plain_head(self) -> bool:
        """Whether logits are the last matrix product and nothing more."""
        head = self.causal_lm.get_output_embeddings()
        odd = self.logits_divisor or self.logits_factor or self.logits_cap
        return type(head) is nn.Linear and head.bias is None and not odd

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, with whatever scaling or capping the model family applies after its last layer."""
        logits: Tensor = self.causal_lm.get_output_embeddings()(hidden)
        if self.logits_divisor:
            logits = logits / self.logits_divisor
        if self.logits_factor:
            logits = logits * self.logits_factor
        return torch.tanh(logits / self.logits_cap) * self.logits_cap if self.logits_cap else logits

    def twin(self) -> Policy:
        """A second policy over the same frozen tensors, with an adapter of its own that starts out equal."""
        adapter = {id(parameter) for parameter in self.adapted.parameters() if parameter.requires_grad}
        tensors = [*self.adapted.parameters(), *self.adapted.buffers()]
        shared = {id(tensor): tensor for tensor in tensors if id(tensor) not in adapter}
        twin = copy.deepcopy(self.adapted, shared)
        return Policy(twin, self.device, self.context_length, self.stop_ids, self.own_attention)

    def save_adapter(self, path: Path) -> None:
        """Write the adapter in PEFT layout, or the whole model in that of Hugging Face."""
        if not self.rank:
            self.causal_lm.save_pretrained(str(path))
            told = {"base_model": str(self.causal_lm.config.name_or_path)}
            (path / WHOLE_MARK).write_text(json.dumps(told), encoding="utf-8")
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(str(path))
            return
        with warnings.catch_warnings():
            # PEFT asks the hub whether the base model's embeddings changed, and warns when offline. They did not.
            warnings.simplefilter("ignore")
            self.adapted.save_pretrained(str(path), save_embedding_layers=False)

    def adapter_state(self) -> dict[str, Tensor]:
        """The adapter's tensors by name, not copied."""
        return {name: p.data for name, p in self.adapted.named_parameters() if p.requires_grad}

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        """Copy tensors into the adapter."""
        own = self.adapter_state()
        if own.keys() != state.keys():
            raise BackendError("the saved weights have other layers than this model; was it trained on another one?")
        for name, tensor in own.items():
            tensor.copy_(state[name])


def last_hidden(causal_lm: Any, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
    """Run a Hugging Face model's backbone with our attention."""
    states: Tensor = causal_lm.base_model(
        input_ids=token_ids, position_ids=positions, use_cache=False, attend=attend
    ).last_hidden_state
    return states


def load_policy(model: Model, lora: Lora, seed: int, device: torch.device, say: Callable[[str], None]) -> Policy:
    """Load the model onto a device and give it a fresh adapter."""
    register()
    dtype = DTYPES[model.dtype] if model.dtype != "auto" else DTYPES["fp32" if device.type == "cpu" else "bf16"]
    if dtype == torch.bfloat16 and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        say('Warning: this CPU does not compute in bf16, so every product is emulated.  Try: [model] dtype = "fp32"')
    return adapt(_load_causal_lm(model, dtype, device), model, lora, seed, say)


def adapt(causal_lm: Any, model: Model, lora: Lora, seed: int, say: Callable[[str], None]) -> Policy:
    """Give a loaded model a fresh adapter, unless all of it is to learn, and make sure that we understand it."""
    causal_lm.eval().requires_grad_(not model.lora_rank)
    adapted = _with_adapter(causal_lm, model, lora, seed) if model.lora_rank else causal_lm
    total = sum(p.numel() for p in adapted.parameters())
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    say(f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {100 * trainable / total:.4f}")
    settings = causal_lm.config.get_text_config()
    try:
        context = int(settings.max_position_embeddings)
    except AttributeError as error:
        raise BackendError(f"{model.model} does not say how long its context is.") from error
    policy = Policy(adapted, causal_lm.device, context, _stop_ids(causal_lm), why_own_attention(causal_lm))
    _check_head(policy, model.model)
    return policy


def _with_adapter(causal_lm: Any, model: Model, lora: Lora, seed: int) -> PeftModel:
    targets: str | list[str] = lora.target_modules
    if targets != "all-linear":
        targets = [name.strip() for name in lora.target_modules.split(",")]
    adapter = LoraConfig(
        r=model.lora_rank,
        lora_alpha=lora.alpha or 2 * model.lora_rank,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(derive_seed(seed, "adapter"))
    try:
        with warnings.catch_warnings():
            # GPT-2 keeps its matrices transposed; PEFT notices, corrects itself, and warns all the same.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            # The adapter computes in the model's precision; the optimiser keeps its own copy in float32.
            adapted = get_peft_model(causal_lm, adapter, autocast_adapter_dtype=False).eval()
    except ValueError as error:
        raise ConfigError(
            f"[lora] target_modules = {lora.target_modules!r} does not fit {model.model}: {error}"
        ) from error
    if any(isinstance(module, ParamWrapper) for module in adapted.modules()):
        raise ConfigError(
            f"{model.model} keeps its experts in one tensor, which no adapter can be folded out of and in here.  "
            'Try: [lora] target_modules = "q_proj,k_proj,v_proj,o_proj"'
        )
    return adapted


def fresh_adapter(policy: Policy, seed: int) -> list[Tensor]:
    """The tensors that an adapter of this policy would begin with under another seed."""
    before = {name for name, _ in policy.adapted.named_parameters()}
    torch.manual_seed(derive_seed(seed, "adapter"))
    # The same calls in the same order as for the first one, so that they draw the same numbers.
    policy.adapted.add_adapter("fresh", policy.adapted.peft_config["default"], autocast_adapter_dtype=False)
    tensors = [p.data for name, p in policy.adapted.named_parameters() if name not in before]
    policy.adapted.delete_adapter("fresh")
    return tensors


def _load_causal_lm(model: Model, dtype: torch.dtype, device: torch.device) -> Any:
    # Its bar would tear the start-up lines apart; we say ourselves what is loading.
    transformers_logging.disable_progress_bar()
    try:
        try:
            causal_lm = _from_pretrained(model, dtype, ATTENTION_NAME).to(device)
        except KeyError as error:
            if error.args != (ATTENTION_NAME,):
                raise
        else:
            if not why_own_attention(causal_lm):
                return causal_lm
            del causal_lm
        return _from_pretrained(model, dtype, None).to(device)
    except torch.OutOfMemoryError as error:
        raise BackendError(f"{model.model} does not fit into the memory of {device}: {error}") from error
    except (TypeError, StrictDataclassError) as error:
        if not model.init_kwargs:
            raise
        raise ConfigError(f"[model] init_kwargs = {model.init_kwargs} does not suit {model.model}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(explain_missing_model(model.model, error)) from error


def _from_pretrained(model: Model, dtype: torch.dtype, attention: str | None) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        resolve_model(model.model), dtype=dtype, attn_implementation=attention, **model.init_kwargs
    )


def _stop_ids(causal_lm: Any) -> tuple[int, ...]:
    ids = causal_lm.generation_config.eos_token_id
    if ids is None:
        ids = causal_lm.config.get_text_config().eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)


@torch.no_grad()
def why_own_attention(causal_lm: Any) -> str:
    """Empty when every layer attends through us, or why the model is left to attend by itself."""
    calls: list[int] = []

    class Counting(PackedAttention):
        def attend(self, layer: int, *args: Any) -> Tensor:
            calls.append(layer)
            return super().attend(layer, *args)

    ids = torch.arange(4, device=causal_lm.device)[None] % int(causal_lm.get_output_embeddings().weight.shape[0])
    with suppress(TypeError, AttributeError):
        last_hidden(causal_lm, ids, ids, Counting([ids.shape[1]], causal_lm.device))
    if sorted(calls) == list(range(int(causal_lm.config.get_text_config().num_hidden_layers))):
        return ""
    return f"{type(causal_lm).__name__} does not attend through transformers' attention interface in every layer"


@torch.no_grad()
def _check_head(policy: Policy, name: str) -> None:
    """Compare backbone and head with the model's own forward pass."""
    ids = torch.arange(4, device=policy.device)[None] % policy.vocabulary
    attend = PackedAttention([ids.shape[1]], policy.device)
    through_us: dict[str, Any] = {} if policy.own_attention else {"attend": attend}
    try:
        own = policy.causal_lm(input_ids=ids, use_cache=False, **through_us).logits
    except (TypeError, AttributeError) as error:
        raise BackendError(f"{name} ({type(policy.causal_lm).__name__}) cannot be trained here: {error}") from error
    ours = policy.head(policy.hidden(ids, torch.arange(4, device=policy.device)[None], attend))
    if not torch.allclose(own.float(), ours.float(), atol=1e-3, rtol=1e-2):
        raise BackendError(f"{name} changes its logits after the last layer in a way retrain does not know.")
