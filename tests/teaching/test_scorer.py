"""The teaching scorer over scripted engines: what is asked of whom, how often, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.tiny import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.schema import Teaching
from retrain.errors import ConfigError, RolloutError
from retrain.evaluate import Evaluator
from retrain.modeling.tokens import PromptEncoder, load_tokenizer
from retrain.rewards import BatchReward, Item
from retrain.seeding import derive_seed
from retrain.teaching import Student, TeachingScore, TeachingScorer, check_context, teaching_reward
from retrain.teaching import student as student_module
from retrain.teaching.scorer import student_metrics
from retrain.teaching.templates import Reader, Templates
from retrain.testing import ScriptedEngine
from retrain.tracking.console import Console
from retrain.tracking.jsonl import generation_rows
from retrain.types import Completion, Example, IntArray, Sampling, Score, StepMetrics

SAMPLING = Sampling(max_tokens=40, n=3, temperature=0.9, seed=5)
PLAIN = Templates("probe:{question}", "teach:{question}|{approach}", "taught:{question}|{teaching}", "alone:{question}")
EXAMPLES = [Example(f"q{number}", str(number)) for number in range(4)]

Reply = Callable[[str, np.random.Generator], str]


class Frozen(ScriptedEngine):
    """A scripted model whose draws depend on seed and prompt alone; it keeps what it was asked."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(lambda prompt, index, rng: "")
        self.reply = reply
        self.asked: list[list[str]] = []
        self.limits: list[int] = []
        self.closed = 0

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        self.asked.append([text_of(prompt) for prompt in prompts])
        self.limits.append(sampling.max_tokens)
        return [[self._draw(prompt, copy, sampling) for copy in range(sampling.n)] for prompt in prompts]

    def _draw(self, prompt: IntArray, copy: int, sampling: Sampling) -> Completion:
        rng = np.random.default_rng(derive_seed(sampling.seed, prompt.tobytes().hex(), copy))
        self.script = lambda *_: self.reply(text_of(prompt), rng)
        return self._answer(prompt, 0, copy, sampling)

    def shutdown(self) -> None:
        self.closed += 1


class Graded(BatchReward):
    """A reward that a function gives; `raise` in an answer is an error."""

    def __init__(self, grade: Callable[[str], float] = lambda answer: float("right" in answer)) -> None:
        self.grade = grade
        self.seen: list[Item] = []

    def score(self, items: Sequence[Item | tuple[str, str]]) -> list[Score]:
        self.seen += [Item(*item) for item in items]
        return [self._one(item[0]) for item in items]

    def _one(self, answer: str) -> Score:
        if "raise" in answer:
            return Score(0.0, "error", "cursed")
        value = self.grade(answer)
        return Score(value, "right" if value >= 0.5 else "wrong")

    def metrics(self) -> StepMetrics:
        return {"judge_requests": len(self.seen)}

    def close(self) -> None:
        pass


def text_of(prompt: IntArray) -> str:
    return "".join(chr(id) for id in prompt).removesuffix("=")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    """One token a character; the chat template adds `=` at the end."""
    return encoder_for(tmp_path_factory.mktemp("tokenizer"))


def encoder_for(folder: Path, system: str = "", most: int = 0) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(str(write_tokenizer(folder))), system, most, lambda line: None)


def coin(prompt: str, rng: np.random.Generator) -> str:
    """A student that is right half of the time alone and always with teaching."""
    if prompt.startswith("probe:"):
        return f"unsure {rng.integers(100)}"
    return "right" if prompt.startswith("taught:") or rng.random() < 0.5 else "wrong"


def scorer_for(encoder: PromptEncoder, reply: Reply = coin, **options: Any) -> TeachingScorer:
    """`options` are of `[teaching]`; `grade`, `context`, `templates` and `log` are the test's own."""
    grade, context = options.pop("grade", None), options.pop("context", 4096)
    templates, stream = options.pop("templates", PLAIN), options.pop("stream", StringIO())
    section = Teaching(enabled=True, **options)
    reader = Reader(encoder, context)
    student = Student(Frozen(reply), reader, templates, section.max_probe_tokens, seed=7)
    reward = Graded(grade) if grade else Graded()
    return TeachingScorer(section, Reader(encoder, context), student, reward, Console(stream))


