"""Tokens that a model has no embedding for, found in prompts before the model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from retrain.checks.preflight import models_of, reads_weights
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.modeling.files import find_model, read_vocabulary_size
from retrain.modeling.tokens import PromptEncoder, Tokenizer
from retrain.types import Example, IntArray

_PROBE = Example(prompt="probe", reference="")


def check_prompt_tokens(config: TrainConfig, encoder: PromptEncoder, asked: Mapping[str, Sequence[Example]]) -> None:
    """Raise for a prompt with a token that the model has no embedding for; the error names the prompt's table."""
    for table, examples in asked.items():
        _check_ids(config, encoder, map(encoder.encode, examples), f"prompts of {table} have", "[model] model")


def check_template(config: TrainConfig, tokenizer: Tokenizer, where: str = "[model] model") -> None:
    """Raise if the tokenizer adds such a token to any prompt; `where` is the option that names the model."""
    most = config.training.max_prompt_tokens
    encoder = PromptEncoder(tokenizer, config.data.system_prompt, most, lambda line: None)
    encoded: list[IntArray] = []
    # Templates may raise anything, and may accept only other conversations.
    with suppress(Exception):
        encoded.append(encoder.encode_once(_PROBE))
    _check_ids(config, encoder, encoded, "its chat template or tokenizer adds", where)


def _check_ids(config: TrainConfig, encoder: PromptEncoder, encoded: Iterable[IntArray], what: str, where: str) -> None:
    if not reads_weights(config):
        return
    name = models_of(config)[where]
    size = read_vocabulary_size(find_model(name))
    if size is None:
        return
    largest = max((int(ids.max()) for ids in encoded if len(ids)), default=0)
    if largest >= size:
        (token,) = encoder.tokenizer.convert_ids_to_tokens([largest])
        raise ConfigError(
            f"{where} = {json.dumps(name)}: {what} the token {json.dumps(token)} with the id {largest}, and the model "
            f"has embeddings for ids up to {size - 1} (vocab_size = {size} in its config.json).  Try: the tokenizer "
            "and chat template that belong to the model, or resize_token_embeddings of transformers"
        )
