"""Facts about a model from its files: location, parameters, shapes, context length. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from retrain.builtin import PREFIX, resolve_model
from retrain.capacity.memory import Shape, has_experts, read_shape
from retrain.types import JsonObject

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Of several, transformers reads the first that is there, or has an index."""
# Headers of the largest models have a few hundred kilobytes; a longer one means a broken file.
_MAX_HEADER = 100_000_000
_SIZE_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![a-zA-Z])", re.IGNORECASE)

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
"""Names of the context length in config.json; most families use the first."""
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Names of the list of layers in config.json, for models that have several kinds."""
ADAPTER_SETTINGS = "adapter_config.json"
MERGE_HINT = (
    "Try: merge it into its base with PEFT (merge_and_unload), save the result and the tokenizer of the base in one "
    "folder and name that folder"
)
NO_WEIGHTS = "has no weights (no model.safetensors, no index, no pytorch_model.bin)"
NO_TOKENIZER = "has no tokenizer (no tokenizer.json, tokenizer.model, vocab.json, vocab.txt or the like)."
# Some tokenizers, such as those of bytes, have only a tokenizer_config.json.
_TOKENIZER_FILES = ("token*", "*vocab*", "merges.txt", "*.model", "*.tiktoken", "*.spm", "*.bpe", "tekken.json")

# Matrices at both ends of a model, beside those named "embed": not adapted.
_EMBEDDINGS = ("lm_head", "wte", "wpe")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelFiles:
    """Location of a model's files. `download`: not on this machine, possibly a Hugging Face id."""

    name: str
    found: Literal["builtin", "folder", "cache", "download", "missing", "file"]
    folder: Path | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Facts from the files; None where unknown."""

    parameters: int | None
    parameters_from: str
    shapes: Shapes
    shape: Shape | None
    """Shape of a dense decoder with attention in every layer, from its config.json."""
    lists_linear_layers: bool = True
    """Whether matrices in its files are linear layers: those of experts, or for images, may be something else."""


def find_model(name: str) -> ModelFiles:
    """Look for a built-in model, a folder, then the Hugging Face cache, without network access."""
    if name.startswith(PREFIX):
        folder = Path(resolve_model(name))
        return ModelFiles(name, "builtin", folder) if folder.is_dir() else ModelFiles(name, "missing")
    local = Path(name).expanduser()
    if local.is_dir():
        return ModelFiles(name, "folder", local)
    if local.is_file():
        return ModelFiles(name, "file")
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        return ModelFiles(name, "missing")
    cached = hub_cache() / f"models--{name.replace('/', '--')}"
    main = cached / "refs" / "main"
    current = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    # With weights: an incomplete download has none. Of several, the one that transformers loads, or the newest.
    complete = [path for path in cached.glob("snapshots/*") if any((*path.glob("*.safetensors"), *path.glob("*.bin")))]
    if complete:
        best = max(complete, key=lambda path: (path.name == current, path.stat().st_mtime))
        return ModelFiles(name, "cache", best)
    return ModelFiles(name, "download")


def hub_cache() -> Path:
    """The cache folder of huggingface_hub."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    return hub_home() / "hub"


def hub_home() -> Path:
    """The folder with the caches of the Hugging Face libraries."""
    default_home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(os.environ.get("HF_HOME", str(default_home))).expanduser()


def read_facts(files: ModelFiles) -> ModelFacts:
    """Read weight shapes and sizes; falls back on a size in the name, marked as a guess."""
    shapes: Shapes = {}
    if files.folder is not None:
        for path in sorted(files.folder.glob("*.safetensors")):
            shapes |= _read_shapes(path)
    settings = _read_json(_find_settings(files))
    shape = None if _is_hybrid(_read_text_settings(files)) else read_shape(settings)
    if shapes:
        plain = "text_config" not in settings and not is_mixture(files)
        return ModelFacts(sum(map(math.prod, shapes.values())), "its files", shapes, shape, plain)
    if shape is not None:
        return ModelFacts(shape.parameters, "its config.json", {}, shape)
    size = _SIZE_IN_NAME.search(files.name.rpartition("/")[2])
    if size:
        scale = 1e9 if size[2].upper() == "B" else 1e6
        return ModelFacts(round(float(size[1]) * scale), "its name, a guess", {}, None)
    return ModelFacts(None, "unknown: the files are not on this machine", {}, None)


def read_context_length(files: ModelFiles) -> int | None:
    """Context length in config.json; None if it has none."""
    settings = _read_text_settings(files)
    return next((found for key in CONTEXT_KEYS if isinstance(found := settings.get(key), int)), None)


def why_shape_is_unknown(files: ModelFiles) -> str:
    """Why `read_facts` finds no shape, and what would help."""
    path, settings = _find_settings(files), _read_text_settings(files)
    if files.found == "missing":
        return f"there is no folder {files.name}"
    if files.found == "file":
        return f"{files.name} is a file, not a folder"
    if not path.is_file():
        if files.folder is not None:
            return f"{files.name} has no config.json"
        return f"the model's config.json is not on this machine.  Try: hf download {files.name} config.json"
    if has_experts(settings) or _is_hybrid(settings):
        return "only dense decoders with attention in every layer are planned, not mixtures of experts or hybrids"
    return f"{path} does not state the sizes of a decoder that retrain knows, or is damaged"


def _is_hybrid(settings: JsonObject) -> bool:
    """Whether some layers have no attention, or something beside it."""
    kinds = [kind for key in _LAYER_KINDS for kind in settings.get(key) or ()]
    plain = all(str(kind).endswith("attention") and kind != "linear_attention" for kind in kinds)
    return not plain or any(key.startswith("mamba") for key in settings)


