"""The whole pipeline against the plain version, its invariants, and what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.advantages import CreditAssigner, compute_advantages
from retrain.config.schema import Algorithm, Gtpo, Hicra, TrainConfig
from retrain.errors import ConfigError, RolloutError
from retrain.types import Group
from tests.fuzz import examples

from . import plain
from .groups import completion, group

MODES = ["none", "gtpo", "gtpo_hicra", "gtpo_sepa"]


def assigner(beta: float = 0.1, alpha: float = 0.2, **algorithm: str) -> CreditAssigner:
    return CreditAssigner(TrainConfig(algorithm=Algorithm(**algorithm), gtpo=Gtpo(beta=beta), hicra=Hicra(alpha=alpha)))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Group], list[list[np.ndarray]]]:
    """A few groups of a few short completions, some of them empty, unscored or partly written by an environment."""
    groups, masks_PG = [], []
    finite = st.floats(-60.0, 0.1)
    for _ in range(draw(st.integers(1, 3))):
        completions, masks, scores = [], [], []
        for _ in range(draw(st.integers(1, 4))):
            length = draw(st.integers(0, 6))

            def column(values: st.SearchStrategy, length: int = length) -> list:
                return draw(st.lists(values, min_size=length, max_size=length))

            sampled = column(st.booleans()) if draw(st.booleans()) else None
            entropies = column(st.floats(0.0, 8.0))
            completions.append(completion(column(finite), entropies=entropies, sampled=sampled))
            masks.append(np.array(column(st.booleans()), dtype=np.bool_))
            scores.append(draw(st.sampled_from([0.0, 0.25, 1.0, "error", "timeout"])))
        groups.append(group(completions, scores))
        masks_PG.append(masks)
    return groups, masks_PG


@settings(max_examples=examples(150), deadline=None)
@given(
    step=steps(),
    advantage=st.sampled_from(["grpo", "maxrl"]),
    transform=st.sampled_from(MODES),
    kind=st.sampled_from(["surprisal", "predictive_variance", "shannon_entropy"]),
    sepa_lambda=st.floats(0.0, 1.0),
    beta=st.floats(0.0, 3.0),
    alpha=st.floats(0.0, 0.99),
)
def test_the_fast_version_agrees_with_the_plain_one(step, advantage, transform, kind, sepa_lambda, beta, alpha) -> None:
    groups, masks_PG = step
    chosen = assigner(beta, alpha, advantage_mode=advantage, transform_mode=transform, uncertainty_kind=kind)
    credit = chosen.assign(groups, masks_PG, sepa_lambda)
    for at, (one, masks) in enumerate(zip(groups, masks_PG, strict=True)):
        counting = [index for index, score in enumerate(one.scores_G) if score.counts]
        rewards = [one.scores_G[index].value for index in counting]
        live = len(set(rewards)) > 1
        assert (credit.states_P[at] == "live") == live
        episode = plain.episode(rewards, advantage) if live else [0.0] * len(rewards)
        for index, answer in enumerate(one.completions_G):
            sampled = [True] * len(answer.logprobs_T) if answer.sampled_T is None else answer.sampled_T.tolist()
            uncertainties = [
                plain.uncertainty(logprob, entropy, kind) if ours else 0.0
                for logprob, entropy, ours in zip(answer.logprobs_T, answer.entropies_T, sampled, strict=True)
            ]
            earned = episode[counting.index(index)] if index in counting else 0.0
            expected = plain.tokens(
                earned, uncertainties, masks[index].tolist(), sampled, transform, sepa_lambda, beta, alpha
            )
            assert credit.token_advantages_PG[at][index] == pytest.approx(expected, rel=1e-9, abs=1e-9)
            assert credit.episode_advantages_PG[at][index] == pytest.approx(earned)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20))
def test_grpo_advantages_sum_to_zero(rewards: list[float]) -> None:
    result = compute_advantages(rewards, [[]] * len(rewards), advantage_mode="grpo", transform_mode="none")
    assert result.episode_advantages.sum() == pytest.approx(0.0, abs=1e-9)


uncertain = st.lists(st.floats(-8.0, -0.01), min_size=1, max_size=12)


@given(st.lists(uncertain, min_size=2, max_size=4), st.floats(0.0, 1.0))
def test_gtpo_keeps_the_mean_weight_at_one_where_nothing_is_clipped(logprobs: list[list[float]], beta: float) -> None:
    # With beta up to 1 no weight can fall below 0. The first completion is right, so that no advantage is 0.
    rewards = [1.0] + [0.0] * (len(logprobs) - 1)
    result = compute_advantages(rewards, logprobs, transform_mode="gtpo", gtpo_beta=beta)
    for advantage, tokens in zip(result.episode_advantages, result.token_advantages, strict=True):
        assert tokens.mean() == pytest.approx(advantage)


@given(uncertain, st.data())
def test_lambda_one_gives_execution_tokens_equal_weight(logprobs: list[float], data: st.DataObject) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(logprobs), max_size=len(logprobs))), dtype=np.bool_)
    result = compute_advantages([1, 0], [logprobs, logprobs], [mask, mask], sepa_lambda=1.0, gtpo_beta=0.9)
    assert len(set(result.token_advantages[0][~mask].tolist())) <= 1


@given(uncertain, st.floats(0.0, 0.999), st.data())
def test_hicra_never_flips_a_sign(logprobs: list[float], alpha: float, data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(logprobs), max_size=len(logprobs)))
    common = {"transform_mode": "gtpo", "gtpo_beta": 1.5}
    before = compute_advantages([1, 0], [logprobs] * 2, [mask] * 2, **common)
    after = compute_advantages(
        [1, 0], [logprobs] * 2, [mask] * 2, **common | {"transform_mode": "gtpo_hicra", "hicra_alpha": alpha}
    )
    for plain_tokens, amplified in zip(before.token_advantages, after.token_advantages, strict=True):
        assert np.sign(plain_tokens).tolist() == np.sign(amplified).tolist()


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), uncertain), min_size=2, max_size=6), st.randoms())
def test_permuting_completions_permutes_results(rows, random) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)
    straight = compute_advantages(*zip(*rows, strict=True), sepa_lambda=0.5)
    permuted = compute_advantages(*zip(*(rows[index] for index in order), strict=True), sepa_lambda=0.5)
    for place, index in enumerate(order):
        assert permuted.token_advantages[place] == pytest.approx(straight.token_advantages[index])


def test_a_worked_group_comes_out_as_on_paper() -> None:
    # maxrl of [1, 0]: 0.5 / 0.500001. Surprisals of the right answer: ln 2 and 3 ln 2, mean 2 ln 2, so the weights are
    # 1 + 0.1 (1/2 - 1) = 0.95 and 1 + 0.1 (3/2 - 1) = 1.05; the planning token then gains a fifth.
    result = compute_advantages(
        [1, 0], [np.log([0.5, 0.125]), np.log([0.5])], [[False, True], [False]], transform_mode="gtpo_hicra"
    )
    advantage = 0.5 / 0.500001
    assert result.token_advantages[0] == pytest.approx([0.95 * advantage, 1.05 * 1.2 * advantage])
    assert result.token_advantages[1] == pytest.approx([-advantage])


def test_beta_zero_leaves_the_episode_advantage_on_each_token() -> None:
    result = compute_advantages([1, 0], [[-1.0, -3.0], [-2.0]], transform_mode="gtpo", gtpo_beta=0.0)
    assert result.token_advantages[0].tolist() == [result.episode_advantages[0]] * 2


def test_errors_and_timeouts_are_left_out_of_the_mean_and_earn_nothing() -> None:
    answers = [completion([-1.0, -2.0]) for _ in range(4)]
    credit = assigner(advantage_mode="grpo", transform_mode="none").assign(
        [group(answers, [1.0, "error", 0.0, "timeout"])]
    )
    assert credit.excluded == ((0, 1), (0, 3))
    assert [tokens.tolist() for tokens in credit.token_advantages_PG[0]] == [[0.5, 0.5], [0, 0], [-0.5, -0.5], [0, 0]]
    assert credit.episode_advantages_PG[0].tolist() == [0.5, 0.0, -0.5, 0.0]


def test_dead_groups_are_distinguished_and_earn_nothing() -> None:
    pair = [completion([-1.0]), completion([-2.0])]
    groups = [
        group(pair, [1.0, 1.0]),
        group(pair, [0.0, 0.0]),
        group(pair, [1.0, 0.0]),
        group(pair, ["error", "timeout"]),
        group(pair, [1.0, "error"]),
        group(pair, [0.0, "error"]),
    ]
    credit = assigner().assign(groups)
    assert credit.states_P == ("all_right", "all_wrong", "live", "unscored", "all_right", "all_wrong")
    assert credit.live() == [2]
    assert credit.metrics()["groups_all_right"] == 2
    assert credit.metrics()["groups_all_wrong"] == 2
    for at, tokens_G in enumerate(credit.token_advantages_PG):
        assert any(tokens.any() for tokens in tokens_G) == (at == 2)


def test_statistics_cover_the_scored_tokens_that_the_model_wrote() -> None:
    answers = [
        completion([-1.0, -3.0, -9.0, -2.0], sampled=[True, True, False, True]),
        completion([-5.0, -4.0]),
        completion([-40.0]),
    ]
    masks = [np.array([False, False, True, True]), np.array([False, True]), np.array([False])]
    credit = assigner().assign([group(answers, [1.0, 1.0, "error"])], [masks])
    assert (credit.exec_entropy_mean, credit.exec_entropy_var) == pytest.approx((3.0, 8 / 3))
    assert (credit.plan_entropy_mean, credit.plan_entropy_var) == pytest.approx((3.0, 1.0))


def test_statistics_are_none_where_there_are_no_such_tokens() -> None:
    credit = assigner().assign([group([completion([]), completion([])], [1.0, 0.0])])
    assert credit.metrics()["exec_entropy_mean"] is None
    assert credit.metrics()["plan_entropy_var"] is None
    assert assigner().assign([]).token_advantages_PG == ()


def test_tokens_of_an_environment_may_carry_any_logprob() -> None:
    answers = [completion([-1.0, float("nan"), -3.0], sampled=[True, False, True]), completion([-1.0])]
    credit = assigner(transform_mode="gtpo").assign([group(answers, [1.0, 0.0])])
    assert credit.token_advantages_PG[0][0] == pytest.approx([0.95, 0.0, 1.05], rel=1e-5)


def test_a_missing_logprob_is_an_error_that_names_the_token() -> None:
    answers = [completion([-1.0]), completion([-1.0, float("nan")])]
    with pytest.raises(RolloutError, match="nan at group 0, completion 1, token 1"):
        assigner().assign([group(answers, [1.0, 0.0])])


def test_a_mask_of_the_wrong_length_is_an_error_that_names_the_completion() -> None:
    answers = [completion([-1.0]), completion([-1.0, -1.0])]
    with pytest.raises(RolloutError, match="group 0, completion 1: planning mask of shape"):
        assigner().assign([group(answers, [1.0, 0.0])], [[np.array([True]), np.array([True])]])


def test_an_engine_without_entropies_is_rejected_before_training_and_in_it() -> None:
    chosen = assigner(uncertainty_kind="shannon_entropy")
    assert chosen.needs_entropies
    chosen.require_entropies(True, "pytorch")
    with pytest.raises(ConfigError, match="vllm engine does not return"):
        chosen.require_entropies(False, "vllm")
    with pytest.raises(RolloutError, match="completion 0 has none"):
        chosen.assign([group([completion([-1.0]), completion([-1.0])], [1.0, 0.0])])


@pytest.mark.parametrize(
    ("mode", "planning", "sepa"),
    [("none", False, False), ("gtpo", False, False), ("gtpo_hicra", True, False), ("gtpo_sepa", True, True)],
)
def test_an_assigner_says_what_it_needs(mode: str, planning: bool, sepa: bool) -> None:
    chosen = assigner(transform_mode=mode)
    assert (chosen.needs_planning, chosen.uses_sepa, chosen.needs_entropies) == (planning, sepa, False)


def test_lists_of_unequal_number_are_rejected() -> None:
    with pytest.raises(ValueError, match="logprobs_G holds 1 completions"):
        compute_advantages([1, 0], [[-1.0]])
