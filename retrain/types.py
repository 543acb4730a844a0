"""Data types of the training loop.

Suffixes name the dimension of ragged lists: `_P` prompts of a step, `_G` completions of one group,
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
    # Reward processes start often and need no arrays; importing numpy would double their start-up time.
    FloatArray = IntArray = BoolArray = Any

Metric = float | int | str | bool | None
JsonObject = dict[str, Any]
"""A JSON object as parsed or to be written."""
StepMetrics = dict[str, Metric]

Outcome = Literal["right", "wrong", "error", "timeout", "none"]
"""`none`: the reward did not apply."""


@dataclass(frozen=True)
class Example:
    """A prompt and the reference answer that completions are compared with."""

    prompt: str | tuple[Mapping[str, str], ...]
    """Plain text (it becomes one user message), or chat messages with `role` and `content`."""
    reference: str
    id: str = ""
    meta: Mapping[str, object] = field(default_factory=dict)
    """Additional fields of the source, e.g. the subject; passed to custom rewards."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options: `n` completions per prompt. `seed` makes them reproducible; temperature 0 is greedy."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    first: int = 0
    """Index of the first completion, where a batch is part of a larger one with the same seed."""

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature == 0


@dataclass(frozen=True)
class Segment:
    """A range of a completion's tokens with its own prompt."""

    prompt_ids: IntArray
    start: int
    stop: int


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `logprobs_T` are those of the sampled distribution: after temperature, renormalized over the kept support.
    """

    token_ids_T: IntArray
    logprobs_T: FloatArray
    text: str
    finish_reason: Literal["stop", "length"]
    """`length` if a token limit cut it off; in a conversation, any of its turns, or the turns that would follow."""
    entropies_T: FloatArray | None = None
    """Entropy of that distribution at each token, if the engine provides it."""
    sampled_T: BoolArray | None = None
    """False on tokens that an environment inserted; None if the model sampled every token."""
    segments: tuple[Segment, ...] = ()
    """Training rows of a completion that does not simply follow its group's prompt: a conversation whose template
    rewrites earlier turns has one per turn. Together they cover all tokens, in order."""
    transcript: tuple[Mapping[str, object], ...] = ()
    """The messages of a conversation; empty for a single turn."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return len(self.token_ids_T) if self.sampled_T is None else int(self.sampled_T.sum())


@dataclass(frozen=True)
class Score:
    """The score of a completion. If neither right nor wrong, the completion is excluded from the loss."""

    value: float
    outcome: Outcome
    detail: str = ""

    @property
    def counts(self) -> bool:
        """Whether the score is used for credit assignment."""
        return self.outcome in ("right", "wrong")

    @property
    def failed(self) -> bool:
        """Whether scoring failed."""
        return self.outcome in ("error", "timeout")


@dataclass(frozen=True)
class Group:
    """All completions of one prompt with their scores; advantages are centered per group."""

    example: Example
    prompt_ids: IntArray
    completions_G: tuple[Completion, ...]
    scores_G: tuple[Score, ...] = ()
    advantages_G: FloatArray | None = None
    """Episode advantages, once credit is assigned."""


@dataclass(frozen=True)
class Datum:
    """One row of a training step: prompt, completion, and the advantage of each completion token."""

    prompt_ids: IntArray
    completion_ids_T: IntArray
    logprobs_T: FloatArray
    advantages_T: FloatArray
    mask_T: BoolArray
    """True on tokens that are trained on."""
    group: int = -1
    index: int = -1
    """Group and completion of the step; -1 for synthetic rows."""
    check_T: BoolArray | None = None
    """On rows that are not trained on, tokens whose log-probs are compared with the trainer's."""


@dataclass(frozen=True)
class Obstacle:
    """Why the steps of a run are not overlapped."""

    reason: str
    is_final: bool
    """Whether they cannot be overlapped; otherwise it is not advisable."""
