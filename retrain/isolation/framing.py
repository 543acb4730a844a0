"""Length-prefixed messages over a pipe: four bytes of length, then the message."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator

LENGTH = struct.Struct(">I")


def frame(body: bytes) -> bytes:
    """A message with its length prefix."""
    return LENGTH.pack(len(body)) + body


class PipeWriter:
    """Writes to a pipe, from any thread of this process but not from processes that the user's code forked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Write all of it; exits if called in a forked process."""
        if os.getpid() != self._owner:
            os._exit(1)
        rest = memoryview(data)
        # That the parent has exited is noticed by the reader of its requests.
        with self._lock, contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._fd, rest) :]


class FrameBuffer:
    """Splits a byte stream into messages; an incomplete last message is ignored."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield complete messages."""
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, start)
            end = start + LENGTH.size + length
            if len(self._bytes) < end:
                break
            yield bytes(self._bytes[start + LENGTH.size : end])
            start = end
        del self._bytes[:start]
