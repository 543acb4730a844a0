"""Digests of models' files, by which a resume notices other weights, another tokenizer or another chat template."""

from __future__ import annotations

import hashlib
from pathlib import Path

from retrain.config import TrainConfig
from retrain.modeling.files import find_model, weight_files

# What transformers reads of a tokenizer, and the settings that decide how a model computes and where it stops.
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
# Reading all of a large model takes as long as loading it, and training changes weights everywhere: of a file above
# this size, pieces are read.
_WHOLE, _PIECES, _PIECE = 64 << 20, 64, 64 << 10


def digest_models(config: TrainConfig) -> dict[str, dict[str, str]]:
    """Digests of the files of the model, and of the student if there is one, by name; without those not found here."""
    names = dict.fromkeys(filter(None, (config.model.model, config.teaching.student_model)))
    folders = {name: find_model(name).folder for name in names}
    return {name: _digest(folder) for name, folder in folders.items() if folder is not None}


def _digest(folder: Path) -> dict[str, str]:
    names = (*_FILES, *weight_files(folder))
    return {name: _digest_file(folder / name) for name in names if (folder / name).is_file()}


def _digest_file(path: Path) -> str:
    size = path.stat().st_size
    found = hashlib.blake2b(f"{size}".encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE:
            found.update(file.read())
            return found.hexdigest()
        for piece in range(_PIECES):
            file.seek(piece * (size - _PIECE) // (_PIECES - 1))
            found.update(file.read(_PIECE))
    return found.hexdigest()
