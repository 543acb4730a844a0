"""What a token transform is, and what a custom one is handed.

Contexts describe one group. They hold only completions that were scored, and their arrays are read-only views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from numpy.typing import ArrayLike

from retrain.advantages.ragged import Ragged
from retrain.advantages.token import sepa_pool
from retrain.types import BoolArray, Completion, FloatArray


@dataclass(frozen=True, kw_only=True)
class AlgorithmContext:
    """One group, for a function that replaces the whole pipeline. Token arrays: one a completion."""

    rewards_G: FloatArray
    logprobs_G: tuple[FloatArray, ...]
    uncertainties_G: tuple[FloatArray, ...]
    """By `[algorithm] uncertainty_kind`; 0 on tokens that the model did not write."""
    planning_masks_G: tuple[BoolArray, ...]
    sampled_masks_G: tuple[BoolArray, ...]
    """False on tokens that an environment wrote; whatever is returned there becomes 0."""
    entropies_G: tuple[FloatArray, ...] | None = None
    """True entropies, from engines that return them."""
    sepa_lambda: float = 0.0
    gtpo_beta: float = 0.0
    hicra_alpha: float = 0.0
    params: Mapping[str, object] = field(default_factory=dict)
    """`[algorithm.transform_params]`."""
    completions_G: tuple[Completion, ...] = ()
    """The completions themselves; through `compute_advantages` they have no text and no real token ids."""


@dataclass(frozen=True, kw_only=True)
class TransformContext(AlgorithmContext):
    """One group, for a function that shares out episode advantages over tokens."""

    episode_advantages_G: FloatArray


EntropyTransform = Callable[[FloatArray, BoolArray, float], ArrayLike]
"""`(entropies, planning_mask, sepa_lambda)` of one completion -> its new entropies, a list or an array."""

BatchEntropyTransform = Callable[[FloatArray, BoolArray, Ragged, float], FloatArray]
"""`(entropies, execution_mask, tokens, sepa_lambda)` of all completions at once, flat."""

TokenTransform = Callable[[TransformContext], Sequence[ArrayLike]]
"""A group's context -> token advantages, one list or array a completion."""

AlgorithmFn = Callable[[AlgorithmContext], Sequence[ArrayLike]]
"""A group's context -> token advantages, with no episode advantage computed before."""


@dataclass(frozen=True)
class TransformSpec:
    """A token transform: entropies are changed, tokens weighed by GTPO, then amplified by HICRA, each if asked for."""

    name: str
    use_gtpo: bool = True
    """Weigh tokens by their (transformed) entropies; without it each token gets the episode advantage."""
    needs_planning: bool = False
    """Run the planning detector; otherwise no token counts as planning."""
    uses_sepa_controller: bool = False
    """Let the SEPA schedule choose `sepa_lambda`; otherwise it is 0."""
    entropy_transform: EntropyTransform | None = None
    """Changes the entropies of one completion before GTPO."""
    apply_hicra: bool = False
    """Amplify planning tokens after GTPO."""
    batch_entropy_transform: BatchEntropyTransform | None = None
    """The same step for all completions at once, for speed; takes the place of `entropy_transform`."""
    token_transform: TokenTransform | None = None
    """Does the whole sharing-out itself; the fields that steer GTPO and HICRA are then unused."""


NONE = TransformSpec("none", use_gtpo=False)
"""Every token gets its completion's advantage."""

GTPO = TransformSpec("gtpo")
"""Unsure tokens get more."""

GTPO_HICRA = TransformSpec("gtpo_hicra", needs_planning=True, apply_hicra=True)
"""GTPO, then planning tokens amplified."""

GTPO_SEPA = TransformSpec(
    "gtpo_sepa", needs_planning=True, uses_sepa_controller=True, batch_entropy_transform=sepa_pool
)
"""GTPO on uncertainties whose execution part is pooled by the SEPA schedule."""
