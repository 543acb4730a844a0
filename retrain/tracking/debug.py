"""Rows of debug.jsonl: what happened to every completion, and why."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.types import Group, JsonObject, StepMetrics

# Metrics of the update.
RATIOS = ("ratio_mean", "ratio_max", "kl_sample_train", "kl_ref", "loss", "grad_norm")


def debug_row(step: int, metrics: StepMetrics, groups: Sequence[Group], all_groups: bool) -> JsonObject:
    """One row per step. With a KL penalty, `all_groups` are trained on."""
    return {
        "step": step,
        **{key: metrics[key] for key in RATIOS if key in metrics},
        "groups": [_group_row(group, all_groups) for group in groups],
    }


def _group_row(group: Group, all_groups: bool) -> JsonObject:
    """Rewards, advantages and lengths of a group, and excluded completions."""
    counting = [score.value for score in group.scores_G if score.counts]
    advantages = [] if group.advantages_G is None else [float(value) for value in group.advantages_G]
    dropped: dict[str, str] = {}
    for index, (completion, score) in enumerate(zip(group.completions_G, group.scores_G, strict=True)):
        if not score.counts:
            dropped[str(index)] = f"scoring: {score.outcome}"
        elif len(set(counting)) < 2 and not all_groups:
            dropped[str(index)] = "all rewards of the group are equal"
        elif not len(completion.token_ids_T):
            dropped[str(index)] = "empty"
    return {
        "id": group.example.id,
        "prompt_tokens": len(group.prompt_ids),
        "rewards": [score.value if score.counts else None for score in group.scores_G],
        "advantages": advantages,
        "lengths": [completion.num_sampled for completion in group.completions_G],
        "finish_reasons": [completion.finish_reason for completion in group.completions_G],
        "dropped": dropped,
    }
