"""Whether the prompts of an environment fit into the context, as `retrain doctor` finds out."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from retrain.checks.preflight import known_context
from retrain.config import TrainConfig
from retrain.errors import RetrainError
from retrain.isolation.redaction import redact
from retrain.types import Completion, Example, IntArray

if TYPE_CHECKING:
    from retrain.environments import Environment, Message
    from retrain.environments.template import ChatTemplate

FIRST_TURN_S = 10.0
"""Limit for what an environment does before it asks for the first turn."""
SHOWN_FAILURE = 300


def measure_prompts(config: TrainConfig, environment: Environment, examples: Sequence[Example]) -> tuple[str, str]:
    """How long prompts are, if that can be known, and what may be wrong with that; raises if no rollout can begin."""
    context, most = known_context(config), config.training.max_prompt_tokens
    if config.backend.backend != "local" or context is None:
        return "", ""
    from retrain.environments.template import ChatTemplate  # noqa: PLC0415  (imports transformers)
    from retrain.modeling.tokens import load_tokenizer  # noqa: PLC0415

    try:
        template = ChatTemplate(load_tokenizer(config.model.model))
    except RetrainError:
        return "", ""  # the check of the tokenizer says why
    first, failure = _count_first_turn(environment, examples[0], template)
    if failure:
        return "", failure
    if 0 < most < context:
        cut = f"the first turn has {first} tokens, and [training] max_prompt_tokens = {most} cuts off its beginning"
        # Uncut, it may not fit.
        others = "shorter prompts, fewer tools, or a model with a longer context"
        fix = "max_prompt_tokens = 0" if first + config.training.max_tokens <= context else others
        return "", f"{cut}, tools included.  Try: {fix}" if first > most else ""
    if first >= context:
        raise RetrainError(
            f"the first turn has {first} tokens, and the context length is {context}.  "
            "Try: shorter prompts, fewer tools, or a model with a longer context"
        )
    # An environment may ask something else than the prompt.
    longest = max((example.prompt for example in examples), key=lambda prompt: len(str(prompt)))
    tokens = max(first, _count_tokens(template, longest))
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


def _count_first_turn(environment: Environment, example: Example, template: ChatTemplate) -> tuple[int, str]:
    """The tokens of a rollout's first turn, and what is wrong if it has none.

    They are 0 if they cannot be known, as without resources that a run opens.
    """
    from retrain.environments import ManagedEnvironment, run_rollout  # noqa: PLC0415
    from retrain.environments.chat import Limits, PolicyChat  # noqa: PLC0415

    if isinstance(environment, ManagedEnvironment):
        return 0, ""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # about threads, which the rollout does not need
        child = os.fork()
    if not child:
        asked: list[int] = []

        async def note(ids: IntArray, room: int) -> Completion:
            asked.append(len(ids))
            raise _Asked

        # A rollout may block or end its process, as it may in a run.
        with suppress(BaseException):
            chat = PolicyChat(template, note, Limits(max_tokens=1, context=sys.maxsize), seed=0)
            failure = "a rollout ended without calling the model.  Try: reply = await chat.ask(example.prompt)"
            try:
                asyncio.run(run_rollout(environment, example, chat))
            except BaseException as error:
                failure = redact(f"a rollout failed before its first turn: {type(error).__name__}: {error}")
            result = (max(asked), "") if asked else (0, failure[:SHOWN_FAILURE])
            os.write(write_end, json.dumps(result).encode())
        os._exit(0)
    os.close(write_end)
    is_known = select.select([read_end], [], [], FIRST_TURN_S)[0]
    written = os.read(read_end, select.PIPE_BUF) if is_known else b""
    os.close(read_end)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not written and status > 0:
        return 0, f"a rollout ended its process with status {status} before its first turn"
    first, failure = json.loads(written or b'[0, ""]')
    return first, failure


def _count_tokens(template: ChatTemplate, prompt: str | Sequence[Message]) -> int:
    """The tokens of an example's prompt, if it is one that a conversation can begin with."""
    from retrain.environments import as_messages  # noqa: PLC0415
    from retrain.environments.chat import clean  # noqa: PLC0415

    try:
        return len(template.encode(template.render(list(map(clean, as_messages(prompt))), ()), begins=True))
    except RetrainError:
        return 0  # only the run knows the conversation