def teacher(text: str = "lesson") -> Frozen:
    return Frozen(lambda prompt, rng: f"{text} {rng.integers(1000)}")


def right(value: float = 1.0) -> Score:
    return Score(value, "right")


def wrong(value: float = 0.0) -> Score:
    return Score(value, "wrong")


@pytest.mark.parametrize(
    ("alone", "taught", "tokens", "expected"),
    [
        (wrong(), right(), 0, 1.0 + 1.0),
        (wrong(), right(), 100, 1.0 + 0.36787944117144233),
        (right(), right(), 50, 0.0 + 0.6065306597126334),
        (wrong(), wrong(), 10, 0.0),
        (right(), wrong(), 10, -2.0),
        (right(0.9), wrong(0.4), 1, -1.0),
        (wrong(0.1), wrong(0.4), 1, 0.3),
        (right(0.9), right(0.6), 100, -0.6 + 0.36787944117144233),
    ],
)
def test_the_reward_is_the_one_worked_out_by_hand(alone: Score, taught: Score, tokens: int, expected: float) -> None:
    assert teaching_reward(alone, taught, tokens, Teaching()) == pytest.approx(expected, abs=1e-12)


def test_multiplier_and_weight_scale_their_own_part_only() -> None:
    own = Teaching(degradation_penalty_multiplier=3.0, efficiency_weight=0.5)
    assert teaching_reward(right(), wrong(), 5, own) == -3.0
    assert teaching_reward(wrong(), right(), 100, own) == pytest.approx(1.0 + 0.5 / math.e)
    assert teaching_reward(right(), wrong(), 5, Teaching(degradation_penalty_multiplier=0.0)) == 0.0


values = st.floats(-100, 100)


@given(values, values, st.integers(0, 10_000), st.integers(1, 10_000), st.floats(1, 10), st.floats(0, 10))
def test_reward_properties(
    alone: float, taught: float, tokens: int, more: int, multiplier: float, weight: float
) -> None:
    section = Teaching(degradation_penalty_multiplier=multiplier, efficiency_weight=weight)
    first, second = wrong(alone), wrong(taught)
    change = taught - alone
    plain = teaching_reward(first, second, tokens, section)
    # Without a right answer length does not matter, and harm costs at least as much as help earns.
    assert plain == teaching_reward(first, second, tokens + more, section)
    assert plain <= change and (plain == change if change >= 0 else plain <= 0)
    ended_right = teaching_reward(first, replace(second, outcome="right"), tokens, section)
    longer = teaching_reward(first, replace(second, outcome="right"), tokens + more, section)
    assert plain <= longer <= ended_right <= plain + weight + 1e-9


def test_each_model_is_asked_what_its_template_says(encoder: PromptEncoder) -> None:
    room, policy = scorer_for(encoder, max_probe_tokens=9), teacher()
    rollouts = room.sample_and_score(policy, EXAMPLES[:2], SAMPLING)
    student = room.student.engine
    assert isinstance(student, Frozen)
    alone, probe, taught = student.asked
    assert alone == ["alone:q0", "alone:q1"] and probe == ["probe:q0", "probe:q1"]
    assert student.limits == [40, 9, 40]
    probes = [room.student.baseline([example], SAMPLING)[0].probe for example in EXAMPLES[:2]]
    assert policy.asked == [[f"teach:q{at}|{probe}" for at, probe in enumerate(probes)]]
    lessons = [one.text for group in rollouts.groups for one in group.completions_G]
    assert taught == [f"taught:q{at // 3}|{text}" for at, text in enumerate(lessons)]


def test_what_is_trained_is_the_teaching(encoder: PromptEncoder) -> None:
    room, policy = scorer_for(encoder), teacher()
    (group,) = room.sample_and_score(policy, EXAMPLES[:1], SAMPLING).groups
    assert group.example == EXAMPLES[0] and text_of(group.prompt_ids).startswith("teach:q0|unsure")
    ((*drawn,),) = teacher().generate([group.prompt_ids], SAMPLING)
    for own, again in zip(group.completions_G, drawn, strict=True):
        assert np.array_equal(own.token_ids_T, again.token_ids_T)
        assert np.array_equal(own.logprobs_T, again.logprobs_T)
        assert own.sampled_T is None and own.segments == ()


