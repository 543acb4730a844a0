"""Messages between the pool and its worker processes.

Requests are pickled: the parent is trusted. Replies are JSON: a worker runs third-party code, and nothing it sends may
execute here.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, NamedTuple

from retrain.isolation.framing import LENGTH, FrameBuffer, frame
from retrain.isolation.redaction import redact
from retrain.isolation.sources import Sources
from retrain.plugins import module_of_plugin

if TYPE_CHECKING:
    from retrain.types import IntArray

Prompt = str | tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class TermSpec:
    """One reward by name, with its weight."""

    type: str = "match"
    weight: float = 1.0
    custom_module: str = ""
    custom_function: str = "score"
    think_boxes: bool = True
    """Whether `match` and `math` count a box inside `<think>…</think>`."""

    @property
    def reads_box(self) -> bool:
        """Whether the score depends only on the last box and the reference."""
        return self.type in ("match", "math")

    @property
    def name(self) -> str:
        """Its name in logs."""
        return f"{self.custom_module}.{self.custom_function}" if self.type == "custom" else self.type

    @property
    def module(self) -> str:
        """The module of the user that has it, or ""."""
        if self.type == "custom":
            return self.custom_module
        return module_of_plugin("reward", self.type)


@dataclass(frozen=True)
class RewardSpec:
    """Everything a worker needs to build its reward."""

    terms: tuple[TermSpec, ...] = (TermSpec(),)
    weighted: bool = False
    search_paths: tuple[str, ...] = ()
    correct_from: float = 1.0
    """Reward from which an answer counts as correct."""


class Item(NamedTuple):
    """One completion to score. A `(response, reference)` pair is enough for rewards without extras."""

    response: str
    reference: str
    prompt: Prompt = ""
    meta: Mapping[str, object] = {}
    token_ids: IntArray | None = None
    """The sampled tokens; not sent to workers."""


@dataclass(frozen=True)
class Start:
    """The first message to a worker."""

    spec: RewardSpec
    timeout_s: float
    memory_mb: int = 0
    pass_env: tuple[str, ...] = ()
    """Environment variables that the worker sees in addition to the public ones."""
    sources: Sources = field(default_factory=Sources)
    """The user's code as it was when the first worker started."""


@dataclass(frozen=True)
class Work:
    """Items in order: `(response, reference, extras)`. `first` is the number of the first one."""

    items: tuple[tuple[str, str, dict[str, object]], ...]
    first: int


@dataclass(frozen=True)
class Reply:
    """A worker's reply: `ready` or `failed` once, then `value`, `none` or `error` for each item in order.

    `broken` marks invalid bytes; `number` is the number of the item.
    """

    kind: str
    number: int = 0
    value: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    extras: tuple[str, ...] = ()


def pack_request(request: Start | Work) -> bytes:
    """Encode a message to a worker."""
    return frame(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))


def pack_reply(reply: Reply) -> bytes:
    """Encode a message from a worker, without empty fields."""
    return frame(json.dumps({key: value for key, value in vars(reply).items() if value}).encode())


def unpack_request(stream: IO[bytes]) -> Start | Work | None:
    """Read one message from the parent; None when the parent has exited."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    if len(body) < length:
        return None
    request: Start | Work = pickle.loads(body)
    return request


class ReplyBuffer:
    """Splits bytes from a worker into replies."""

    def __init__(self) -> None:
        self._frames = FrameBuffer()

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Add bytes and yield complete replies."""
        return map(_parse_reply, self._frames.feed(data))


def _parse_reply(body: bytes) -> Reply:
    """Parse and validate a reply, which the user's code may have tampered with."""
    try:
        fields = json.loads(body)
        reply = Reply(**{**fields, "extras": tuple(fields.get("extras", ()))})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return Reply("broken", detail=repr(error))
    texts = isinstance(reply.detail, str) and all(isinstance(extra, str) for extra in reply.extras)
    terms = isinstance(reply.terms, dict) and all(_is_number(value) for value in reply.terms.values())
    return reply if texts and terms and _is_number(reply.value) else Reply("broken", detail="a field of the wrong type")


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def read_tail(fd: int, most: int = 4000) -> str:
    """The end of the file of descriptor `fd`, without secrets."""
    read = 16 * most  # more than is shown: a secret at the cut is redacted as a whole
    try:
        size = os.fstat(fd).st_size
        data = os.pread(fd, read, max(0, size - read))
    except OSError:  # the user's code may have closed it
        return ""
    return redact(data.decode("utf-8", "replace"))[-most:].strip()
