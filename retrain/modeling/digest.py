"""Digests of models' files, by which a resume notices other weights, another tokenizer or another chat template."""

from __future__ import annotations

import hashlib
from pathlib import Path

from retrain.config import TrainConfig
from retrain.modeling.files import find_model

_FILES = (
    "config.json",
    "tokenizer*",
    "*token*.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.safetensors",
    "*.bin",
)
# Reading all of a large model takes as long as loading it, and training changes weights everywhere: of a file above
# this size, pieces are read.
_WHOLE, _PIECES, _PIECE = 64 << 20, 64, 64 << 10


def digest_models(config: TrainConfig) -> dict[str, str]:
    """A digest of the files of the model, and of the student if there is one, by name; without those not found here."""
    names = dict.fromkeys(filter(None, (config.model.model, config.teaching.student_model)))
    folders = {name: find_model(name).folder for name in names}
    return {name: _digest(folder) for name, folder in folders.items() if folder is not None}


def _digest(folder: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _WHOLE:
                found.update(file.read())
                continue
            for piece in range(_PIECES):
                file.seek(piece * (size - _PIECE) // (_PIECES - 1))
                found.update(file.read(_PIECE))
    return found.hexdigest()