def test_the_score_is_that_of_the_students_answer(encoder: PromptEncoder) -> None:
    grades = {"alone": 0.25, "better": 0.75, "worse": 0.0}
    reply: Reply = lambda prompt, rng: prompt.rsplit("|")[-1] if "taught:" in prompt else "alone"  # noqa: E731
    room = scorer_for(encoder, reply, grade=lambda answer: grades[answer])
    for word, value in (("better", 0.5 + math.exp(-6 / 100)), ("worse", -0.5)):
        policy = Frozen(lambda prompt, rng, word=word: word)  # type: ignore[misc]
        (group,) = room.sample_and_score(policy, EXAMPLES[:1], replace(SAMPLING, n=2)).groups
        assert [score.value for score in group.scores_G] == pytest.approx([value, value])
        assert {score.outcome for score in group.scores_G} == {"right" if word == "better" else "wrong"}
    items = room.reward.seen  # type: ignore[attr-defined]
    assert {(item.reference, item.prompt) for item in items} == {("0", "q0")}


def test_a_question_is_put_to_the_student_alone_once(encoder: PromptEncoder) -> None:
    room = scorer_for(encoder)
    student = room.student.engine
    assert isinstance(student, Frozen)
    for examples in (EXAMPLES[:2], EXAMPLES[1:3], [EXAMPLES[2], EXAMPLES[0], EXAMPLES[2]]):
        room.sample_and_score(teacher(), examples, SAMPLING)
    asked = [text for batch in student.asked for text in batch]
    for number in range(3):
        assert asked.count(f"alone:q{number}") == asked.count(f"probe:q{number}") == 1
    answered = [item.response for item in room.reward.seen]  # type: ignore[attr-defined]
    assert len(answered) == 3 + 3 * (2 + 2 + 3)


def test_another_way_of_sampling_is_another_baseline(encoder: PromptEncoder) -> None:
    room = scorer_for(encoder)
    room.student.baseline(EXAMPLES[:1], SAMPLING)
    room.student.baseline(EXAMPLES[:1], replace(SAMPLING, seed=99, n=8))
    assert len(room.student.cache) == 1
    room.student.baseline(EXAMPLES[:1], replace(SAMPLING, temperature=0.1))
    assert len(room.student.cache) == 2


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 5))
def test_the_cache_changes_nothing(numbers: list[int], before: int) -> None:
    """Whatever was asked before, in whatever company, a question has the same answer alone and the same probe."""
    encoder = CHARACTERS
    fresh, used = scorer_for(encoder), scorer_for(encoder)
    used.student.baseline([Example(f"q{number}", "") for number in range(before)], replace(SAMPLING, seed=123))
    asked = [Example(f"q{number}", "") for number in numbers]
    one_by_one = [scorer_for(encoder).student.baseline([example], SAMPLING)[0] for example in asked]
    assert fresh.student.baseline(asked, SAMPLING) == used.student.baseline(asked, SAMPLING) == one_by_one


class _Characters(PromptEncoder):
    """Needs no tokenizer, so that a property can be tried many times."""

    def __init__(self) -> None:
        self.max_prompt_tokens = 0

    def encode_once(self, example: Example) -> IntArray:
        assert isinstance(example.prompt, str)
        return np.array([ord(character) for character in example.prompt], np.int64)


CHARACTERS = _Characters()


def test_what_was_asked_long_ago_is_forgotten(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_module, "MAX_CACHED", 2)
    room = scorer_for(encoder)
    first = room.student.baseline(EXAMPLES[:2], SAMPLING)
    room.student.baseline(EXAMPLES[2:], SAMPLING)
    assert len(room.student.cache) == 2
    assert room.student.baseline(EXAMPLES[:2], SAMPLING) == first


def test_a_batch_larger_than_the_memory_is_answered_completely(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student_module, "MAX_CACHED", 1)
    assert len(scorer_for(encoder).student.baseline(EXAMPLES, SAMPLING)) == 4


