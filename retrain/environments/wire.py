"""Messages between the training process and the environment's process.

Requests are pickled: the training process is trusted, and arguments of an environment may have any TOML type. Replies
are JSON: they come from third-party code, and nothing in them may execute here.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.config import schema
from retrain.data.order import digest_of
from retrain.environments import Message, Outcome, Reply, Tool, ToolCall
from retrain.errors import BackendError, ConfigError, MissingExtraError, PluginError, RetrainError, RolloutError
from retrain.isolation.framing import frame
from retrain.isolation.sources import Sources
from retrain.isolation.tracebacks import describe_error
from retrain.types import Example

_ERRORS = {kind.__name__: kind for kind in (BackendError, ConfigError, MissingExtraError, PluginError, RolloutError)}

WireReply = Mapping[str, Any]
"""A decoded reply: `kind`, `number` and the fields of that kind."""


@dataclass(frozen=True)
class Start:
    """The first request: what to build, and the splits to load immediately after a restart."""

    section: schema.Environment
    search_paths: tuple[str, ...]
    splits: tuple[str, ...] = ()
    sources: Sources = field(default_factory=Sources)
    """The user's code as it was when the first process started."""


@dataclass(frozen=True)
class Request:
    """`split`, `items`, `open`, `close`, `play`, `cancel` or `answer`. Replies refer to `number`."""

    kind: str
    number: int
    arguments: tuple[Any, ...] = ()


def pack_request(request: Start | Request) -> bytes:
    """A request as bytes."""
    return frame(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))


def pack_reply(kind: str, number: int = 0, **fields: object) -> bytes:
    """A reply as bytes; raises TypeError unless it is plain data."""
    return frame(json.dumps({"kind": kind, "number": number, **fields}).encode())


def error_fields(error: BaseException) -> dict[str, str]:
    """An error as fields of a reply. Errors of retrain keep their type."""
    return {"error": type(error).__name__ if isinstance(error, RetrainError) else "", "detail": describe_error(error)}


def restore_error(reply: WireReply, unknown: type[RetrainError]) -> RetrainError:
    """The error in a reply; of type `unknown` unless it is one of retrain."""
    return _ERRORS.get(reply["error"], unknown)(reply["detail"])


def example_fields(example: Example) -> list[object]:
    """An example with a digest of its meta, which only the environment needs."""
    prompt = example.prompt if isinstance(example.prompt, str) else [dict(message) for message in example.prompt]
    return [prompt, example.reference, example.id, digest_of([example]).partition("~")[2]]


def read_example(fields: Sequence[Any], place: tuple[str, int | None, int]) -> Example:
    """The example, with its location in the environment as meta; the digest shows whether its own was edited."""
    prompt, reference, id, digest = fields
    meta = {"place": place} | ({"digest": digest} if digest else {})
    return Example(prompt if isinstance(prompt, str) else tuple(prompt), reference, id, meta)


def turn_fields(messages: Sequence[Message], tools: Sequence[Tool]) -> dict[str, object]:
    """Messages and tools of a turn."""
    return {"messages": [dict(message) for message in messages], "tools": [dict(tool) for tool in tools]}


def reply_fields(reply: Reply) -> tuple[object, ...]:
    """The model's reply as arguments of an `answer` request."""
    calls = [(call.name, dict(call.arguments), call.id, call.broken) for call in reply.tool_calls]
    return reply.text, calls, reply.cut


def read_reply(text: str, calls: Sequence[tuple[str, Mapping[str, Any], str, str]], cut: bool) -> Reply:
    """The inverse of `reply_fields`."""
    return Reply(text, tuple(ToolCall(*call) for call in calls), cut)


def outcome_fields(outcome: object) -> dict[str, object]:
    """An outcome with its numbers as floats."""
    if not isinstance(outcome, Outcome):
        raise RolloutError(f"the environment returned {type(outcome).__name__} instead of an Outcome.")
    metrics = {str(name): _to_number(value, f"metric {name!r}") for name, value in outcome.metrics.items()}
    reward = _to_number(outcome.reward, "reward")
    return {"reward": reward, "metrics": metrics, "truncated": bool(outcome.truncated)}


def _to_number(value: Any, what: str) -> float:
    try:
        if not isinstance(value, str | bytes):  # which float() would parse
            return float(value)
    except (TypeError, ValueError):
        pass
    raise RolloutError(f"the environment returned the {what} {repr(value)[:60]}, which is not a number.")
