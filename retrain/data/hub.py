"""The `hub` source: a dataset from the Hugging Face Hub or its local cache."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from retrain.data.rows import Row, collect_examples
from retrain.errors import ConfigError, ConfigIssue
from retrain.modeling.files import hub_cache, hub_home
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

OFFLINE_HINT = (
    'Try: without the Hub, write the rows to a file, one JSON object per line, and set [data] source = "jsonl" and '
    'path = "rows.jsonl".'
)


@runtime_checkable
class FromHub(Protocol):
    """A source that reads a dataset of the Hub."""

    dataset: str
    """Its id; or a folder, or a format that `datasets` knows."""


class HubSource:
    """The rows of `[data] id`, `subset` and `split`, with the fields named in `[data]`."""

    def __init__(self, section: schema.Data) -> None:
        self.dataset = section.id
        self._section = section

    def load(self) -> list[Example]:
        """Download the dataset, or read it from the cache."""
        section = self._section
        if not section.id:
            raise ConfigError(
                'source = "hub" needs a dataset.', (ConfigIssue("[data] id", "is empty.", 'Try: id = "openai/gsm8k"'),)
            )
        rows = load_rows(section.id, section.subset, section.split)
        return collect_examples(((f"row {index}", row) for index, row in enumerate(rows)), section, section.id)


def is_on_hub_only(dataset: str) -> bool:
    """Whether nothing of a dataset is on this machine. Imports no library; they decide if what is there suffices."""
    namespace, slash, name = dataset.rpartition("/")
    if "/" in namespace or Path(dataset).expanduser().exists() or (not slash and name in _formats()):
        return False
    cache = Path(os.environ.get("HF_DATASETS_CACHE", str(hub_home() / "datasets"))).expanduser()
    # `datasets` writes CamelCase names in snake_case.
    known = {_fold(path.name) for path in cache.glob(f"{namespace}___*" if slash else "*")}
    in_hub_cache = (hub_cache() / f"datasets--{dataset.replace('/', '--')}").exists()
    return _fold(dataset.replace("/", "___")) not in known and not in_hub_cache


def _formats() -> set[str]:
    """Formats that `datasets` reads, such as json and csv: it has a folder for each."""
    spec = importlib.util.find_spec("datasets")
    packages = list(spec.submodule_search_locations or ()) if spec is not None else []
    return {path.name for package in packages for path in Path(package, "packaged_modules").glob("*")}


def _fold(name: str) -> str:
    return name.replace("_", "").lower()


def load_rows(id: str, subset: str, split: str) -> list[Row]:
    """Return the rows of one split; the error explains how to work without the Hub."""
    import datasets  # noqa: PLC0415  (takes about a second, and only these sources need it)

    name = f"{id} ({subset})" if subset else id
    try:
        dataset = datasets.load_dataset(id, subset or None, split=split)
    # Missing, private, offline, invalid subset or split, full disk: each raises a different exception.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"the dataset {name}, split {split!r}, could not be loaded: {reason}  {OFFLINE_HINT}"
        ) from error
    return list(dataset)
