"""Data: where problems come from, and in which order they are taken.

Built in are `math`, `gsm8k`, `arithmetic`, `jsonl` and `hub`; a dotted path names a class of yours. Every source is
made with the `[data]` table and has one method, `load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from retrain.data.order import Endless, ExampleOrder
from retrain.errors import PluginError
from retrain.plugins import REGISTRIES
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

__all__ = ["DataSource", "Endless", "ExampleOrder", "build_source", "load_examples"]


@runtime_checkable
class DataSource(Protocol):
    """A set of problems. Another split of the same problems is another source."""

    def load(self) -> Sequence[Example]:
        """Return the examples, always in the same order."""
        ...


def build_source(section: schema.Data, search_paths: Sequence[str] = ()) -> DataSource:
    """Make the source that `[data] source` names; nothing is read yet."""
    part = REGISTRIES["data"].load(section.source, search_paths)
    if not callable(part):
        raise PluginError(
            f"data source {section.source!r} is {part!r}; it must be a class that takes the [data] table."
        )
    source = part(section)
    if not isinstance(source, DataSource):
        raise PluginError(f"data source {section.source!r} made {source!r}, which has no load method.")
    return source


def load_examples(section: schema.Data, search_paths: Sequence[str] = ()) -> Sequence[Example]:
    """Build the source and load it; a source without examples, or with something else in it, is an error."""
    examples = build_source(section, search_paths).load()
    if not len(examples):
        raise PluginError(f"data source {section.source!r} has no examples (split {section.split!r}).")
    if not isinstance(examples[0], Example):
        raise PluginError(
            f"data source {section.source!r} gave {type(examples[0]).__name__} where a retrain.types.Example is needed."
        )
    return examples
