"""Length-prefixed messages over a pipe: four bytes of length, then the message."""

from __future__ import annotations

import struct
from collections.abc import Iterator

LENGTH = struct.Struct(">I")


def frame(body: bytes) -> bytes:
    """A message with its length prefix."""
    return LENGTH.pack(len(body)) + body


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
