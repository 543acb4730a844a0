"""Permissions of folders and weights."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """The path itself, or the folder in which it would be made."""
    path = path.expanduser().absolute()
    return path if path.exists() else nearest_existing(path.parent)


def is_writable_folder(path: Path) -> bool:
    """Whether a path is a folder that may be written to."""
    return path.is_dir() and os.access(path, os.W_OK)


def share_weights(folder: Path, like: str = "*config.json") -> None:
    """Give weights the permissions of a file beside them: safetensors lets only their owner read them."""
    mode = next(folder.glob(like)).stat().st_mode & 0o777
    for path in folder.glob("*.safetensors"):
        # A file of somebody else that was overwritten keeps its owner, who alone may change its permissions.
        with contextlib.suppress(PermissionError):
            if not path.is_symlink():
                path.chmod(mode)
