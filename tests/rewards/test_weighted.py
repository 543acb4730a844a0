from pathlib import Path

import pytest

from retrain.config.schema import Reward, RewardTerm
from retrain.errors import PluginError
from retrain.rewards import RewardSpec, TermSpec, WeightedScore, build_reward, read_spec
from retrain.rewards.match import MatchReward
from retrain.rewards.weighted import Term, WeightedReward

HERE = str(Path(__file__).parent)


def test_a_plain_section_becomes_one_unweighted_term(tmp_path):
    spec = read_spec(Reward(type="custom", custom_module="mine", custom_function="grade"), [str(tmp_path)])
    assert spec == RewardSpec((TermSpec("custom", 1.0, "mine", "grade"),), False, (str(tmp_path.resolve()),))
    assert spec.terms[0].name == "mine.grade"


def test_terms_are_weighed_and_each_value_is_kept():
    length = RewardTerm(type="custom", weight=0.5, custom_module="hostile", custom_function="LENGTH")
    section = Reward(
        workers=1, terms=(RewardTerm(type="match", weight=2.0), length, RewardTerm(type="match", weight=-1.0))
    )
    with build_reward(section, [HERE]) as pool:
        right, wrong = pool.score([(r"\boxed{12}", "12"), (r"\boxed{12}", "13")])
    assert isinstance(right, WeightedScore) and isinstance(wrong, WeightedScore)
    assert right.terms == {"match": 1.0, "hostile.LENGTH": 1.0, "match#2": 1.0}
    assert (right.value, right.outcome) == (2.0 + 0.5 - 1.0, "right")
    assert wrong.terms == {"match": 0.0, "hostile.LENGTH": 1.0, "match#2": 0.0}
    assert (wrong.value, wrong.outcome) == (0.5, "wrong")


def test_a_term_that_returns_none_is_left_out_of_the_sum():
    odd = RewardTerm(type="custom", weight=0.5, custom_module="hostile")
    with build_reward(Reward(workers=1, terms=(RewardTerm(type="match", weight=2.0), odd)), [HERE]) as pool:
        (score,) = pool.score([("none", "12")])
    assert score == WeightedScore(0.0, "wrong", terms={"match": 0.0})
    with build_reward(Reward(workers=1, terms=(odd,)), [HERE]) as pool:
        (score,) = pool.score([("none", "12")])
    assert score.outcome == "none"


def test_a_single_term_still_has_its_weight():
    with build_reward(Reward(workers=1, terms=(RewardTerm(weight=0.25),))) as pool:
        (score,) = pool.score([(r"\boxed{1}", "1")])
    assert score == WeightedScore(0.25, "wrong", terms={"match": 1.0})


def test_an_error_in_one_term_is_an_error_of_the_whole_and_names_the_term():
    bad = RewardTerm(type="custom", custom_module="hostile")
    with build_reward(Reward(workers=1, terms=(RewardTerm(), bad)), [HERE]) as pool:
        score, other = pool.score([("raise", ""), ("true", "")])
    assert score.outcome == "error" and "in the reward term 'hostile.score'" in score.detail
    assert other.value == 1.0


def test_terms_get_only_the_extras_they_name():
    both = tuple(
        RewardTerm(type="custom", custom_module="hostile", custom_function=name)
        for name in ("score_async", "score_with_any", "loop_of_its_own")
    )
    with build_reward(Reward(workers=1, terms=both), [HERE]) as pool:
        (score,) = pool.score([("a", "a")])
    assert isinstance(score, WeightedScore)
    assert list(score.terms.values()) == [1.0, 2.0, 1.0]


def test_a_weighted_reward_scores_in_process_too():
    reward = WeightedReward([Term("match", 3.0, MatchReward())])
    assert reward.score(r"\boxed{1}", "1") == pytest.approx(3.0)


def test_a_sum_out_of_bounds_is_an_error_of_that_item_alone():
    number = RewardTerm(type="custom", weight=10.0, custom_module="hostile", custom_function="number")
    with build_reward(Reward(workers=1, terms=(number,)), [HERE]) as pool:
        scores = pool.score([("1", ""), ("900000", ""), ("1e308", ""), ("0", "")])
    assert [score.outcome for score in scores] == ["right", "error", "error", "wrong"]
    assert scores[1].detail.startswith("the weighted terms add up to 9000000.0; it must be between")
    assert scores[2].detail.startswith("the reward returned 1e+308; it must be between")
    assert scores[2].detail.endswith("\nin the reward term 'hostile.number'")


@pytest.mark.parametrize("weights", [(1e308, 1e308), (-1e308, -1e308), (float("inf"), float("-inf"))])
def test_a_sum_that_overflows_is_rejected(weights):
    reward = WeightedReward([Term("match", weight, MatchReward()) for weight in weights])
    with pytest.raises(PluginError, match=r"the weighted terms add up to .*; it must be finite"):
        reward.score(r"\boxed{1}", "1")
