"""Verdicts kept on disk by a hash of the question: nothing is paid for twice, and several processes may share them."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from retrain.errors import ConfigError

_LOCK_WAIT_S = 30.0
# SQLite takes at most 999 variables a statement in its oldest builds.
_MOST_KEYS = 500


def hash_question(*parts: object) -> str:
    """A key that two questions share only when they are the same."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class VerdictCache:
    """A table from hash to verdict in one SQLite file. An empty path keeps it in memory."""

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
        """The verdicts that are known."""
        wanted, found = list(dict.fromkeys(keys)), dict[str, float]()
        with self._lock:
            for at in range(0, len(wanted), _MOST_KEYS):
                some = wanted[at : at + _MOST_KEYS]
                marks = ",".join("?" * len(some))
                found |= dict(self._table.execute(f"SELECT key, value FROM verdicts WHERE key IN ({marks})", some))
        return found

    def keep(self, verdicts: Mapping[str, float]) -> None:
        """Add verdicts; the first one for a key stays."""
        with self._lock, self._table:
            self._table.executemany("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", verdicts.items())

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._lock:
            self._table.close()


def _open_table(path: Path) -> sqlite3.Connection:
    # Opened here and used by the thread that asks; the cache's lock keeps them apart.
    table = sqlite3.connect(path, timeout=_LOCK_WAIT_S, check_same_thread=False)
    try:
        with table:
            table.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, value REAL NOT NULL)")
            table.execute("SELECT value FROM verdicts LIMIT 1").fetchone()
    except sqlite3.Error:
        table.close()
        raise
    return table
