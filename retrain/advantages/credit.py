"""The steps of credit assignment on a laid-out batch: measure, centre, share out.

`live_P` says which groups carry a signal; the others get zeros, and plug-ins never see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from retrain.advantages.batch import TokenBatch, call_plugin, check_flat, check_values, read_rows
from retrain.advantages.episode import AdvantageFn
from retrain.advantages.method import Method
from retrain.advantages.spec import AlgorithmContext, EntropyTransform, TransformContext
from retrain.advantages.token import gtpo_weights, hicra_amplify
from retrain.advantages.uncertainty import UncertaintyContext
from retrain.errors import PluginError, RolloutError
from retrain.types import FloatArray


@dataclass(frozen=True)
class Shares:
    """What each completion earned, and each of its tokens (flat)."""

    episode: FloatArray
    tokens: FloatArray


def measure_uncertainty(method: Method, batch: TokenBatch) -> FloatArray:
    """The uncertainty of every token, flat; 0 on tokens that the model did not write."""
    kind = method.choice.uncertainty_kind
    bare = next((row.place for row in batch.rows if row.completion.entropies_T is None), None)
    if method.uncertainty.needs_entropies and bare is not None:
        raise RolloutError(
            f"uncertainty {kind!r} needs the entropy of every token, and {bare} came without. "
            'Try: uncertainty_kind = "surprisal", or an engine that returns entropies.'
        )
    _refuse_missing_logprobs(batch)
    who = f"uncertainty plug-in {kind!r}"
    context = UncertaintyContext(_masked(batch, batch.logprobs), batch.entropies)
    return _masked(batch, check_flat(who, batch, call_plugin(who, "the batch", partial(method.uncertainty, context))))


def share_out(
    method: Method, batch: TokenBatch, uncertainty: FloatArray, live_P: Sequence[bool], sepa_lambda: float
) -> Shares:
    """Episode and token advantages of the batch. A whole algorithm has no episode advantage: its mean stands in."""
    sepa_lambda = sepa_lambda if method.uses_sepa else 0.0
    live = list(_live_groups(batch, live_P))
    if method.algorithm is not None:
        algorithm = method.algorithm
        describe = _describer(method, batch, uncertainty, sepa_lambda)
        who = f"algorithm plug-in {method.choice.algorithm_mode!r}"
        tokens = _ask_each_group(who, batch, live, lambda rows: algorithm(describe(rows)))
        return Shares(batch.tokens.sum(tokens) / np.maximum(batch.tokens.lengths, 1), tokens)
    episode = _episode_advantages(f"advantage plug-in {method.choice.advantage_mode!r}", method.advantage, batch, live)
    if method.transform.token_transform is not None:
        transform = method.transform.token_transform
        describe = _describer(method, batch, uncertainty, sepa_lambda)
        who = f"transform plug-in {method.choice.transform_mode!r}"

        def ask(rows: slice) -> object:
            return transform(TransformContext(**vars(describe(rows)), episode_advantages_G=episode[rows].copy()))

        return Shares(episode, _ask_each_group(who, batch, live, ask))
    entropies = _transformed_entropies(method, batch, uncertainty, live, sepa_lambda)
    return Shares(episode, _weighed(method, batch, entropies, episode))


def _weighed(method: Method, batch: TokenBatch, entropies: FloatArray, episode: FloatArray) -> FloatArray:
    """GTPO and HICRA, as far as the transform asks for them."""
    advantages = batch.tokens.spread(episode)
    if method.transform.use_gtpo and method.choice.gtpo_beta != 0.0:
        written = None if batch.sampled is None else batch.tokens.count(batch.sampled)
        advantages *= gtpo_weights(entropies, batch.tokens, method.choice.gtpo_beta, written)
    if method.transform.apply_hicra and batch.planning is not None:
        advantages = hicra_amplify(advantages, batch.planning, method.choice.hicra_alpha)
    return _masked(batch, advantages)


def _transformed_entropies(
    method: Method, batch: TokenBatch, uncertainty: FloatArray, live: Sequence[slice], sepa_lambda: float
) -> FloatArray:
    spec = method.transform
    who = f"transform plug-in {method.choice.transform_mode!r}"
    if spec.batch_entropy_transform is not None:
        call = partial(spec.batch_entropy_transform, uncertainty, batch.execution, batch.tokens, sepa_lambda)
        return _masked(batch, check_flat(who, batch, call_plugin(who, "the batch", call)))
    if spec.entropy_transform is not None:
        return _transformed_one_by_one(who, spec.entropy_transform, batch, uncertainty, live, sepa_lambda)
    return uncertainty


def _transformed_one_by_one(
    who: str,
    transform: EntropyTransform,
    batch: TokenBatch,
    uncertainty: FloatArray,
    live: Sequence[slice],
    sepa_lambda: float,
) -> FloatArray:
    """Each completion's entropies through the plug-in, which sees only tokens that the model wrote."""
    changed = uncertainty.copy()
    entropies_R, planning_R = batch.tokens.split(changed), batch.tokens.split(batch.planned)
    sampled_R = None if batch.sampled is None else batch.tokens.split(batch.sampled)
    for row in (row for rows in live for row in range(rows.start, rows.stop)):
        written = np.arange(len(entropies_R[row])) if sampled_R is None else np.flatnonzero(sampled_R[row])
        if len(written) == 0:
            continue
        place = batch.rows[row].place
        # Copies (indexing with an array makes one), so that a plug-in may change what it is given.
        call = partial(transform, entropies_R[row][written], planning_R[row][written], sepa_lambda)
        values = check_values(who, place, "token", call_plugin(who, place, call), written)
        entropies_R[row][written] = values
    return changed


