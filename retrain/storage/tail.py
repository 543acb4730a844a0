"""Reads a file that grows from where the last read ended."""

from __future__ import annotations

from pathlib import Path

_CHUNK_BYTES = 1 << 20


class Tail:
    """The complete lines that were appended to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.seen = b""
        """The last bytes that were read: a resume may have replaced them."""

    def has_changed(self) -> bool:
        """Whether what was read is no longer there: the file was truncated or rewritten."""
        if not self.offset:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset - len(self.seen))
                return file.read(len(self.seen)) != self.seen
        except OSError:
            return True

    def rewind(self) -> None:
        """Start over."""
        self.offset, self.seen = 0, b""

    def read(self) -> list[bytes]:
        """The next lines, about a megabyte; an incomplete line is left for later."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(_CHUNK_BYTES)
                if b"\n" not in data and len(data) == _CHUNK_BYTES:
                    data += file.readline()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if not end:
            return []
        self.offset += end
        self.seen = data[max(0, end - 64) : end]
        # Only a newline ends a row: texts may contain other Unicode line breaks.
        return data[: end - 1].split(b"\n")

    def share_read(self) -> float:
        """The share of the file that was read."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return 1.0
        return min(1.0, self.offset / size) if size else 1.0
