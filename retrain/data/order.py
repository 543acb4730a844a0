"""The order in which examples are drawn: a function of the seed and the number drawn before."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from decimal import Decimal
from functools import cached_property
from itertools import zip_longest
from numbers import Real
from typing import TYPE_CHECKING, overload

from retrain.errors import CheckpointError, ConfigError, PluginError, blaming
from retrain.runtime.text import plural
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

LARGEST_SHUFFLED = 1_000_000
"""A bounded endless source with more examples than this is not shuffled: it has no order to begin with."""


class Endless(Sequence[Example]):
    """Endless examples: number i is drawn by a generator seeded with the seed and i."""

    def __init__(self, draw: Callable[[random.Random], Example], seed: int = 0, origin: str = "") -> None:
        self._draw = draw
        self._seed = seed
        self._origin = origin

    def reseed(self, seed: int) -> Endless:
        """Return the same source with another seed."""
        return Endless(self._draw, seed, self._origin)

    def named(self, origin: str) -> Endless:
        """Return the same source with its name for error messages."""
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
        # Text seeds are hashed with SHA-512: consecutive numbers give independent draws, the same on every machine.
        rng = random.Random(f"{self._seed}:{index}")
        with blaming(f"data source {self._origin!r}", f"at example {index}"):
            example: object = self._draw(rng)
        return check_example(f"data source {self._origin!r}", index, example)


def check_example(who: str, index: int, example: object) -> Example:
    """An example of a custom source, with a number as its reference written as text; raises for anything else."""
    if not isinstance(example, Example):
        raise PluginError(
            f"{who} returned a {type(example).__name__} as example {index}; expected a retrain.types.Example."
        )
    reference: object = example.reference
    if isinstance(reference, str):
        return example
    # Numbers of numpy, as pandas has them, are no int.
    if isinstance(reference, Real) and not isinstance(reference, bool) and math.isfinite(reference):
        return replace(example, reference=write_number(reference))
    raise PluginError(
        f"{who} returned {type(reference).__name__} {reference!r:.40} as the reference of example {index}; "
        "expected text or a number."
    )


def write_number(value: Real | float) -> str:
    """A number as an answer: 27.0 in a numeric column is the answer 27."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class Lazy(Sequence[Example]):
    """Examples that are generated on access, each from its index."""

    def __init__(self, make: Callable[[int], Example], places: Sequence[int]) -> None:
        self._make = make
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Lazy: ...
    def __getitem__(self, index: int | slice) -> Example | Lazy:
        if isinstance(index, slice):
            return Lazy(self._make, self._places[index])
        return self._make(self._places[index])


class ExampleOrder:
    """Draws examples: a new permutation each epoch, or, from an endless source, one after the other.

    `max_examples` keeps only the first n before any shuffling; 0 keeps all. A bounded endless source has
    epochs too, but beyond `LARGEST_SHUFFLED` examples every epoch has the same order.
    """

    def __init__(self, examples: Sequence[Example], seed: int, max_examples: int = 0) -> None:
        self._is_drawn = isinstance(examples, Endless)
        if isinstance(examples, Endless):
            examples = examples.reseed(seed)
        if max_examples and max_examples < len(examples):
            drawn = Lazy(examples.__getitem__, range(max_examples))
            examples = drawn if self._is_drawn else examples[:max_examples]
        if not len(examples):
            raise ValueError("there are no examples to draw from")
        self._examples = examples
        self._seed = seed
        self._epoch = -1
        self._permutation: list[int] = []
        self.position = 0
        """Number of examples drawn so far; with the seed it determines all that follow."""

    def take(self, count: int) -> list[Example]:
        """Return the next `count` examples, continuing with the next epoch at the end of one."""
        taken = [self._at(position) for position in range(self.position, self.position + count)]
        self.position += count
        return taken

    def _at(self, position: int) -> Example:
        if isinstance(self._examples, Endless):
            return self._examples[position]
        epoch, index = divmod(position, len(self._examples))
        if self._is_drawn and len(self._examples) > LARGEST_SHUFFLED:
            return self._examples[index]
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(len(self._examples)))
            random.Random(f"{self._seed}:epoch {epoch}").shuffle(self._permutation)
        return self._examples[self._permutation[index]]

    @cached_property
    def digest(self) -> str:
        """A digest of all prompts and references, in order; empty for examples that are made on access."""
        return "" if isinstance(self._examples, Endless | Lazy) else digest_of(self._examples)

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"position": self.position, "examples": len(self._examples)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at `state`; raises if the data has another size."""
        self.check_state_dict(state)
        self.position = state["position"]

    def check_state_dict(self, state: Mapping[str, int]) -> None:
        """Raise if the data has another size than at `state`."""
        if state["examples"] != len(self._examples):
            raise CheckpointError(
                f"the checkpoint was made with {state['examples']} examples, the data now has {len(self._examples)}, "
                "so their order is another one.  Try: the data and [training] max_examples as before, or a new run"
            )


def count_steps(training: schema.Training, examples: Sequence[Example]) -> int:
    """Steps of a run: `max_steps`, or those of its epochs over these examples, at the configured batch size."""
    if not training.epochs:
        return training.max_steps
    return math.ceil(count_examples(training, examples) / training.batch_size)


def endless_epochs(training: schema.Training) -> tuple[str, str]:
    """What is wrong with epochs over examples without end, and the remedy."""
    problem = f"= {training.epochs} counts passes, and these examples have no end."
    return problem, "Try: max_examples = 1000, or epochs = 0.0 with max_steps"


def count_examples(training: schema.Training, examples: Sequence[Example]) -> int:
    """Examples that a run's epochs draw from these."""
    if isinstance(examples, Endless) and not training.max_examples:
        raise ConfigError(f"[training] epochs {'  '.join(endless_epochs(training))}")
    count = min(len(examples), training.max_examples or len(examples))
    # As decimals: 1.1 epochs of 100 examples are 110, and the product of floats is above that.
    return max(1, math.ceil(Decimal(str(training.epochs)) * count))


