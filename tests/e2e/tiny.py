"""Models and tokenizers small enough to build in a test."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from retrain.backends.local.learner import Learner
from retrain.config import TrainConfig, load_config
from retrain.modeling.policy import Policy, load_policy
from retrain.types import Completion, Datum, IntArray

VOCABULARY = 128
EOS = 2
CONTEXT = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)

_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SIZE),
    "qwen3": Qwen3Config(**_SIZE, head_dim=8),
    "gemma2": Gemma2Config(**_SIZE, head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**_SIZE, head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "mistral": MistralConfig(**_SIZE, sliding_window=5),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_layer=3, n_head=4, n_embd=32, n_positions=CONTEXT, bos_token_id=1, eos_token_id=EOS
    ),
}


def write_model(folder: Path, family: str = "qwen3", gain: float = 3.0, layers: int = 3) -> Path:
    """A random model of a family; `gain` sharpens what would else be nearly uniform."""
    torch.manual_seed(0)
    settings = copy.deepcopy(FAMILIES[family])
    settings.num_hidden_layers = layers
    if getattr(settings, "layer_types", None) is not None:
        settings.layer_types = settings.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(settings).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain)
    model.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """One token a character, its id the character's code, so that scripted engines and real ones agree."""
    special = ["<pad>", "<unk>", "<eos>"]
    vocabulary = {name: id for id, name in enumerate(special)} | {chr(id): id for id in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def config_for(model: Path, **overrides: Any) -> TrainConfig:
    """A configuration for one of these models on the CPU; overrides are `section__key`."""
    small: dict[str, Any] = {
        "model.model": str(model),
        "model.lora_rank": 4,
        "backend.devices": "cpu",
        "training.seed": 0,
        "training.max_tokens": 20,
        "training.group_size": 4,
        "training.temperature": 0.9,
        "training.lr": 1e-2,
    }
    return load_config(None, small | {key.replace("__", "."): value for key, value in overrides.items()})


def policy_for(config: TrainConfig, trained: bool = True, device: str = "cpu") -> Policy:
    """The policy of a configuration; `trained` gives it an adapter that does something."""
    if device != "cpu":
        return _load(config, trained, device)
    # Hundreds of tests use a few models, and a copy takes a quarter of the time of loading one.
    key = repr((config.model, config.lora, config.training.seed, trained, device))
    if key not in _LOADED:
        _LOADED[key] = _load(config, trained, device)
    return copy.deepcopy(_LOADED[key])


_LOADED: dict[str, Policy] = {}


def _load(config: TrainConfig, trained: bool, device: str) -> Policy:
    policy = load_policy(config.model, config.lora, config.training.seed, torch.device(device), lambda line: None)
    if trained:
        generator = torch.Generator().manual_seed(1)
        for name, parameter in policy.adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def learner_for(policy: Policy, config: TrainConfig) -> Learner:
    return Learner(policy, config, lambda line: None)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, size=length) for length in lengths]


def datums_of(
    prompts: Sequence[IntArray], completions_PG: Sequence[Sequence[Completion]], seed: int = 0
) -> list[Datum]:
    """Datums with random advantages."""
    rng = np.random.default_rng(seed)
    return [
        Datum(
            prompt, c.token_ids_T, c.logprobs_T, rng.normal(size=len(c.token_ids_T)), np.ones(len(c.token_ids_T), bool)
        )
        for prompt, group in zip(prompts, completions_PG, strict=True)
        for c in group
    ]


def random_datums(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Datum]:
    """Datums of given (prompt, completion) lengths whose sampled log-probs are made up."""
    rng = np.random.default_rng(seed)
    return [
        Datum(
            prompt_ids=rng.integers(3, VOCABULARY, size=prompt),
            completion_ids_T=rng.integers(3, VOCABULARY, size=length),
            logprobs_T=-rng.uniform(3.0, 6.0, size=length).astype(np.float32),
            advantages_T=rng.normal(size=length),
            mask_T=np.ones(length, bool),
        )
        for prompt, length in sizes
    ]


class PlainTokenizer:
    """As much of a tokenizer as an engine needs."""

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(chr(id) for id in row if id > EOS) for row in rows]


def gradients(policy: Policy) -> Mapping[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in policy.adapted.named_parameters() if p.requires_grad and p.grad is not None}