def is_mixture(files: ModelFiles) -> bool:
    """Whether config.json is that of a mixture of experts."""
    return has_experts(_read_text_settings(files))


def read_vocabulary_size(files: ModelFiles) -> int | None:
    """Number of token embeddings in config.json, which may exceed the tokenizer's tokens; None if it has none."""
    found = _read_text_settings(files).get("vocab_size")
    return found if isinstance(found, int) else None


def find_base(files: ModelFiles) -> str:
    """The base model of the adapter that the folder holds; "" if it holds a model."""
    if files.folder is None or not (files.folder / ADAPTER_SETTINGS).is_file():
        return ""
    return str(_read_json(files.folder / ADAPTER_SETTINGS).get("base_model_name_or_path") or "another model")


def find_lacking_files(files: ModelFiles) -> list[str]:
    """Files of weights that the folder's index names and that are not there."""
    if files.folder is None:
        return []
    return [name for name in weight_files(files.folder) if not (files.folder / name).is_file()]


def lacks_weights(files: ModelFiles) -> bool:
    """Whether the folder of a model has neither weights nor an index of them. What the cache lacks is downloaded."""
    if files.folder is None or files.found != "folder":
        return False
    return not any((files.folder / f"{name}{end}").is_file() for name in _WEIGHTS for end in ("", ".index.json"))


def lacks_tokenizer(files: ModelFiles) -> bool:
    """Whether the folder of a model has no tokenizer. transformers would make one without a vocabulary."""
    if files.folder is None or files.found != "folder" or not (files.folder / "config.json").is_file():
        return False
    return not any(path for pattern in _TOKENIZER_FILES for path in files.folder.glob(pattern))


def suggest_tokenizer(files: ModelFiles) -> str:
    """How to add the tokenizer that is missing."""
    if files.found != "folder":
        return "Try: a model with a tokenizer, or a folder in which both are saved"
    save = f"AutoTokenizer.from_pretrained(BASE).save_pretrained({files.name!r})"
    return f"Try: save the tokenizer of the base model there: {save}"


def find_damaged_files(files: ModelFiles) -> list[str]:
    """What is wrong with each of the model's safetensors files whose size its header contradicts."""
    if files.folder is None:
        return []
    paths = [files.folder / name for name in weight_files(files.folder) if name.endswith(".safetensors")]
    found = {path.name: _explain_damage(path) for path in paths if path.is_file()}
    return [f"{name} {problem}" for name, problem in found.items() if problem]


def suggest_restoring(files: ModelFiles) -> str:
    """How to replace damaged files; the Hub's libraries do not download again what is in the cache."""
    again = f"hf download {files.name} --force-download"
    return f"Try: {again}" if files.found == "cache" else "Try: copy or download it again"


def weight_files(folder: Path) -> list[str]:
    """The files of weights that transformers reads, whether or not they are there."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            table = _read_json(index).get("weight_map")
            return sorted({str(file) for file in table.values()}) if isinstance(table, dict) else []
    return []


def is_quantized(files: ModelFiles) -> bool:
    """Whether bitsandbytes has quantized the weights on disk."""
    settings = _read_json(_find_settings(files)).get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == "bitsandbytes"


def count_trainable(facts: ModelFacts, rank: int, target_modules: str) -> int | None:
    """Trainable parameters: rank × (in + out) per adapted layer, or all for rank 0."""
    if rank == 0:
        return facts.parameters
    if not facts.shapes:
        return facts.shape.adapter_parameters(rank, target_modules) if facts.shape is not None else None
    names = [name.strip() for name in target_modules.split(",")]
    if names == ["all-linear"] and not facts.lists_linear_layers:
        return None
    adapted = 0
    for key, shape in facts.shapes.items():
        layer = key.removesuffix(".weight").rpartition(".")[2]
        is_linear = layer not in _EMBEDDINGS and "embed" not in layer
        chosen = is_linear if names == ["all-linear"] else layer in names
        if chosen and len(shape) == 2:
            adapted += rank * sum(shape)
    return adapted


def _read_shapes(path: Path) -> Shapes:
    try:
        return {name: tuple(entry["shape"]) for name, entry in _read_header(path)[0].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _explain_damage(path: Path) -> str:
    """Why safetensors would refuse a file, or ""; of the weights, nothing is read."""
    try:
        size = path.stat().st_size
        entries, end = _read_header(path)
        expected = end + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, IndexError):
        return "has no valid header: it is truncated, or not a safetensors file"
    if size == expected:
        return ""
    problem = "truncated" if size < expected else "damaged"
    return f"is {problem}: its header says {expected:,} bytes, it has {size:,}"


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors in a safetensors header, eight bytes of length and JSON, and where it ends."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER:
            raise ValueError("the header is too long")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


def _read_json(path: Path) -> JsonObject:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _read_text_settings(files: ModelFiles) -> JsonObject:
    """Settings of the language model, which models that also read images have in a table of their own."""
    settings = _read_json(_find_settings(files))
    text = settings.get("text_config")
    return text if isinstance(text, dict) else settings


def _find_settings(files: ModelFiles) -> Path:
    """Its config.json; for a model without weights here, one that was downloaded earlier, if any."""
    if files.folder is not None:
        return files.folder / "config.json"
    snapshots = hub_cache() / f"models--{files.name.replace('/', '--')}" / "snapshots"
    return max(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=Path("config.json.none"))
