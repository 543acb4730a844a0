"""Credit assignment on the flattened tokens of a step: measure uncertainty, compute advantages, weight tokens.

`live_P` marks groups with a signal; the others get zeros, and plugins never see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrain.advantages.episode import AdvantageFn
from retrain.advantages.method import AlgorithmContext, EntropyTransform, Method, TransformContext
from retrain.advantages.ragged import Ragged, Scalar
from retrain.advantages.token import gtpo_weights, hicra_amplify
from retrain.advantages.uncertainty import UncertaintyContext
from retrain.errors import PluginError, RolloutError, blaming
from retrain.types import BoolArray, Completion, FloatArray, IntArray


@dataclass(frozen=True)
class Row:
    """One scored completion: its position in the step, reward and tokens."""

    group: int
    index: int
    reward: float
    completion: Completion
    planning_T: BoolArray | None = None

    @property
    def group_place(self) -> str:
        """Its group's name in messages."""
        return f"group {self.group}"

    @property
    def place(self) -> str:
        """Its name in messages."""
        return f"group {self.group}, completion {self.index}"


@dataclass(frozen=True)
class TokenBatch:
    """Flat arrays over the tokens of all rows. `groups` is over rows, `tokens` over tokens.

    `planning` is None if there are no planning tokens, `sampled` if the model sampled every token.
    """

    rows: tuple[Row, ...]
    groups: Ragged
    tokens: Ragged
    rewards: FloatArray
    logprobs: FloatArray
    planning: BoolArray | None
    sampled: BoolArray | None

    @cached_property
    def entropies(self) -> FloatArray | None:
        """True entropies, or None if any completion lacks them."""
        entropies = [row.completion.entropies_T for row in self.rows]
        known = [one for one in entropies if one is not None]
        return _flatten(known) if len(known) == len(entropies) else None

    @cached_property
    def execution(self) -> BoolArray:
        """Sampled tokens that are not planning."""
        written = np.ones(self.tokens.total, dtype=np.bool_) if self.sampled is None else self.sampled
        return written if self.planning is None else written > self.planning

    @property
    def planned(self) -> BoolArray:
        """Sampled planning tokens."""
        return np.zeros(self.tokens.total, dtype=np.bool_) if self.planning is None else self.planning

    def find(self, index: int) -> str:
        """The name of a flat index in messages."""
        row, token = self.tokens.locate(index)
        return f"{self.rows[row].place}, token {token}"


def flatten_rows(rows_P: Sequence[Sequence[Row]]) -> TokenBatch:
    """Flatten the rows of all groups; checks that every per-token array fits its completion."""
    rows = tuple(row for rows in rows_P for row in rows)
    for row in rows:
        _check_row(row)
    completions = [row.completion for row in rows]
    sampled = _flatten_masks([one.sampled_T for one in completions], completions, missing=True)
    planning = _flatten_masks([row.planning_T for row in rows], completions, missing=False)
    if planning is not None and sampled is not None:
        planning &= sampled
    return TokenBatch(
        rows=rows,
        groups=Ragged.of(rows_P),
        tokens=Ragged.of([one.logprobs_T for one in completions]),
        rewards=np.array([row.reward for row in rows], dtype=np.float64),
        logprobs=_flatten([one.logprobs_T for one in completions]),
        planning=planning,
        sampled=sampled,
    )


def read_rows(tokens: Ragged, flat: NDArray[Scalar]) -> tuple[NDArray[Scalar], ...]:
    """The rows of a flat array, as read-only views."""
    view = flat.view()
    view.flags.writeable = False
    return tuple(tokens.split(view))


def call_plugin(who: str, where: str, call: Callable[[], object]) -> object:
    """Call third-party code; exceptions become a PluginError with its name and place."""
    with blaming(who, f"at {where}"):
        return call()


def check_values(who: str, where: str, unit: str, values: object, indices: IntArray) -> FloatArray:
    """A plugin's values as an array, one for each of `indices`; raises PluginError otherwise."""
    array = _as_numbers(who, where, values)
    if array.shape != indices.shape:
        got = f"{len(array)} values" if array.ndim == 1 else f"an array of shape {array.shape}"
        raise PluginError(f"{who} returned {got} for {len(indices)} {unit}s at {where}.")
    finite = np.isfinite(array)
    if not finite.all():
        bad = int(np.argmin(finite))
        raise PluginError(f"{who} returned {array[bad]} at {where}, {unit} {indices[bad]}.")
    return array


