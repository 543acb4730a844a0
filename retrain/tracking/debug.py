"""A step in detail, for debug.jsonl: what became of every completion, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrain.types import Group, StepMetrics

# How far the policy that trains is from the one that sampled, and what came of the update.
RATIOS = ("ratio_mean", "ratio_max", "kl_sample_train", "kl_ref", "loss", "grad_norm")


def debug_row(step: int, metrics: StepMetrics, groups: Sequence[Group]) -> dict[str, Any]:
    """One row a step."""
    return {
        "step": step,
        **{key: metrics[key] for key in RATIOS if key in metrics},
        "groups": [_describe(group) for group in groups],
    }


def _describe(group: Group) -> dict[str, Any]:
    """The rewards, advantages and lengths of one group, and what of it was left out of the update."""
    counting = [score.value for score in group.scores_G if score.counts]
    advantages = [] if group.advantages_G is None else [float(value) for value in group.advantages_G]
    dropped: dict[str, str] = {}
    for index, (completion, score) in enumerate(zip(group.completions_G, group.scores_G, strict=True)):
        if not score.counts:
            dropped[str(index)] = f"scoring: {score.outcome}"
        elif len(set(counting)) < 2:
            dropped[str(index)] = "all rewards of the group are equal"
        elif not len(completion.token_ids_T):
            dropped[str(index)] = "empty"
    return {
        "id": group.example.id,
        "prompt_tokens": len(group.prompt_ids),
        "rewards": [score.value if score.counts else None for score in group.scores_G],
        "advantages": advantages,
        "lengths": [len(completion.token_ids_T) for completion in group.completions_G],
        "finish_reasons": [completion.finish_reason for completion in group.completions_G],
        "dropped": dropped,
    }
