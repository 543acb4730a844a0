"""Data sources, and the order in which examples are drawn.

The built-in sources are listed in `retrain.plugins`, with the options of `[data]` that each reads; a dotted path names
your own class. A source is instantiated with the `[data]` table and has one method, `load`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from retrain.data.order import (
    Endless,
    ExampleOrder,
    Lazy,
    check_example,
    count_examples,
    count_shared,
    count_steps,
    describe_shared,
    digest_of,
    is_same_digest,
    sample_held_out,
)
from retrain.errors import PluginError, blaming
from retrain.plugins import REGISTRIES, is_plugin
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import TrainConfig, schema

__all__ = [
    "DataSource",
    "Endless",
    "ExampleOrder",
    "Lazy",
    "build_source",
    "count_examples",
    "count_shared",
    "count_steps",
    "describe_shared",
    "digest_of",
    "held_out_section",
    "is_same_digest",
    "load_examples",
    "load_held_out",
    "reads_file",
    "sample_held_out",
]


@runtime_checkable
class DataSource(Protocol):
    """A set of problems. Each split is a separate source."""

    def load(self) -> Sequence[Example]:
        """Return the examples, always in the same order."""


def build_source(section: schema.Data, search_paths: Sequence[str] = ()) -> DataSource:
    """Instantiate the source that `[data] source` names, without reading data."""
    part = REGISTRIES["data"].load(section.source, search_paths)
    if not callable(part):
        raise PluginError(
            f"data source {section.source!r} is {part!r}; it must be a class that takes the [data] table."
        )
    with blaming(f"data source {section.source!r}", "when it was created"):
        source = part(section)
    if not isinstance(source, DataSource):
        raise PluginError(f"data source {section.source!r} returned {source!r}, which has no load method.")
    return source


def load_examples(section: schema.Data, search_paths: Sequence[str] = ()) -> Sequence[Example]:
    """Build the source and load it; raises if it is empty or contains anything other than examples."""
    who = f"data source {section.source!r}"
    source = build_source(section, search_paths)
    with blaming(who, "in load"):
        examples: object = source.load()
        if isinstance(examples, Endless):
            return examples.named(section.source)
        if not isinstance(examples, Sequence):
            raise PluginError(
                f"{who} returned a {type(examples).__name__} from load; expected a list of retrain.types.Example.  "
                "Try: return list(...)"
            )
        # A custom sequence may read its rows lazily.
        examples = _checked(who, examples)
    if not len(examples):
        raise PluginError(f"{who} has no examples (split {section.split!r}).")
    return [replace(example, meta={}) for example in examples] if section.remove_unused_columns else examples


def reads_file(source: str) -> bool:
    """Whether a built-in source reads its examples from the file that `path` names."""
    return not is_plugin("data", source) and REGISTRIES["data"].reads(source, "path")


def held_out_section(config: TrainConfig) -> schema.Data:
    """The `[data]` table of evaluations."""
    changes = {"split": config.eval.split}
    if config.eval.source or config.eval.path:
        changes |= {"source": config.eval.source or config.data.source, "path": config.eval.path}
    return config.data.model_copy(update=changes)


def load_held_out(config: TrainConfig, log: Callable[[str], None] = lambda line: None) -> Sequence[Example]:
    """Examples for evaluation; none if it is off."""
    if not config.eval.every:
        return []
    held_out = load_examples(held_out_section(config), config.plugins.search_paths)
    return sample_held_out(held_out, config.eval.max_examples, log)


def _checked(who: str, examples: Sequence[Example]) -> Sequence[Example]:
    """The same sequence, unless references have to be written as text."""
    converted = [check_example(who, index, example) is not example for index, example in enumerate(examples)]
    return [check_example(who, *numbered) for numbered in enumerate(examples)] if any(converted) else examples
