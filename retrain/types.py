"""The nouns of the loop.

Ragged lists carry a suffix that says what they run over: `_P` prompts of a step, `_G` completions of one group,
`_T` tokens of one completion. Per-token values are numpy arrays, never lists of floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.floating[Any]]
    IntArray = NDArray[np.integer[Any]]
    BoolArray = NDArray[np.bool_]
else:
    # Processes that score start often and compute nothing with arrays; loading numpy is half of their start.
    FloatArray = IntArray = BoolArray = Any

Metric = float | int | str | bool | None
StepMetrics = dict[str, Metric]

Outcome = Literal["right", "wrong", "error", "timeout", "none"]
"""`none` is a reward that did not apply."""


@dataclass(frozen=True)
class Example:
    """One problem: what the model is asked and what a right answer is compared with."""

    prompt: str | tuple[Mapping[str, str], ...]
    """Plain text (it becomes one user message), or chat messages with `role` and `content`."""
    reference: str
    id: str = ""
    meta: Mapping[str, object] = field(default_factory=dict)
    """Whatever else the source knows, e.g. the subject; handed to custom rewards."""


@dataclass(frozen=True)
class Sampling:
    """How one batch is drawn: `n` for each prompt. `seed` makes it repeatable; temperature 0 is greedy."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    first: int = 0
    """Number of the first completion among those that share the seed, where these are only some of them."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken, whatever the seed and the other options say."""
        return self.temperature == 0


@dataclass(frozen=True)
class Segment:
    """A stretch of a completion's tokens that followed a prompt of its own."""

    prompt_ids: IntArray
    start: int
    stop: int


@dataclass(frozen=True)
class Completion:
    """One sampled answer, token by token.

    `logprobs_T` are of the distribution that was sampled from: after temperature, renormalised over the kept support.
    """

    token_ids_T: IntArray
    logprobs_T: FloatArray
    text: str
    finish_reason: Literal["stop", "length"]
    entropies_T: FloatArray | None = None
    """True entropy of that distribution at each token, from engines that know it."""
    sampled_T: BoolArray | None = None
    """False on tokens that an environment wrote between turns; None when the model wrote every token."""
    segments: tuple[Segment, ...] = ()
    """The rows this completion is trained as, where it did not simply follow its group's prompt: a conversation whose
    template rewrites earlier turns has one a turn. Together they cover all tokens, in order."""
    transcript: tuple[Mapping[str, Any], ...] = ()
    """The messages of a conversation, each with its role; empty where there was only a prompt and an answer."""


@dataclass(frozen=True)
class Score:
    """What a reward said of one completion. Neither right nor wrong, it has no value and is kept out of the loss."""

    value: float
    outcome: Outcome
    detail: str = ""

    @property
    def counts(self) -> bool:
        """Whether this score may take part in credit assignment."""
        return self.outcome in ("right", "wrong")

    @property
    def failed(self) -> bool:
        """Whether there should have been a value and is none."""
        return self.outcome in ("error", "timeout")


@dataclass(frozen=True)
class Group:
    """All completions of one prompt, with their scores: the unit that advantages are centred on."""

    example: Example
    prompt_ids: IntArray
    completions_G: tuple[Completion, ...]
    scores_G: tuple[Score, ...] = ()
    advantages_G: FloatArray | None = None
    """What each completion earned, once credit is assigned."""


@dataclass(frozen=True)
class Datum:
    """One row of a training step: a prompt, a completion, and what each completion token is worth."""

    prompt_ids: IntArray
    completion_ids_T: IntArray
    logprobs_T: FloatArray
    advantages_T: FloatArray
    mask_T: BoolArray
    """True on tokens that take part in the loss."""
    group: int = -1
    index: int = -1
    """Which completion of which group of the step this is, or is a part of; -1: none, its log-probs are made up."""
    check_T: BoolArray | None = None
    """On a row that is not trained on, the tokens whose log-probs are compared with the trainer's all the same."""
