"""Entry points of credit assignment: `CreditAssigner` for a step of the trainer, `compute_advantages` for one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from retrain.advantages.credit import Advantages, Row, TokenBatch, assign_advantages, flatten_rows, measure_uncertainty
from retrain.advantages.method import Choice, load_method
from retrain.errors import ConfigError, RolloutError
from retrain.plugins import is_plugin
from retrain.types import BoolArray, Completion, FloatArray, Group, Obstacle, StepMetrics

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig

GroupState = Literal["live", "all_right", "all_wrong", "unscored"]
"""Only a live group has a signal; an unscored one has no valid score."""


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of one group."""

    token_advantages: list[FloatArray]
    """One array per completion, one value per token."""
    episode_advantages: FloatArray
    """One value per completion; for an algorithm plugin, the mean of its tokens."""


@dataclass(frozen=True)
class Credit:
    """Advantages of a step, and statistics of uncertainty over all scored completions."""

    token_advantages_PG: tuple[tuple[FloatArray, ...], ...]
    episode_advantages_PG: tuple[FloatArray, ...]
    states_P: tuple[GroupState, ...]
    excluded: tuple[tuple[int, int], ...]
    """(group, completion) without a valid score: excluded from means, with advantage 0."""
    exec_entropy_mean: float | None
    exec_entropy_var: float | None
    """Population variance; input of the SEPA schedule."""
    plan_entropy_mean: float | None
    plan_entropy_var: float | None

    def live(self) -> list[int]:
        """Indices of groups with a signal."""
        return [index for index, state in enumerate(self.states_P) if state == "live"]

    def of(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of the step, each with the advantages of its completions."""
        return [replace(group, advantages_G=a) for group, a in zip(groups, self.episode_advantages_PG, strict=True)]

    def metrics(self) -> StepMetrics:
        """Metrics for the step's row."""
        return {
            "groups_all_right": self.states_P.count("all_right"),
            "groups_all_wrong": self.states_P.count("all_wrong"),
            "exec_entropy_mean": self.exec_entropy_mean,
            "exec_entropy_var": self.exec_entropy_var,
            "plan_entropy_mean": self.plan_entropy_mean,
            "plan_entropy_var": self.plan_entropy_var,
        }


class CreditAssigner:
    """Turns scored groups into token advantages. Plugins are loaded and checked on construction."""

    def __init__(self, config: TrainConfig) -> None:
        algorithm = config.algorithm
        takes_params = algorithm.algorithm_mode or is_plugin("transform", algorithm.transform_mode)
        self.method = load_method(
            Choice(
                advantage_mode=algorithm.advantage_mode,
                transform_mode=algorithm.transform_mode,
                algorithm_mode=algorithm.algorithm_mode,
                uncertainty_kind=algorithm.uncertainty_kind,
                # Built-in methods take no parameters.
                advantage_params=algorithm.advantage_params if is_plugin("advantage", algorithm.advantage_mode) else {},
                transform_params=algorithm.transform_params if takes_params else {},
                gtpo_beta=config.gtpo.beta,
                hicra_alpha=config.hicra.alpha,
                search_paths=config.plugins.search_paths,
            )
        )

    @property
    def needs_planning(self) -> bool:
        """Whether `assign` needs planning masks."""
        return self.method.needs_planning

    @property
    def needs_entropies(self) -> bool:
        """Whether every completion must carry `entropies_T`."""
        return self.method.uncertainty.needs_entropies

    @property
    def uses_sepa(self) -> bool:
        """Whether `sepa_lambda` has any effect."""
        return self.method.uses_sepa

    def overlap_obstacle(self) -> Obstacle | None:
        """Why a group's credit may depend on other groups; None if it does not."""
        choice, transform = self.method.choice, self.method.transform
        if is_plugin("uncertainty", choice.uncertainty_kind):
            return Obstacle(f"[algorithm] uncertainty_kind = {choice.uncertainty_kind!r} needs complete steps", True)
        if is_plugin("transform", choice.transform_mode) and transform.batch_entropy_transform is not None:
            return Obstacle(f"[algorithm] transform_mode = {choice.transform_mode!r} needs complete steps", True)
        names = {"advantage": choice.advantage_mode, "transform": choice.transform_mode}
        if choice.algorithm_mode:
            names = {"algorithm": choice.algorithm_mode}
        plugin = next((f"{kind}_mode = {name!r}" for kind, name in names.items() if is_plugin(kind, name)), "")
        if plugin:
            return Obstacle(f"[algorithm] {plugin} may depend on earlier groups", False)
        return None

    def require_entropies(self, available: bool, engine: str) -> None:
        """Raise if the uncertainty needs entropies and the engine returns none."""
        if self.needs_entropies and not available:
            raise ConfigError(
                f"[algorithm] uncertainty_kind = {self.method.choice.uncertainty_kind!r} needs the entropy "
                f'of every token, which the {engine} engine does not return.  Try: uncertainty_kind = "surprisal"'
            )

    def assign(
        self,
        groups: Sequence[Group],
        planning_masks_PG: Sequence[Sequence[BoolArray]] | None = None,
        sepa_lambda: float = 0.0,
    ) -> Credit:
        """Token advantages of a step. Without masks no token counts as planning."""
        rows_P = [
            _scored_rows(index, group, None if planning_masks_PG is None else planning_masks_PG[index])
            for index, group in enumerate(groups)
        ]
        states_P = tuple(_group_state(group) for group in groups)
        batch = flatten_rows(rows_P)
        uncertainty = measure_uncertainty(self.method, batch)
        advantages = assign_advantages(
            self.method, batch, uncertainty, [state == "live" for state in states_P], sepa_lambda
        )
        tokens_PG, episodes_PG = _as_groups(groups, batch, advantages)
        exec_mean, exec_var = _mean_and_variance(uncertainty, batch.execution)
        plan_mean, plan_var = _mean_and_variance(uncertainty, batch.planned)
        return Credit(
            token_advantages_PG=tokens_PG,
            episode_advantages_PG=episodes_PG,
            states_P=states_P,
            excluded=_excluded(groups),
            exec_entropy_mean=exec_mean,
            exec_entropy_var=exec_var,
            plan_entropy_mean=plan_mean,
            plan_entropy_var=plan_var,
        )


def compute_advantages(
    rewards_G: ArrayLike,
    logprobs_G: Sequence[ArrayLike],
    planning_masks_G: Sequence[ArrayLike] | None = None,
    *,
    advantage_mode: str = "maxrl",
    transform_mode: str = "gtpo_sepa",
    algorithm_mode: str = "",
    sepa_lambda: float = 0.0,
    gtpo_beta: float = 0.1,
    hicra_alpha: float = 0.2,
    uncertainty_kind: str = "surprisal",
    entropies_G: Sequence[ArrayLike] | None = None,
    advantage_params: Mapping[str, object] | None = None,
    transform_params: Mapping[str, object] | None = None,
    search_paths: Sequence[str] = (),
) -> AdvantageResult:
    """Token advantages of one group: rewards, and the log-probs of each completion's tokens.

    Modes are built-in names, names of installed plugins or dotted paths. Without masks no token counts as planning.
    """
    choice = Choice(
        advantage_mode=advantage_mode,
        transform_mode=transform_mode,
        algorithm_mode=algorithm_mode,
        uncertainty_kind=uncertainty_kind,
        advantage_params=advantage_params or {},
        transform_params=transform_params or {},
        gtpo_beta=gtpo_beta,
        hicra_alpha=hicra_alpha,
        search_paths=search_paths,
    )
    method = load_method(choice)
    batch = _group_batch(rewards_G, logprobs_G, planning_masks_G, entropies_G)
    advantages = assign_advantages(method, batch, measure_uncertainty(method, batch), [True], sepa_lambda)
    return AdvantageResult(batch.tokens.split(advantages.tokens), advantages.episode)


def _group_batch(
    rewards_G: ArrayLike,
    logprobs_G: Sequence[ArrayLike],
    planning_masks_G: Sequence[ArrayLike] | None,
    entropies_G: Sequence[ArrayLike] | None,
) -> TokenBatch:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    given = {"logprobs_G": logprobs_G, "planning_masks_G": planning_masks_G, "entropies_G": entropies_G}
    for name, values in given.items():
        if values is not None and (len(values),) != rewards.shape:
            raise ValueError(f"{name} holds {len(values)} completions for rewards_G of shape {rewards.shape}.")
    rows = []
    for index, reward in enumerate(rewards.tolist()):
        logprobs_T = np.asarray(logprobs_G[index], dtype=np.float64)
        completion = Completion(
            token_ids_T=np.zeros(len(logprobs_T), dtype=np.int64),
            logprobs_T=logprobs_T,
            text="",
            finish_reason="stop",
            entropies_T=None if entropies_G is None else np.asarray(entropies_G[index], dtype=np.float64),
        )
        mask_T = None if planning_masks_G is None else np.asarray(planning_masks_G[index], dtype=np.bool_)
        rows.append(Row(0, index, reward, completion, mask_T))
    return flatten_rows([rows])


def _scored_rows(at: int, group: Group, masks_G: Sequence[BoolArray] | None) -> list[Row]:
    completions_G, scores_G = group.completions_G, group.scores_G
    if len(scores_G) != len(completions_G):
        raise RolloutError(f"group {at} has {len(scores_G)} scores for {len(completions_G)} completions.")
    if masks_G is not None and len(masks_G) != len(completions_G):
        raise RolloutError(f"group {at} has {len(masks_G)} planning masks for {len(completions_G)} completions.")
    return [
        Row(at, index, score.value, completion, None if masks_G is None else masks_G[index])
        for index, (completion, score) in enumerate(zip(completions_G, scores_G, strict=True))
        if score.counts
    ]


def _group_state(group: Group) -> GroupState:
    counting = [score for score in group.scores_G if score.counts]
    if not counting:
        return "unscored"
    if len({score.value for score in counting}) > 1:
        return "live"
    return "all_right" if all(score.outcome == "right" for score in counting) else "all_wrong"


def _excluded(groups: Sequence[Group]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (at, index) for at, group in enumerate(groups) for index, score in enumerate(group.scores_G) if not score.counts
    )


def _as_groups(
    groups: Sequence[Group], batch: TokenBatch, advantages: Advantages
) -> tuple[tuple[tuple[FloatArray, ...], ...], tuple[FloatArray, ...]]:
    """Map rows back to groups, with zeros for excluded completions."""
    earned = {(row.group, row.index): at for at, row in enumerate(batch.rows)}
    tokens_R = batch.tokens.split(advantages.tokens)
    tokens_PG = tuple(
        tuple(
            tokens_R[earned[at, index]] if (at, index) in earned else np.zeros(len(completion.logprobs_T))
            for index, completion in enumerate(group.completions_G)
        )
        for at, group in enumerate(groups)
    )
    episodes_PG = tuple(np.zeros(len(group.completions_G)) for group in groups)
    for row, episode in zip(batch.rows, advantages.episode, strict=True):
        episodes_PG[row.group][row.index] = episode
    return tokens_PG, episodes_PG


def _mean_and_variance(uncertainty: FloatArray, chosen: BoolArray) -> tuple[float | None, float | None]:
    values = np.compress(chosen, uncertainty)
    if len(values) == 0:
        return None, None
    mean = values.mean()
    # In place: var() would allocate two more arrays of a million tokens.
    values -= mean
    return float(mean), float(np.square(values, out=values).mean())
