"""An on-disk cache of judge verdicts by a hash of the request, shared between processes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from retrain.errors import ConfigError

_LOCK_WAIT_S = 30.0
# Old builds of SQLite allow at most 999 variables per statement.
_MAX_KEYS = 500


def hash_question(*parts: object) -> str:
    """The cache key of a request."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class VerdictCache:
    """A SQLite table from hash to verdict; in memory if the path is empty."""

    def __init__(self, folder: str) -> None:
        self._lock = threading.Lock()
        path = Path(folder).expanduser() / "verdicts.sqlite" if folder else Path(":memory:")
        try:
            if folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._table = _open_table(path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"[reward] judge_cache = {folder!r} cannot be used: {error}.  Try: another folder"
            ) from error

    def find(self, keys: Iterable[str]) -> dict[str, float]:
        """Cached verdicts."""
        wanted, found = list(dict.fromkeys(keys)), dict[str, float]()
        with self._lock:
            for at in range(0, len(wanted), _MAX_KEYS):
                some = wanted[at : at + _MAX_KEYS]
                marks = ",".join("?" * len(some))
                found |= dict(self._table.execute(f"SELECT key, value FROM verdicts WHERE key IN ({marks})", some))
        return found

    def keep(self, verdicts: Mapping[str, float]) -> None:
        """Add verdicts; existing keys are kept."""
        with self._lock, self._table:
            self._table.executemany("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", verdicts.items())

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._lock:
            self._table.close()


def _open_table(path: Path) -> sqlite3.Connection:
    # Used by several threads, serialized by the cache's lock.
    table = sqlite3.connect(path, timeout=_LOCK_WAIT_S, check_same_thread=False)
    try:
        with table:
            table.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, value REAL NOT NULL)")
            table.execute("SELECT value FROM verdicts LIMIT 1").fetchone()
    except sqlite3.Error:
        table.close()
        raise
    return table