def test_taught_answers_follow_the_seed_of_the_step(encoder: PromptEncoder) -> None:
    reply: Reply = lambda prompt, rng: f"right {rng.integers(10**6)}"  # noqa: E731
    room, seen = scorer_for(encoder, reply), []
    for seed in (5, 6, 5):
        (group,) = room.sample_and_score(Frozen(lambda *_: "t"), EXAMPLES[:1], replace(SAMPLING, seed=seed, n=1)).groups
        seen.append(group.completions_G[0].transcript[-1]["content"])
    assert seen[0] == seen[2] != seen[1]


def test_metrics_count_students_not_lessons(encoder: PromptEncoder) -> None:
    def reply(prompt: str, rng: np.random.Generator) -> str:
        if prompt.startswith("probe:"):
            return "?"
        if prompt.startswith("alone:"):
            return "right" if prompt.endswith(("q0", "q1")) else "wrong"
        return "right" if "q0" in prompt or "q2" in prompt else "wrong"

    room = scorer_for(encoder, reply)
    rollouts = room.sample_and_score(Frozen(lambda *_: "four"), EXAMPLES, replace(SAMPLING, n=1))
    expected = {
        "student_accuracy": 0.5,
        "baseline_accuracy": 0.5,
        "improvement_rate": 0.25,
        "degradation_rate": 0.25,
        "teaching_length": 4.0,
    }
    assert rollouts.metrics == expected
    assert room.group_metrics(rollouts.groups) == expected
    assert room.reward_metrics() == {"judge_requests": 8}
    assert rollouts.correct_rate == 0.5
    assert set(student_metrics([]).values()) == {0.0}


def test_evaluation_is_of_the_taught_student_and_reports_the_baseline(encoder: PromptEncoder) -> None:
    reply: Reply = lambda prompt, rng: "right" if "taught" in prompt or "q0" in prompt else "wrong"  # noqa: E731
    room = scorer_for(encoder, reply)
    evaluation = Evaluator(room, EXAMPLES, replace(SAMPLING, n=2), every=1, k=2).run(teacher())
    assert evaluation.pass_at_1 == 1.0
    metrics = evaluation.record(3)
    assert (metrics["eval_student_accuracy"], metrics["eval_baseline_accuracy"], metrics["eval_improvement_rate"]) == (
        1,
        0.25,
        0.75,
    )
    student = room.student.engine
    assert isinstance(student, Frozen)
    Evaluator(room, EXAMPLES, replace(SAMPLING, n=2), every=1, k=2).run(teacher("other"))
    assert [batch[0].split(":")[0] for batch in student.asked] == ["alone", "probe", "taught", "taught"]


def test_the_log_shows_who_wrote_what(encoder: PromptEncoder) -> None:
    room = scorer_for(encoder, lambda prompt, rng: prompt.split(":")[0])
    (group,) = room.sample_and_score(Frozen(lambda *_: "lesson"), EXAMPLES[:1], replace(SAMPLING, n=1)).groups
    (row,) = generation_rows(0, group)
    assert (row["prompt"], row["completion"]) == ("q0", "lesson")
    assert list(row["transcript"]) == [
        {"role": "question", "content": "q0"},
        {"role": "student alone", "content": "alone", "score": 0.0},
        {"role": "student probed", "content": "probe"},
        {"role": "teacher", "content": "lesson"},
        {"role": "student taught", "content": "taught", "score": 0.0},
    ]


def test_an_answer_that_cannot_be_scored_keeps_its_teaching_out_of_the_loss(encoder: PromptEncoder) -> None:
    reply: Reply = lambda prompt, rng: "raise" if "taught:" in prompt and "bad" in prompt else "right"  # noqa: E731
    room = scorer_for(encoder, reply)
    policy = Frozen(lambda prompt, rng: "bad" if rng.random() < 0.3 else "good")
    (group,) = room.sample_and_score(policy, EXAMPLES[:1], replace(SAMPLING, n=8)).groups
    failed = [score for score in group.scores_G if not score.counts]
    assert 0 < len(failed) < 8 and "with teaching: cursed" in failed[0].detail
    assert all(isinstance(score, TeachingScore) for score in group.scores_G if score.counts)
    assert "score" not in group.completions_G[[s.counts for s in group.scores_G].index(False)].transcript[1]


