"""Whether the prompts of an environment fit into the context, as `retrain doctor` finds out."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from retrain.checks.preflight import known_context
from retrain.config import TrainConfig
from retrain.errors import RetrainError
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.environments import Environment, Message, Reply, Tool
    from retrain.environments.template import ChatTemplate

    Turn = tuple[Sequence[Message], Sequence[Tool]]

FIRST_TURN_S = 10.0
"""Limit for what an environment does before it asks for the first turn."""


def measure_prompts(config: TrainConfig, environment: Environment, examples: Sequence[Example]) -> tuple[str, str]:
    """How long prompts are, if that can be known, and what may be wrong with that; raises if no rollout can begin."""
    context, most = known_context(config), config.training.max_prompt_tokens
    if config.backend.backend != "local" or context is None:
        return "", ""
    from retrain.environments import as_messages  # noqa: PLC0415
    from retrain.environments.template import ChatTemplate  # noqa: PLC0415  (imports transformers)
    from retrain.modeling.tokens import load_tokenizer  # noqa: PLC0415

    try:
        template = ChatTemplate(load_tokenizer(config.model.model))
    except RetrainError:
        return "", ""  # the check of the tokenizer says why
    first = _count_tokens(template, _first_turn(environment, examples[0]))
    if 0 < most < context:
        cut = f"the first turn has {first} tokens, and [training] max_prompt_tokens = {most} cuts off its beginning"
        return "", f"{cut}, tools included.  Try: max_prompt_tokens = 0" if first > most else ""
    if first >= context:
        raise RetrainError(
            f"the first turn has {first} tokens, and the context length is {context}.  "
            "Try: shorter prompts, fewer tools, or a model with a longer context"
        )
    # An environment may ask something else than the prompt.
    longest = max((example.prompt for example in examples), key=lambda prompt: len(str(prompt)))
    tokens = max(first, _count_tokens(template, (as_messages(longest), ())))
    if tokens >= context:
        hint = f"Try: [training] max_prompt_tokens = {max(1, context - config.training.max_tokens)}, or shorter prompts"
        return "", f"a prompt has {tokens} tokens, and the context length is {context}.  {hint}"
    found, room = f"prompts take up to {tokens:,} of {context:,} tokens", context - tokens
    if tokens and room < config.training.max_tokens:
        why = f"which leaves less than [training] max_tokens = {config.training.max_tokens}"
        return "", f"{found}, {why}.  Try: max_tokens = {room}, or shorter prompts"
    return found if tokens else "", ""


class _Asked(BaseException):
    """Ends a rollout at its first turn: no environment takes it for an error of its own."""


class _FirstTurn:
    """A `Chat` that takes down what the first turn asks."""

    def __init__(self) -> None:
        self.seed = 0
        self.asked: Turn = ((), ())

    async def ask(self, new: str | Message | Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        from retrain.environments import as_messages  # noqa: PLC0415

        return await self.reply_to(as_messages(new), tools)

    async def reply_to(self, history: Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        self.asked = (history, tools)
        raise _Asked


def _first_turn(environment: Environment, example: Example) -> Turn:
    """The messages and tools of a rollout's first turn, as far as they can be known without resources to open."""
    from retrain.environments import ManagedEnvironment, run_rollout  # noqa: PLC0415

    if isinstance(environment, ManagedEnvironment):
        return (), ()
    read_end, write_end = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # about threads, which the rollout does not need
        child = os.fork()
    if not child:
        # A rollout may block or end its process, as it may in a run.
        with suppress(BaseException):
            chat = _FirstTurn()
            with suppress(BaseException):
                asyncio.run(run_rollout(environment, example, chat))
            with open(write_end, "w", encoding="utf-8") as stream:
                json.dump(chat.asked, stream)
        os._exit(0)
    os.close(write_end)
    written, until = b"", time.monotonic() + FIRST_TURN_S
    while select.select([read_end], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(read_end, 65_536)
        if not part:
            break
        written += part
    os.close(read_end)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        messages, tools = json.loads(written)
    except ValueError:
        return (), ()
    return messages, tools


def _count_tokens(template: ChatTemplate, turn: Turn) -> int:
    try:
        return len(template.encode(template.render(*turn), begins=True)) if turn[0] else 0
    except RetrainError:
        return 0  # only the run knows the conversation
