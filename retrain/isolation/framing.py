"""Messages over a pipe: a length of four bytes, then the message."""

from __future__ import annotations

import struct
from collections.abc import Iterator

LENGTH = struct.Struct(">I")


def frame(body: bytes) -> bytes:
    """The bytes that carry a message."""
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes as they come, cut into messages; what a killed process left unfinished is never seen."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield the messages that are now whole."""
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
