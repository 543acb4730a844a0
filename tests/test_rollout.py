from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from retrain.data import ExampleOrder
from retrain.errors import RolloutError
from retrain.rewards import BatchReward, Item
from retrain.rollout import ChunkedScorer, Failures, GroupCollector, Scorer, has_signal
from retrain.testing import ScriptedEngine
from retrain.types import Completion, Example, Group, IntArray, Outcome, Sampling, Score, StepMetrics

EXAMPLES = [Example(f"problem {n}", str(n), meta={"level": n}) for n in range(5)]


class CodeEncoder:
    """One token a character."""

    def encode(self, example: Example) -> IntArray:
        assert isinstance(example.prompt, str)
        return np.array([ord(character) for character in example.prompt])


class WordReward(BatchReward):
    """Outcomes are written in the answers."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def score(self, items: Sequence[Item]) -> list[Score]:  # type: ignore[override]
        self.items += items
        outcomes: list[Outcome] = [item.response.split()[0] for item in items]  # type: ignore[misc]
        return [Score(float(o == "right"), o, f"{o} in detail\nTraceback" if o == "error" else "") for o in outcomes]

    def metrics(self) -> StepMetrics:
        return {"words": len(self.items)}

    def close(self) -> None:
        pass


def scorer(logged: list[str] | None = None) -> Scorer:
    lines: list[str] = [] if logged is None else logged
    return Scorer(CodeEncoder(), WordReward(), lines.append, lambda *_: None)  # type: ignore[arg-type]


def engine(*texts: str) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, index, rng: texts[index % len(texts)])


def test_groups_come_in_order_with_their_own_prompt_and_scores() -> None:
    made = scorer()
    rollouts = made.sample_and_score(engine("right", "wrong"), EXAMPLES[:3], Sampling(max_tokens=9, n=2))
    assert [group.example for group in rollouts.groups] == EXAMPLES[:3]
    for group in rollouts.groups:
        assert "".join(map(chr, group.prompt_ids)) == group.example.prompt
        assert [score.outcome for score in group.scores_G] == ["right", "wrong"]
    assert rollouts.correct_rate == 0.5
    assert rollouts.errors == 0


def test_a_reward_is_given_the_prompt_and_the_metadata_of_the_source() -> None:
    made = scorer()
    made.sample_and_score(engine("right"), EXAMPLES[:2], Sampling(max_tokens=9))
    items: list[Item] = made.reward.items  # type: ignore[attr-defined]
    assert [item._replace(token_ids=None) for item in items] == [
        Item("right", "0", "problem 0", {"level": 0}),
        Item("right", "1", "problem 1", {"level": 1}),
    ]
    assert all(item.token_ids is not None and "".join(map(chr, item.token_ids)) == "right" for item in items)


def test_failures_are_counted_apart_and_the_first_is_shown_once() -> None:
    logged: list[str] = []
    made = scorer(logged)
    for _ in range(2):
        rollouts = made.sample_and_score(engine("right", "error", "wrong"), EXAMPLES[:1], Sampling(max_tokens=9, n=3))
        assert (rollouts.errors, rollouts.correct_rate) == (1, 0.5)
    assert logged == [
        "Scoring failed for 1 of 3 completions; they are excluded. The first one:",
        "error in detail\nTraceback",
    ]


def test_exactly_half_in_error_is_still_trained_on_and_more_is_not() -> None:
    scorer().sample_and_score(engine("right", "timeout"), EXAMPLES[:1], Sampling(max_tokens=9, n=2))
    with pytest.raises(RolloutError, match=r"failed for 2 of 3 completions \(error: error in detail\)"):
        scorer().sample_and_score(engine("error", "error", "right"), EXAMPLES[:1], Sampling(max_tokens=9, n=3))


def group_of(*scores: Score) -> Group:
    completion = Completion(np.arange(1), np.zeros(1), "x", "stop")
    return Group(EXAMPLES[0], np.arange(1), len(scores) * (completion,), scores)


def test_a_group_has_a_signal_when_scores_that_count_differ() -> None:
    right, wrong, error = Score(1.0, "right"), Score(0.0, "wrong"), Score(0.0, "error")
    assert has_signal(group_of(right, wrong))
    assert has_signal(group_of(Score(0.2, "wrong"), wrong))
    assert not has_signal(group_of(right, right, error))
    assert not has_signal(group_of(error, error))
    assert not has_signal(group_of())


def test_each_step_draws_with_a_seed_of_its_own_and_the_next_problems() -> None:
    seeds: list[int] = []

    class Watched(ScriptedEngine):
        def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
            seeds.append(sampling.seed)
            return super().generate(prompts, sampling)

    watched = Watched(lambda prompt, index, rng: "right" if index else "wrong")
    order = ExampleOrder(EXAMPLES, seed=0)
    source = GroupCollector(order, scorer(), Sampling(max_tokens=9, n=2), seed=3)
    asked = [group.example.prompt for step in range(2) for group in source.collect(watched, step, 2).groups]
    assert len(set(asked)) == 4
    assert len(set(seeds)) == 2
    again = GroupCollector(ExampleOrder(EXAMPLES, seed=0), scorer(), Sampling(max_tokens=9, n=2), seed=3)
    assert [group.example.prompt for step in range(2) for group in again.collect(watched, step, 2).groups] == asked
    assert seeds[:2] == seeds[2:]


def test_live_groups_come_first_and_dead_ones_stay_in_the_record() -> None:
    def odd(prompt: IntArray, index: int, rng: np.random.Generator) -> str:
        return "right" if index == 0 and (prompt[-1] - ord("0")) % 2 else "wrong"

    order = ExampleOrder(EXAMPLES, seed=0)
    source = GroupCollector(order, scorer(), Sampling(max_tokens=9, n=2), 0, resample_rounds=20)
    rollouts = source.collect(ScriptedEngine(odd), step=0, batch_size=3)
    groups = rollouts.groups
    assert rollouts.metrics == {"words": 2 * len(groups)}
    live = [has_signal(group) for group in groups]
    assert live == sorted(live, reverse=True)
    assert sum(live) == 3
    asked = [group.example.prompt for group in rollouts.as_asked(groups)]
    assert asked == [example.prompt for example in ExampleOrder(EXAMPLES, seed=0).take(len(groups))]
    assert asked != [group.example.prompt for group in groups]


def one_bad(word: str) -> ScriptedEngine:
    """This outcome for problem 0; of every other odd problem one right and one wrong completion."""

    def text(prompt: IntArray, index: int, rng: np.random.Generator) -> str:
        number = prompt[-1] - ord("0")
        return word if number == 0 else "right" if index == 0 and number % 2 else "wrong"

    return ScriptedEngine(text)


@pytest.mark.parametrize("word", ["error", "timeout", "none"])
@pytest.mark.parametrize(("at_once", "rounds"), [(1, 0), (0, 20), (1, 20)])
def test_one_problem_that_cannot_be_scored_does_not_end_a_step_that_is_scored_in_parts(
    word: str, at_once: int, rounds: int
) -> None:
    made = scorer()
    parts = ChunkedScorer(made, at_once) if at_once else made
    source = GroupCollector(ExampleOrder(EXAMPLES, seed=0), parts, Sampling(max_tokens=9, n=2), 0, rounds)
    drawn = [source.collect(one_bad(word), step, batch_size=4) for step in range(4)]
    assert sum(rollouts.errors for rollouts in drawn) > 0 or word == "none"


def test_more_than_half_of_a_step_that_is_scored_in_parts_ends_it_as_soon_as_that_is_certain() -> None:
    made = scorer()
    asked: list[int] = []

    def text(prompt: IntArray, index: int, rng: np.random.Generator) -> str:
        asked.append(index)
        return "error"

    source = GroupCollector(ExampleOrder(EXAMPLES, seed=0), ChunkedScorer(made, 1), Sampling(max_tokens=9, n=2), 0)
    with pytest.raises(RolloutError, match=r"failed for 6 of 10 completions so far \(error: error in detail\)"):
        source.collect(ScriptedEngine(text), 0, batch_size=5)
    assert len(asked) == 6
    with pytest.raises(RolloutError, match=r"failed for 6 of 10 completions so far"):
        source.collect(ScriptedEngine(text), 0, batch_size=5)


def test_a_reward_that_applies_to_nothing_ends_a_step_that_is_scored_in_parts() -> None:
    order, parts = ExampleOrder(EXAMPLES, seed=0), ChunkedScorer(scorer(), 1)
    source = GroupCollector(order, parts, Sampling(max_tokens=9, n=2), 0, resample_rounds=1)
    with pytest.raises(RolloutError, match="returned None for all 8 completions"):
        source.collect(engine("none"), 0, batch_size=2)


def test_a_part_does_not_give_up_for_the_others() -> None:
    failures, failed = Failures("Scoring", "completions", lambda line: None), Score(0.0, "error", "it hung")
    with pytest.raises(RolloutError, match=r"2 of 4 completions so far .*hangs"):
        failures.check_early([failed] * 2, 4, "hangs")
    with failures.in_parts():
        failures.expect(8)
        failures.check_early([failed] * 2, 4, "hangs")


def answer(tokens: int = 2, **arrays: object) -> Completion:
    return replace(Completion(np.arange(tokens), np.zeros(tokens), "right", "stop"), **arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([[answer(), answer()]], "returned a list of 1 for 2 prompts"),
        ([[answer(), answer()], [answer()]], "returned a list of 1 for n = 2 at prompt 1"),
        ([[answer(), answer()], [answer()] * 3], "returned a list of 3 for n = 2 at prompt 1"),
        (None, "returned a NoneType for 2 prompts; expected a list"),
        ([answer(), answer()], "returned a Completion for n = 2 at prompt 0; expected a list"),
        ([[answer(), "right"]] * 2, "at prompt 0, completion 1, a str; expected a retrain.types.Completion"),
        ([[answer(), answer(logprobs_T=np.zeros(3))]] * 2, r"completion 1, log-probs of shape \(3,\) for 2 tokens"),
        ([[answer(logprobs_T=None), answer()]] * 2, r"completion 0, log-probs of shape \(\) for 2 tokens"),
        ([[answer(entropies_T=np.zeros((2, 1))), answer()]] * 2, r"entropies of shape \(2, 1\) for 2 tokens"),
        ([[answer(sampled_T=np.ones(1, dtype=bool)), answer()]] * 2, r"a sampled mask of shape \(1,\) for 2 tokens"),
        ([[answer(token_ids_T=np.zeros((2, 1))), answer()]] * 2, r"token ids of shape \(2, 1\); expected one row"),
    ],
)
def test_an_engine_that_returns_the_wrong_shape_is_named(returned: object, message: str) -> None:
    class Misshapen(ScriptedEngine):
        def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
            return returned  # type: ignore[return-value]

    with pytest.raises(RolloutError, match=message) as caught:
        scorer().sample_and_score(Misshapen(lambda *_: ""), EXAMPLES[:2], Sampling(max_tokens=9, n=2))
    assert "the inference engine " in str(caught.value) and ".Misshapen returned" in str(caught.value)