def check_flat(who: str, batch: TokenBatch, values: object) -> FloatArray:
    """The same for one value per token of the batch."""
    flat = _as_numbers(who, "the whole batch", values)
    if flat.shape != (batch.tokens.total,):
        raise PluginError(
            f"{who} returned an array of shape {flat.shape} for the {batch.tokens.total} tokens of a batch."
        )
    finite = np.isfinite(flat)
    if not finite.all():
        bad = int(np.argmin(finite))
        raise PluginError(f"{who} returned {flat[bad]} at {batch.find(bad)}.")
    return flat


def _as_numbers(who: str, where: str, values: object) -> FloatArray:
    if values is None:
        raise PluginError(f"{who} returned None at {where}.  Try: return an array")
    try:
        array: FloatArray = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise PluginError(f"{who} returned {type(values).__name__}, not numbers, at {where}: {error}") from error
    return array


def _check_row(row: Row) -> None:
    completion = row.completion
    length = len(completion.logprobs_T)
    arrays: Iterable[tuple[str, ArrayLike | None]] = (
        ("token ids", completion.token_ids_T),
        ("entropies", completion.entropies_T),
        ("sampled mask", completion.sampled_T),
        ("planning mask", row.planning_T),
    )
    for what, array in arrays:
        if array is not None and np.shape(array) != (length,):
            raise RolloutError(f"{row.place}: {what} of shape {np.shape(array)} for {length} log-probs.")
    if not np.isfinite(row.reward):
        raise RolloutError(f"{row.place}: the reward is {row.reward}, which is not finite.")


def _flatten(arrays: Sequence[FloatArray]) -> FloatArray:
    # The empty array allows a batch without completions.
    return np.concatenate([np.zeros(0), *arrays], dtype=np.float64)


def _flatten_masks(
    masks: Sequence[BoolArray | None], completions: Sequence[Completion], *, missing: bool
) -> BoolArray | None:
    if all(mask is None for mask in masks):
        return None
    filled = [
        np.full(len(one.logprobs_T), missing) if mask is None else np.asarray(mask, dtype=np.bool_)
        for mask, one in zip(masks, completions, strict=True)
    ]
    return np.concatenate(filled)


@dataclass(frozen=True)
class Advantages:
    """Advantages per completion, and per token (flat)."""

    episode: FloatArray
    tokens: FloatArray


def measure_uncertainty(method: Method, batch: TokenBatch) -> FloatArray:
    """The uncertainty of every token, flat; 0 on tokens that were not sampled."""
    kind = method.choice.uncertainty_kind
    bare = next((row.place for row in batch.rows if row.completion.entropies_T is None), None)
    if method.uncertainty.needs_entropies and bare is not None:
        raise RolloutError(
            f"uncertainty {kind!r} needs the entropy of every token, and {bare} has none. "
            'Try: uncertainty_kind = "surprisal", or an engine that returns entropies.'
        )
    _check_logprobs(batch)
    who = f"uncertainty plugin {kind!r}"
    context = UncertaintyContext(_masked(batch, batch.logprobs), batch.entropies)
    return _masked(batch, check_flat(who, batch, call_plugin(who, "the batch", partial(method.uncertainty, context))))


def assign_advantages(
    method: Method, batch: TokenBatch, uncertainty: FloatArray, live_P: Sequence[bool], sepa_lambda: float
) -> Advantages:
    """Episode and token advantages of the batch. An algorithm plugin's episode advantage is the mean of its tokens."""
    sepa_lambda = sepa_lambda if method.uses_sepa else 0.0
    live = list(_live_groups(batch, live_P))
    if method.algorithm is not None:
        algorithm = method.algorithm
        describe = _context_builder(method, batch, uncertainty, sepa_lambda)
        who = f"algorithm plugin {method.choice.algorithm_mode!r}"
        tokens = _call_per_group(who, batch, live, lambda rows: algorithm(describe(rows)))
        return Advantages(batch.tokens.sum(tokens) / np.maximum(batch.tokens.lengths, 1), tokens)
    episode = _episode_advantages(f"advantage plugin {method.choice.advantage_mode!r}", method.advantage, batch, live)
    if method.transform.token_transform is not None:
        transform = method.transform.token_transform
        describe = _context_builder(method, batch, uncertainty, sepa_lambda)
        who = f"transform plugin {method.choice.transform_mode!r}"

        def ask(rows: slice) -> object:
            return transform(TransformContext(**vars(describe(rows)), episode_advantages_G=episode[rows].copy()))

        return Advantages(episode, _call_per_group(who, batch, live, ask))
    entropies = _transformed_entropies(method, batch, uncertainty, live, sepa_lambda)
    return Advantages(episode, _weighted(method, batch, entropies, episode))


