"""The order in which examples are taken, fixed by a seed and one integer: how many were taken before."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import overload

from retrain.errors import CheckpointError, PluginError, RetrainError
from retrain.types import Example

LARGEST_SHUFFLED = 1_000_000
"""A bounded endless source with more examples than this is not shuffled: its draws are in no order to begin with."""


class Endless(Sequence[Example]):
    """Examples without end: number i is drawn by a generator that knows the seed and i, and nothing else."""

    def __init__(self, draw: Callable[[random.Random], Example], seed: int = 0, origin: str = "") -> None:
        self._draw = draw
        self._seed = seed
        self._origin = origin

    def reseed(self, seed: int) -> Endless:
        """Return the same kind of examples under another seed."""
        return Endless(self._draw, seed, self._origin)

    def named(self, origin: str) -> Endless:
        """Return the same examples, with the data source to name when one cannot be drawn."""
        return Endless(self._draw, self._seed, origin)

    def __len__(self) -> int:
        return sys.maxsize

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index < 0:
            raise IndexError("there is no last example in an endless source")
        # Text seeds go through SHA-512: neighbouring numbers give unrelated draws, the same ones on every machine.
        rng = random.Random(f"{self._seed}:{index}")
        try:
            example: object = self._draw(rng)
        except RetrainError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(f"data source {self._origin!r} raised {error!r} at example {index}.") from error
        if not isinstance(example, Example):
            raise PluginError(
                f"data source {self._origin!r} gave {type(example).__name__} at example {index}, "
                "where a retrain.types.Example is needed."
            )
        return example


class First(Sequence[Example]):
    """The first `count` examples of an endless source, each drawn when it is asked for: any count costs nothing."""

    def __init__(self, source: Endless, count: int) -> None:
        self._source = source
        self._places = range(count)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self._source[place] for place in self._places[index]]
        return self._source[self._places[index]]


class ExampleOrder:
    """Hands out examples: a fresh permutation each epoch, or, from an endless source, one after the other.

    `max_examples` keeps only the first n before any shuffling; 0 keeps all. An endless source so bounded has epochs
    like any other, but beyond `LARGEST_SHUFFLED` examples each epoch takes them in the same order.
    """

    def __init__(self, examples: Sequence[Example], seed: int, max_examples: int = 0) -> None:
        if isinstance(examples, Endless):
            examples = examples.reseed(seed)
        if max_examples and max_examples < len(examples):
            examples = First(examples, max_examples) if isinstance(examples, Endless) else examples[:max_examples]
        if not len(examples):
            raise ValueError("there are no examples to put into an order")
        self._examples = examples
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []
        self.position = 0
        """How many examples were taken since the beginning; with the seed it determines all that follow."""

    def take(self, count: int) -> list[Example]:
        """Return the next `count` examples, running on into the next epoch where this one ends."""
        taken = [self._at(position) for position in range(self.position, self.position + count)]
        self.position += count
        return taken

    def _at(self, position: int) -> Example:
        if isinstance(self._examples, Endless):
            return self._examples[position]
        epoch, place = divmod(position, len(self._examples))
        if isinstance(self._examples, First) and len(self._examples) > LARGEST_SHUFFLED:
            return self._examples[place]
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(len(self._examples)))
            random.Random(f"{self._seed}:epoch {epoch}").shuffle(self._permutation)
        return self._examples[self._permutation[place]]

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return {"position": self.position, "examples": len(self._examples)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from where `state` was taken; refused when the data has another size, because nothing would line up."""
        if state["examples"] != len(self._examples):
            raise CheckpointError(
                f"the checkpoint was made with {state['examples']} examples, the data now has {len(self._examples)}. "
                "Try: the same [data] table and [training] max_examples as before."
            )
        self.position = state["position"]