def sample_held_out(examples: Sequence[Example], count: int, log: Callable[[str], None]) -> Sequence[Example]:
    """The problems of every evaluation, the same ones for every seed.

    They are drawn at random, since files are often sorted by subject or difficulty. An endless source is random itself.
    """
    if isinstance(examples, Endless):
        return examples.reseed(0)[:count]
    if len(examples) <= count:
        return examples
    log(f"Evaluating {count:,} of {len(examples):,} held-out problems ([eval] max_examples), the same in every run")
    places = sorted(random.Random("held out").sample(range(len(examples)), count))
    return Lazy(examples.__getitem__, places) if isinstance(examples, Lazy) else [examples[place] for place in places]


def digest_of(examples: Iterable[Example]) -> str:
    """A digest of prompts and references, in order, and, after a ~, of their other fields, if there are any."""
    asked, others = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    has_others = False
    for example in examples:
        asked.update(json.dumps([example.prompt, example.reference], default=str).encode())
        fields = [(str(name), value) for name, value in example.meta.items()]
        others.update(json.dumps(fields, default=_write_value, skipkeys=True).encode())
        has_others = has_others or bool(fields)
    return f"{asked.hexdigest()}~{others.hexdigest()}" if has_others else asked.hexdigest()


def _write_value(value: object) -> str:
    """A value that JSON has not. Other objects may be written differently in every process."""
    return str(value) if isinstance(value, Real | Decimal | date | bytes) else type(value).__name__


def is_same_digest(one: str, other: str) -> bool:
    """Whether two digests, or two series of them joined by +, are the same; older ones are without other fields."""
    pairs = list(zip_longest(one.split("+"), other.split("+"), fillvalue=""))
    return all(a == b or (("~" in a) != ("~" in b) and a.split("~")[0] == b.split("~")[0]) for a, b in pairs)


def count_shared(examples: Sequence[Example], held_out: Sequence[Example]) -> int:
    """The held-out problems that are trained on as well. Endless sources keep theirs apart."""
    if isinstance(examples, Endless):
        return 0
    trained = {_key(example) for example in examples}
    return sum(_key(example) in trained for example in held_out)


def describe_shared(examples: Sequence[Example], held_out: Sequence[Example]) -> str:
    """A sentence about held-out problems that are trained on as well, or ""."""
    shared = count_shared(examples, held_out)
    of_all = f"{shared} of {plural(len(held_out), 'held-out problem')}"
    what = "are also in the training data, so held-out results may overstate what was learned."
    return f"{of_all} {what}" if shared else ""


def _key(example: Example) -> str:
    """What is asked: text is one message of a user."""
    messages = example.prompt
    if not isinstance(messages, str) and [message["role"] for message in messages] == ["user"]:
        messages = str(messages[0]["content"])
    return messages.strip() if isinstance(messages, str) else repr(messages)
