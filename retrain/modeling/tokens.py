"""The tokenizer's side of a run: prompts into token ids, and the text of each token."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from retrain.builtin import resolve_model
from retrain.errors import ConfigError
from retrain.types import Example, IntArray


def load_tokenizer(model: str, where: str = "[model] model") -> Any:
    """The model's tokenizer, or a sentence that says how to get it; `where` is the option that names the model."""
    # Without PyTorch the library advises to install it as it is imported; a remote backend needs none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # noqa: PLC0415  (its first word is to be kept from the screen)

    try:
        return AutoTokenizer.from_pretrained(resolve_model(model))
    except (OSError, ValueError) as error:
        raise ConfigError(explain_missing_model(model, error, where)) from error


def explain_missing_model(name: str, error: Exception, where: str = "[model] model") -> str:
    """Why a model could not be loaded, and what to do about it."""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "/" in name and not Path(name).expanduser().is_dir():
        reason = f"no such folder, and as a Hub id: {reason}"
    return (
        f"{where} = {name!r} could not be loaded: {reason}  "
        f'Try: check the id; or download it elsewhere and point at the folder: {where.split()[-1]} = "/path/to/model"; '
        f'or use the embedded one: {where.split()[-1]} = "builtin:tiny".'
    )


def vocabulary_texts(tokenizer: Any) -> list[str]:
    """The text of every token id, with the tokenizer's own space markers; planning detectors read these."""
    return [token if token is not None else "" for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]


class PromptEncoder:
    """Examples into prompt token ids, through the chat template; each distinct prompt is encoded once."""

    def __init__(
        self,
        tokenizer: Any,
        system_prompt: str,
        max_prompt_tokens: int,
        say: Callable[[str], None],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        self.system_prompt = system_prompt
        self.max_prompt_tokens = max_prompt_tokens
        self.encoded: dict[object, IntArray] = {}
        if tokenizer.chat_template is None:
            say("Warning: the tokenizer has no chat template; prompts are given to the model as plain text.")

    def encode(self, example: Example) -> IntArray:
        """Token ids of the prompt, cut from the left where max_prompt_tokens says so."""
        key = example.prompt if isinstance(example.prompt, str) else tuple(tuple(m.items()) for m in example.prompt)
        if key not in self.encoded:
            self.encoded[key] = self.encode_once(example)
        return self.encoded[key]

    def encode_once(self, example: Example) -> IntArray:
        """The same for a prompt that is not kept, since it will not come again."""
        ids = np.asarray(self._ids(self._messages(example)), dtype=np.int64)
        return ids[-self.max_prompt_tokens :] if self.max_prompt_tokens else ids

    def longest(self, examples: Iterable[Example]) -> int:
        """Tokens of the longest prompt."""
        return max((len(self.encode(example)) for example in examples), default=0)

    def _messages(self, example: Example) -> list[Mapping[str, str]]:
        own: list[Mapping[str, str]]
        own = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else list(example.prompt)
        if self.system_prompt and not any(message["role"] == "system" for message in own):
            return [{"role": "system", "content": self.system_prompt}, *own]
        return own

    def _ids(self, messages: list[Mapping[str, str]]) -> list[int]:
        if self.tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self.template_kwargs
        )
        # The template has already written the special tokens.
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])
