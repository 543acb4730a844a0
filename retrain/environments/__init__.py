"""Environments: tasks with their own scoring, possibly over several turns.

An environment has two methods: `examples` lists its tasks, `rollout` runs one of them once. It talks to the policy
through a `Chat`, which keeps the token ids; it never sees a tokenizer, an engine or another rollout. A provider, named
by `[environment] provider`, is a function or class that takes the `[environment]` table and a log function, and returns
an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Protocol, runtime_checkable

from retrain.config import schema
from retrain.errors import ConfigError, PluginError, blaming
from retrain.plugins import REGISTRIES, is_plugin, make_importable
from retrain.types import Example

__all__ = [
    "Chat",
    "ChatOver",
    "Environment",
    "Log",
    "ManagedEnvironment",
    "Message",
    "Outcome",
    "Provider",
    "Reply",
    "Tool",
    "ToolCall",
    "as_messages",
    "build_environment",
    "evaluation_only",
    "load_split",
    "run_rollout",
]

Message = Mapping[str, Any]
"""A chat message in the format of chat templates: `role`, `content`, and with tools `tool_calls`."""
Tool = Mapping[str, Any]
"""A function in JSON-schema form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
Log = Callable[[str], None]
Provider = Callable[["schema.Environment", Log], "Environment"]


class ChatOver(Exception):
    """No turn is left: `max_turns` is reached, or the context is full.

    An environment that catches it scores the conversation so far; otherwise the reward is 0. Either way the rollout
    counts as truncated, not as failed.
    """


@dataclass(frozen=True)
class ToolCall:
    """A function call of the model. Arguments that are not a JSON object are kept as `broken`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    broken: str = ""


@dataclass(frozen=True)
class Reply:
    """The model's reply in one turn."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    cut: bool = False
    """Whether it reached the token limit."""


class Chat(Protocol):
    """One conversation with the policy."""

    @property
    def seed(self) -> int:
        """A seed for this rollout, the same when the run is repeated."""

    async def ask(self, new: str | Message | Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Add messages (a string is a user message) and return the model's reply. Raises ChatOver."""

    async def reply_to(self, history: Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Reply to a complete history; a prefix shared with an earlier turn keeps its tokens. Raises ChatOver."""


@dataclass(frozen=True)
class Outcome:
    """The result of one rollout."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics, logged as the mean of `env/<name>`; not part of the reward."""
    truncated: bool = False
    """Whether the environment cut it short; a ChatOver is counted anyway."""


@runtime_checkable
class Environment(Protocol):
    """Tasks, and how one of them is run and scored. `rollout` runs concurrently in one event loop."""

    def examples(self, split: str) -> Sequence[Example]:
        """The tasks of a split: `train`, or `[eval] split` for evaluation; may be empty."""

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Run one example once. An error raised here is a failed rollout, which is excluded and counted."""


@runtime_checkable
class ManagedEnvironment(Protocol):
    """An environment with resources to open before the first rollout and close after the last, such as a server."""

    async def open(self) -> None:
        """Called once, in the event loop that the rollouts will run in."""

    async def close(self) -> None:
        """Called once, in the same event loop, if `open` succeeded."""


def build_environment(section: schema.Environment, search_paths: Sequence[str], log: Log) -> Environment:
    """Build the environment of the `[environment]` table."""
    who = f"environment provider {section.provider!r}"
    provider = REGISTRIES["environment"].load(section.provider, search_paths)
    # An installed provider may import a module of the user by its id.
    make_importable(search_paths)
    if not callable(provider):
        raise PluginError(f"{who} is {provider!r}; it must be a function or class callable as f(section, log).")
    with blaming(who, "when it was built"):
        environment = provider(section, log)
    if not isinstance(environment, Environment):
        raise PluginError(f"{who} returned {environment!r}, which lacks an examples or a rollout method.")
    return environment


def as_messages(new: str | Message | Sequence[Message]) -> list[Message]:
    """What `Chat.ask` is given, as messages; a string is a user message."""
    if isinstance(new, str):
        return [{"role": "user", "content": new}]
    return [new] if isinstance(new, Mapping) else list(new)


async def run_rollout(environment: Environment, example: Example, chat: Chat) -> Outcome:
    """Run one example once; an environment that forgot `async` is told so."""
    running: object = environment.rollout(example, chat)
    if not isawaitable(running):
        raise TypeError(f"rollout returned {type(running).__name__} at once.  Try: async def rollout(...)")
    outcome: Outcome = await running
    return outcome


def load_split(environment: Environment, section: schema.Environment, split: str) -> Sequence[Example]:
    """The validated examples of a split: at least one, none with an empty prompt."""
    who = f"environment {section.id or section.provider!r}"
    with blaming(who, f"in examples({split!r})"):
        examples: object = environment.examples(split)
    if not isinstance(examples, Sequence) or isinstance(examples, str):
        raise PluginError(f"{who} returned {type(examples).__name__} from examples({split!r}); it must be a list.")
    if not len(examples):
        raise _no_examples(who, section, split)
    for index, example in enumerate(examples[: min(len(examples), CHECKED_EXAMPLES)]):
        if not isinstance(example, Example):
            raise PluginError(
                f"{who} returned {type(example).__name__} instead of a retrain.types.Example (example {index})."
            )
        if not _is_nonempty(example.prompt):
            raise PluginError(f"{who} has an empty prompt at row {index} (id {example.id!r}).")
    return examples


CHECKED_EXAMPLES = 16
"""Number of examples validated before a run: some are generated slowly. Each is validated again when used."""


def _is_nonempty(prompt: str | Sequence[Message]) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    return any(message.get("content") for message in prompt)


def evaluation_only(who: str, reason: str) -> ConfigError:
    """The error for an environment that cannot be trained on."""
    return ConfigError(
        f"{who} has no rows to train on: {reason}. If it is for evaluation only, choose another.  "
        'Try: for example id = "primeintellect/gsm8k" or "primeintellect/wordle"'
    )


def _no_examples(who: str, section: schema.Environment, split: str) -> ConfigError:
    if split == "train" and is_plugin("environment", section.provider):
        # The user wrote it; another id would not help.
        return ConfigError(f"{who} has no rows to train on.  Try: return at least one Example from examples('train')")
    if split == "train":
        return evaluation_only(who, "its training split is empty")
    return ConfigError(f"{who} has no rows to evaluate on ([eval] split = {split!r}).  Try: [eval] every = 0.")
