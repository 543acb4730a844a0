"""Loads tokenizers, encodes prompts, and lists the text of each token."""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from retrain.builtin import resolve_model
from retrain.errors import ConfigError
from retrain.modeling.files import NO_TOKENIZER, find_model, lacks_tokenizer, suggest_tokenizer
from retrain.types import Example, IntArray


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: str | None
    eos_token_id: int | None
    all_special_ids: Sequence[int]

    def __len__(self) -> int: ...

    def __call__(
        self, text: str, *, add_special_tokens: bool = ..., verbose: bool = ...
    ) -> Mapping[str, Sequence[int]]:
        """Encode a text; the ids are under `input_ids`."""
        ...

    def decode(
        self,
        token_ids: Sequence[int] | IntArray,
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str:
        """The text of token ids."""
        ...

    def batch_decode(self, sequences: Sequence[IntArray | list[int]], *, skip_special_tokens: bool = ...) -> list[str]:
        """The texts of several sequences."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **kwargs: object,
    ) -> str:
        """Render chat messages."""
        ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary entries of token ids."""
        ...

    def get_added_vocab(self) -> Mapping[str, int]:
        """The ids of tokens that were added to the vocabulary, such as special ones."""
        ...

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write the tokenizer's files."""
        ...


def load_tokenizer(model: str, where: str = "[model] model") -> Tokenizer:
    """Load the model's tokenizer; `where` is the option that names the model, for errors."""
    # transformers prints advice to install PyTorch, which a remote backend does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # noqa: PLC0415  (after the variable above is set)

    files = find_model(model)
    if lacks_tokenizer(files):
        raise ConfigError(f"{where} = {model!r} {NO_TOKENIZER}  {suggest_tokenizer(files)}")
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    except (OSError, ValueError) as error:
        raise ConfigError(explain_missing_model(model, error, where)) from error
    if is_empty(tokenizer):
        raise ConfigError(
            f"{where} = {model!r} has a tokenizer without a vocabulary: any text becomes nothing, or unknown tokens.  "
            f"{suggest_tokenizer(files)}"
        )
    return tokenizer


def is_empty(tokenizer: Tokenizer) -> bool:
    """Whether texts are lost: transformers makes such a tokenizer where the files of the vocabulary are missing."""
    known: set[int] = set()
    # Without a vocabulary, encoding may raise anything.
    with suppress(Exception):
        encoded = tokenizer(string.printable, add_special_tokens=False, verbose=False)["input_ids"]
        known = set(encoded) - set(tokenizer.all_special_ids)
    # One: some of these tokenizers have a token for a space. A vocabulary may be of another script.
    return len(known) <= 1 and len(tokenizer) - len(tokenizer.get_added_vocab()) <= 1


def explain_missing_model(name: str, error: Exception, where: str = "[model] model") -> str:
    """Why a model could not be loaded, and what to try."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Later lines may be lists of hundreds of classes, unless the first one announces them.
    reason = " ".join(lines) if lines[0].endswith(":") else lines[0]
    if Path(name).expanduser().is_dir():
        return f"{where} = {name!r} could not be loaded: {reason}  Try: check the files there, or copy them again."
    if "/" in name:
        reason = f"no such folder, and as a Hub id: {reason}"
    return (
        f"{where} = {name!r} could not be loaded: {reason}  "
        f'Try: check the id; or download it elsewhere and point at the folder: {where.split()[-1]} = "/path/to/model"; '
        f'or use the built-in one: {where.split()[-1]} = "builtin:tiny".'
    )


def vocabulary_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of every token id, with the tokenizer's space markers, for planning detectors."""
    return [token if token is not None else "" for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]


class PromptEncoder:
    """Encodes examples with the chat template; each distinct prompt is encoded once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        system_prompt: str,
        max_prompt_tokens: int,
        log: Callable[[str], None],
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        self.system_prompt = system_prompt
        self.max_prompt_tokens = max_prompt_tokens
        self.encoded: dict[object, IntArray] = {}
        self._cut: set[object] = set()
        if tokenizer.chat_template is None:
            log("Warning: the tokenizer has no chat template; prompts are given to the model as plain text.")

    def encode(self, example: Example) -> IntArray:
        """Token ids of the prompt, truncated from the left to max_prompt_tokens."""
        key = _key(example)
        if key not in self.encoded:
            ids = self._encode_whole(example)
            self.encoded[key] = self._cut_off(ids)
            if len(self.encoded[key]) < len(ids):
                self._cut.add(key)
        return self.encoded[key]

    def encode_once(self, example: Example) -> IntArray:
        """The same without caching, for prompts that do not repeat."""
        return self._cut_off(self._encode_whole(example))

    def longest_whole(self, examples: Iterable[Example]) -> int:
        """Tokens of the longest prompt before it is cut."""
        return max((len(self._encode_whole(example)) for example in examples), default=0)

    def _encode_whole(self, example: Example) -> IntArray:
        return np.asarray(self._ids(self._messages(example)), dtype=np.int64)

    def _cut_off(self, ids: IntArray) -> IntArray:
        return ids[-self.max_prompt_tokens :] if self.max_prompt_tokens else ids

    def describe_cut(self, examples: Sequence[Example]) -> str:
        """How many of these examples have a prompt that max_prompt_tokens cuts; "" if none."""
        if not self.max_prompt_tokens:
            return ""
        self.longest(examples)
        cut = sum(_key(example) in self._cut for example in examples)
        return f"{cut} cut to [training] max_prompt_tokens = {self.max_prompt_tokens}" if cut else ""

    def longest(self, examples: Iterable[Example]) -> int:
        """Tokens of the longest prompt."""
        return max((len(self.encode(example)) for example in examples), default=0)

    def _messages(self, example: Example) -> list[Mapping[str, str]]:
        messages: list[Mapping[str, str]]
        messages = (
            [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else list(example.prompt)
        )
        if self.system_prompt and not any(message["role"] == "system" for message in messages):
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def _ids(self, messages: list[Mapping[str, str]]) -> list[int]:
        if self.tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            return list(self.tokenizer(text, verbose=False)["input_ids"])
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self.template_kwargs
        )
        # The template has already written the special tokens. Without `verbose`, transformers warns about prompts that
        # exceed the context, which is an error with a remedy here.
        return list(self.tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def _key(example: Example) -> object:
    """The same for examples with the same prompt."""
    prompt = example.prompt
    return prompt if isinstance(prompt, str) else tuple(tuple(message.items()) for message in prompt)