def _weighted(method: Method, batch: TokenBatch, entropies: FloatArray, episode: FloatArray) -> FloatArray:
    """Apply GTPO and HICRA if the transform uses them."""
    advantages = batch.tokens.repeat(episode)
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
    who = f"transform plugin {method.choice.transform_mode!r}"
    if spec.batch_entropy_transform is not None:
        call = partial(spec.batch_entropy_transform, uncertainty, batch.execution, batch.tokens, sepa_lambda)
        return _masked(batch, check_flat(who, batch, call_plugin(who, "the batch", call)))
    if spec.entropy_transform is not None:
        return _transform_each(who, spec.entropy_transform, batch, uncertainty, live, sepa_lambda)
    return uncertainty


def _transform_each(
    who: str,
    transform: EntropyTransform,
    batch: TokenBatch,
    uncertainty: FloatArray,
    live: Sequence[slice],
    sepa_lambda: float,
) -> FloatArray:
    """Transform each completion's entropies; the plugin sees sampled tokens only."""
    changed = uncertainty.copy()
    entropies_R, planning_R = batch.tokens.split(changed), batch.tokens.split(batch.planned)
    sampled_R = None if batch.sampled is None else batch.tokens.split(batch.sampled)
    for row in (row for rows in live for row in range(rows.start, rows.stop)):
        written = np.arange(len(entropies_R[row])) if sampled_R is None else np.flatnonzero(sampled_R[row])
        if len(written) == 0:
            continue
        place = batch.rows[row].place
        # Fancy indexing copies, so a plugin may modify its arguments.
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


def _call_per_group(who: str, batch: TokenBatch, live: Sequence[slice], ask: Callable[[slice], object]) -> FloatArray:
    """Token advantages from a plugin that is called once per group."""
    flat = np.zeros(batch.tokens.total)
    views = batch.tokens.split(flat)
    for rows in live:
        place = batch.rows[rows.start].group_place
        answer = call_plugin(who, place, partial(ask, rows))
        if not isinstance(answer, Sequence | np.ndarray) or (isinstance(answer, np.ndarray) and answer.ndim == 0):
            raise PluginError(f"{who} returned {type(answer).__name__} at {place}, not one array per completion.")
        if len(answer) != rows.stop - rows.start:
            raise PluginError(
                f"{who} returned {len(answer)} arrays for {rows.stop - rows.start} completions at {place}."
            )
        for row, values in zip(range(rows.start, rows.stop), answer, strict=True):
            tokens = np.arange(len(views[row]))
            views[row][:] = check_values(who, batch.rows[row].place, "token", values, tokens)
    return _masked(batch, flat)


def _context_builder(
    method: Method, batch: TokenBatch, uncertainty: FloatArray, sepa_lambda: float
) -> Callable[[slice], AlgorithmContext]:
    """A function from the rows of a group to its context; arrays are split once for all groups."""
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
    """The rows of each group with a signal."""
    for start, end, live in zip(batch.groups.starts.tolist(), batch.groups.ends.tolist(), live_P, strict=True):
        if live and end > start:
            yield slice(start, end)


def _masked(batch: TokenBatch, flat: FloatArray) -> FloatArray:
    """Zero on tokens that an environment inserted."""
    return flat if batch.sampled is None else np.where(batch.sampled, flat, 0.0)


def _check_logprobs(batch: TokenBatch) -> None:
    missing = np.isnan(_masked(batch, batch.logprobs))
    if missing.any():
        raise RolloutError(f"the engine's log-prob is nan at {batch.find(int(np.argmax(missing)))}.")
