"""A table to play environments at: an engine whose answers are written by a function, with the embedded tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from retrain.environments import Environment
from retrain.environments.chat import Limits
from retrain.environments.runner import EnvironmentRunner, Rules
from retrain.environments.template import ChatTemplate
from retrain.modeling.tokens import load_tokenizer
from retrain.types import Completion, Group, IntArray, Sampling

Answer = Callable[[str], str]
"""From the whole text of a prompt to the model's reply."""


@functools.cache
def tiny_tokenizer() -> Any:
    return load_tokenizer("builtin:tiny")


class TextEngine:
    """Answers in text; remembers every batch it was given."""

    def __init__(self, answer: Answer, tokenizer: Any = None) -> None:
        self.answer = answer
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.batches: list[list[str]] = []
        self.sizes: list[int] = []

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.batches.append(texts)
        self.sizes.append(len(prompts) * sampling.n)
        return [[self.complete(text, sampling.max_tokens) for _ in range(sampling.n)] for text in texts]

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        ids = [*self.tokenizer(self.answer(prompt), add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        kept = np.array(ids[:max_tokens], dtype=np.int64)
        ended = "stop" if len(kept) == len(ids) else "length"
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        noise = -np.linspace(0.1, 1.0, len(kept), dtype=np.float32)
        return Completion(kept, noise, text, ended, np.abs(noise))  # type: ignore[arg-type]

    def sync(self, weights: object) -> None:
        pass

    def shutdown(self) -> None:
        pass


def player(environment: Environment, log: Callable[[str], None] = lambda _: None, **limits: Any) -> EnvironmentRunner:
    """A player with limits that do not matter unless they are given; `timeout_s` is one of them."""
    timeout_s, in_rounds = limits.pop("timeout_s", 20.0), limits.pop("in_rounds", False)
    tokenizer = limits.pop("tokenizer", None) or tiny_tokenizer()
    rules = Rules(Limits(**{"max_tokens": 64, "context": 2048, **limits}), timeout_s, in_rounds=in_rounds)
    return EnvironmentRunner(environment, ChatTemplate(tokenizer), rules, log, lambda *_: None)


def play(
    environment: Environment, answer: Answer | TextEngine, n: int = 2, count: int = 2, **limits: Any
) -> list[Group]:
    """Groups of `n` rollouts of the first `count` examples."""
    engine = answer if isinstance(answer, TextEngine) else TextEngine(answer, limits.get("tokenizer"))
    own = player(environment, **limits)
    try:
        examples = environment.examples("train")[:count]
        return own.sample_and_score(engine, examples, Sampling(max_tokens=64, n=n)).groups
    finally:
        own.close()
