"""Environments: problems that bring their own scoring, and may answer back over several turns.

An environment has two methods: `examples` lists its problems, `rollout` plays one of them once. It talks to the policy
through a `Chat`, which keeps the token ids; it never sees a tokenizer, an engine or another rollout. A provider is what
`[environment] provider` names: a function or class that takes the `[environment]` table and makes an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from retrain.errors import ConfigError, PluginError, RetrainError
from retrain.plugins import REGISTRIES, make_importable
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

__all__ = [
    "Chat",
    "ChatOver",
    "Environment",
    "HoldsResources",
    "Message",
    "Outcome",
    "Provider",
    "Reply",
    "Say",
    "Tool",
    "ToolCall",
    "build_environment",
    "evaluation_only",
    "load_split",
]

Message = Mapping[str, Any]
"""A chat message as chat templates know it: `role`, `content`, and where there are tools `tool_calls`."""
Tool = Mapping[str, Any]
"""A function in JSON-schema form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
Say = Callable[[str], None]
Provider = Callable[["schema.Environment", Say], "Environment"]


class ChatOver(Exception):
    """No turn is left: `max_turns` were taken, or the context is full.

    An environment that catches it scores what there is; one that lets it pass scores 0. Either way the rollout is
    counted as truncated, not as failed.
    """


@dataclass(frozen=True)
class ToolCall:
    """A function that the model asked to be called. Arguments that are not a JSON object are kept as `broken`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    broken: str = ""


@dataclass(frozen=True)
class Reply:
    """What the model said in one turn."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    cut: bool = False
    """Whether it ended because no more tokens were allowed."""


class Chat(Protocol):
    """One conversation with the policy."""

    @property
    def seed(self) -> int:
        """A number of this rollout's own, the same when the run is repeated: for anything random."""
        ...

    async def ask(self, new: str | Message | Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Add messages (a text is one of the user) and return the model's answer. Raises ChatOver."""
        ...

    async def reply_to(self, history: Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Answer a whole history; what it shares with an earlier turn keeps that turn's tokens. Raises ChatOver."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How one rollout went."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Anything worth watching, logged as the mean of `env/<name>`; not part of the reward."""
    truncated: bool = False
    """Whether the environment itself cut it short; a ChatOver is counted without it."""


@runtime_checkable
class Environment(Protocol):
    """Problems, and how one of them is played and scored. `rollout` is called many times at once in one event loop."""

    def examples(self, split: str) -> Sequence[Example]:
        """The problems of a split: `train`, or for evaluation what `[eval] split` says; empty when there are none."""
        ...

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Play one example once. An error raised here is a failed rollout, which is left out and counted."""
        ...


@runtime_checkable
class HoldsResources(Protocol):
    """An environment with something to start before the first rollout and to give back after the last: a server."""

    async def open(self) -> None:
        """Called once, in the event loop that the rollouts will run in."""
        ...

    async def close(self) -> None:
        """Called once, in the same event loop, if `open` went well."""
        ...


def build_environment(section: schema.Environment, search_paths: Sequence[str], say: Say) -> Environment:
    """Make the environment that `[environment]` names; the only place where a provider is looked up."""
    who = f"environment provider {section.provider!r}"
    provider: Any = REGISTRIES["environment"].load(section.provider, search_paths)
    # An installed provider may look for a module of the user's by its id.
    make_importable(search_paths)
    if not callable(provider):
        raise PluginError(f"{who} is {provider!r}; it must be a function or class that takes the [environment] table.")
    try:
        environment = provider(section, say)
    except RetrainError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{who} raised {error!r} when it was made.") from error
    if not isinstance(environment, Environment):
        raise PluginError(f"{who} made {environment!r}, which lacks an examples or a rollout method.")
    return environment


def load_split(environment: Environment, section: schema.Environment, split: str) -> Sequence[Example]:
    """The examples of a split, checked: each has something to ask, and there is at least one."""
    who = f"environment {section.id or section.provider!r}"
    try:
        examples: object = environment.examples(split)
    except RetrainError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{who} raised {error!r} in examples({split!r}).") from error
    if not isinstance(examples, Sequence) or isinstance(examples, str):
        raise PluginError(f"{who} returned {type(examples).__name__} from examples({split!r}); it must be a list.")
    if not len(examples):
        raise _no_examples(who, split)
    for index, example in enumerate(examples[: min(len(examples), LOOKED_AT)]):
        if not isinstance(example, Example):
            raise PluginError(
                f"{who} gave {type(example).__name__} where a retrain.types.Example is needed (example {index})."
            )
        if not _asks_something(example.prompt):
            raise PluginError(f"{who} has an empty prompt at row {index} (id {example.id!r}).")
    return examples


LOOKED_AT = 16
"""Examples checked before a run: some are made only when asked for, slowly. Each is checked again when played."""


def _asks_something(prompt: str | Sequence[Message]) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    return any(message.get("content") for message in prompt)


def evaluation_only(who: str, reason: str) -> ConfigError:
    """The error for an environment that cannot be trained on."""
    return ConfigError(
        f"{who} has no rows to train on: {reason}. It is made for evaluation.  "
        'Try: one that trains, for example id = "primeintellect/gsm8k" or "primeintellect/wordle".'
    )


def _no_examples(who: str, split: str) -> ConfigError:
    if split == "train":
        return evaluation_only(who, "its training split is empty")
    return ConfigError(f"{who} has no rows to evaluate on ([eval] split = {split!r}).  Try: [eval] every = 0.")