def test_a_baseline_that_cannot_be_scored_is_scored_again_later(encoder: PromptEncoder) -> None:
    stream = StringIO()
    room = scorer_for(encoder, lambda prompt, rng: "flaky" if "alone" in prompt else "right", stream=stream)
    reward = room.reward
    assert isinstance(reward, Graded)
    reward._one = lambda answer: Score(0.0, "error", "down") if answer == "flaky" else right()  # type: ignore[method-assign]
    (group,) = room.sample_and_score(teacher(), EXAMPLES[:1], SAMPLING).groups
    assert {score.detail for score in group.scores_G} == {"the student's answer without teaching: down"}
    assert "failed for 1 of 4 answers of the student" in stream.getvalue()
    reward._one = lambda answer: wrong() if answer == "flaky" else right()  # type: ignore[method-assign]
    (group,) = room.sample_and_score(teacher(), EXAMPLES[:1], SAMPLING).groups
    assert all(score.value > 1 for score in group.scores_G)


def test_a_run_stops_when_most_answers_cannot_be_scored(encoder: PromptEncoder) -> None:
    room = scorer_for(encoder, lambda prompt, rng: "raise")
    with pytest.raises(RolloutError, match=r"failed for 4 of 4 answers of the student \(error: cursed\)"):
        room.sample_and_score(teacher(), EXAMPLES[:1], SAMPLING)


def test_empty_teaching_is_scored_like_any_other(encoder: PromptEncoder) -> None:
    room = scorer_for(encoder, lambda prompt, rng: "right")
    (group,) = room.sample_and_score(Frozen(lambda *_: ""), EXAMPLES[:1], SAMPLING).groups
    assert [score.value for score in group.scores_G] == [1.0, 1.0, 1.0]
    assert student_metrics([group])["teaching_length"] == 0.0


def test_prompts_that_outgrow_a_context_are_cut_from_the_left(encoder: PromptEncoder) -> None:
    room = scorer_for(encoder, lambda prompt, rng: "w" * 60, context=70)
    policy = teacher("x" * 30)
    room.sample_and_score(policy, EXAMPLES[:1], SAMPLING)
    student = room.student.engine
    assert isinstance(student, Frozen)
    assert len(policy.asked[0][0]) == 29 and max(len(text) for text in student.asked[-1]) == 29


def check_room(room: TeachingScorer) -> list[str]:
    limits = (room.section.max_probe_tokens, 40)
    return check_context(room.teacher, room.student.reader, room.student.templates, limits, EXAMPLES)


@pytest.mark.parametrize(
    ("context", "who", "seen", "writes"),
    [(45, "the baseline student", 9, 40), (57, "the teacher", 19, 40), (90, "the taught student", 51, 40)],
)
def test_questions_that_leave_no_room_are_rejected(
    encoder: PromptEncoder, context: int, who: str, seen: int, writes: int
) -> None:
    room = scorer_for(encoder, context=context, max_probe_tokens=9)
    with pytest.raises(ConfigError, match=f"{who} reads up to {seen} tokens and writes up to {writes}"):
        check_room(room)


def test_questions_that_fit_or_are_cut_to_fit_are_not_rejected(encoder: PromptEncoder, tmp_path: Path) -> None:
    assert check_room(scorer_for(encoder, context=91, max_probe_tokens=9)) == []
    cuts = check_room(scorer_for(encoder_for(tmp_path, most=10), context=50, max_probe_tokens=9))
    assert [cut.partition(" reads")[0] for cut in cuts] == ["the teacher", "the taught student"]
    assert cuts[0] == "the teacher reads up to 19 tokens, and max_prompt_tokens = 10 keeps only the last ones"


def test_the_students_engine_is_shut_down(encoder: PromptEncoder) -> None:
    room = scorer_for(encoder)
    room.close()
    student = room.student.engine
    assert isinstance(student, Frozen) and student.closed == 1


def test_an_engine_that_returns_too_little_is_rejected(encoder: PromptEncoder) -> None:
    room = scorer_for(encoder)
    room.student.engine.generate = lambda prompts, sampling: []  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match="returned a list of 0 for 1 prompts"):
        room.sample_and_score(teacher(), EXAMPLES[:1], SAMPLING)