def _episode_advantages(who: str, advantage: AdvantageFn, batch: TokenBatch, live: Sequence[slice]) -> FloatArray:
    episode = np.zeros(len(batch.rows))
    for rows in live:
        place = batch.rows[rows.start].group_place
        values = call_plugin(who, place, partial(advantage, batch.rewards[rows].copy()))
        indices = np.array([row.index for row in batch.rows[rows]])
        episode[rows] = check_values(who, place, "completion", values, indices)
    return episode


def _ask_each_group(who: str, batch: TokenBatch, live: Sequence[slice], ask: Callable[[slice], object]) -> FloatArray:
    """Token advantages from a plug-in that answers for a whole group at a time."""
    flat = np.zeros(batch.tokens.total)
    views = batch.tokens.split(flat)
    for rows in live:
        place = batch.rows[rows.start].group_place
        answer = call_plugin(who, place, partial(ask, rows))
        if not isinstance(answer, Sequence | np.ndarray) or (isinstance(answer, np.ndarray) and answer.ndim == 0):
            raise PluginError(f"{who} returned {type(answer).__name__} at {place}, not one array a completion.")
        if len(answer) != rows.stop - rows.start:
            raise PluginError(
                f"{who} returned {len(answer)} arrays for {rows.stop - rows.start} completions at {place}."
            )
        for row, values in zip(range(rows.start, rows.stop), answer, strict=True):
            tokens = np.arange(len(views[row]))
            views[row][:] = check_values(who, batch.rows[row].place, "token", values, tokens)
    return _masked(batch, flat)


def _describer(
    method: Method, batch: TokenBatch, uncertainty: FloatArray, sepa_lambda: float
) -> Callable[[slice], AlgorithmContext]:
    """A function from the rows of a group to its context; the arrays are split once for all groups."""
    tokens = batch.tokens
    sampled = np.ones(tokens.total, dtype=np.bool_) if batch.sampled is None else batch.sampled
    logprobs_R, uncertainties_R = read_rows(tokens, batch.logprobs), read_rows(tokens, uncertainty)
    planning_R, sampled_R = read_rows(tokens, batch.planned), read_rows(tokens, sampled)
    entropies_R = None if batch.entropies is None else read_rows(tokens, batch.entropies)

    def describe(rows: slice) -> AlgorithmContext:
        return AlgorithmContext(
            rewards_G=batch.rewards[rows].copy(),
            logprobs_G=logprobs_R[rows],
            uncertainties_G=uncertainties_R[rows],
            planning_masks_G=planning_R[rows],
            sampled_masks_G=sampled_R[rows],
            entropies_G=None if entropies_R is None else entropies_R[rows],
            sepa_lambda=sepa_lambda,
            gtpo_beta=method.choice.gtpo_beta,
            hicra_alpha=method.choice.hicra_alpha,
            params=method.choice.transform_params,
            completions_G=tuple(row.completion for row in batch.rows[rows]),
        )

    return describe


def _live_groups(batch: TokenBatch, live_P: Sequence[bool]) -> Iterator[slice]:
    """The rows of each group that carries a signal."""
    for start, end, live in zip(batch.groups.starts.tolist(), batch.groups.ends.tolist(), live_P, strict=True):
        if live and end > start:
            yield slice(start, end)


def _masked(batch: TokenBatch, flat: FloatArray) -> FloatArray:
    """0 on tokens that an environment wrote: they may carry any placeholder, and earn nothing."""
    return flat if batch.sampled is None else np.where(batch.sampled, flat, 0.0)


def _refuse_missing_logprobs(batch: TokenBatch) -> None:
    missing = np.isnan(_masked(batch, batch.logprobs))
    if missing.any():
        raise RolloutError(f"the engine's log-prob is nan at {batch.find(int(np.argmax(missing)))}.")
