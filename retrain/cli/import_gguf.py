"""`retrain import-gguf MODEL.gguf FOLDER`: a GGUF file as a Hugging Face folder that can be trained."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrain.cli.console import announce_if_slow
from retrain.errors import ConfigError
from retrain.runtime.packages import missing
from retrain.runtime.permissions import is_writable_folder, nearest_existing, share_weights
from retrain.storage.checkpoint import explain_write_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAGIC = b"GGUF"


@click.command("import-gguf", context_settings={"max_content_width": 110})
@click.argument("file", type=click.Path(path_type=Path), metavar="MODEL.gguf")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Precision of the written weights.",
)
def command(file: Path, folder: Path, dtype: str) -> int:
    """Convert a GGUF file to a model folder in Hugging Face format, FOLDER, for [model] model.

    Quantized weights are dequantized; precision lost to quantization is not restored. The architectures and
    quantization types are those that transformers can read.
    """
    check_paths(file, folder)
    with announce_if_slow(f"Converting {file} ({file.stat().st_size / 1e6:,.0f} MB) ..."):
        model, tokenizer = read_gguf(file, dtype)
        try:
            write_folder(model, tokenizer, folder)
        except OSError as error:
            raise explain_write_error(error, folder, is_of_run=False) from error
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    click.echo(f"Wrote {folder}: {type(model).__name__}, {millions:,.1f} million parameters in {dtype}.")
    if not tokenizer.chat_template:
        click.echo("Note: the file has no chat template, so prompts are sent as they are.")
    return 0


def check_paths(file: Path, folder: Path) -> None:
    """Raise unless `file` is a GGUF file, `folder` is free, and the package that reads GGUF is installed."""
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    if magic != _MAGIC:
        raise ConfigError(f"{file} is not a GGUF file: it begins with {magic!r} instead of {_MAGIC!r}.")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and was not changed.  Try: another folder")
    existing = nearest_existing(folder)
    if not is_writable_folder(existing):
        raise ConfigError(f"{existing} cannot be written to.  Try: another folder")
    if find_spec("gguf") is None:
        raise missing("gguf", "reading GGUF files")


def read_gguf(file: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, with plain weights, and its tokenizer."""
    import torch  # noqa: PLC0415  (slow to import; a wrong path must not wait for it)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    where = {"gguf_file": file.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    except Exception as error:
        # transformers raises many types for what it cannot read: ValueError, NotImplementedError, KeyError, ...
        raise ConfigError(
            f"transformers cannot read {file}: {error}.  Try: compare its size with the original's, in case it was not "
            "downloaded completely"
        ) from error
    # The weights were expanded on loading, but transformers refuses to save what it calls quantized.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    return model.to(torch.float32 if dtype == "float32" else torch.bfloat16), tokenizer


def write_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save both, with a configuration that servers read: they look for the names of earlier transformers versions."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["architectures"] = [type(model).__name__]
    if "rope_theta" in (settings.get("rope_parameters") or {}):
        settings["rope_theta"] = settings["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    share_weights(folder)
