from retrain.rewards import RewardPool, RewardSpec, TermSpec
from retrain.rewards.cache import ScoreCache
from retrain.rewards.wire import Item
from retrain.types import Score


class Judge:
    """Says right to "1", and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Item] = []

    def __call__(self, items):
        self.asked += items
        return [_verdict(item) for item in items]


def _verdict(item):
    if "hang" in item.response:
        return Score(0.0, "timeout")
    return Score(1.0, "right") if r"\boxed{1}" in item.response else Score(0.0, "wrong")


def test_equal_answers_to_one_reference_are_judged_once_within_a_batch_and_across_batches():
    repeats, judge = ScoreCache(think_boxes=True), Judge()
    items = [Item(rf"{words} \boxed{{{n}}}", "1") for words in ("so", "thus", "hence") for n in (1, 2)]
    assert [score.outcome for score in repeats.score(items, judge)] == ["right", "wrong"] * 3
    assert len(judge.asked) == 2
    assert [score.outcome for score in repeats.score(items[::-1], judge)] == ["wrong", "right"] * 3
    assert len(judge.asked) == 2
    repeats.score([Item(r"\boxed{1}", "another reference")], judge)
    assert len(judge.asked) == 3
    assert repeats.reused == 10


def test_a_response_without_a_box_is_wrong_and_costs_nothing():
    judge = Judge()
    assert [score.outcome for score in ScoreCache(True).score([Item("no box", "1"), Item("", "1")], judge)] == 2 * [
        "wrong"
    ]
    assert judge.asked == []


def test_a_box_in_the_thoughts_is_another_answer_when_they_do_not_count():
    thought = Item(r"<think>\boxed{1}</think> one", "1")
    assert ScoreCache(think_boxes=True).score([thought], Judge())[0].outcome == "right"
    assert ScoreCache(think_boxes=False).score([thought], Judge())[0].outcome == "wrong"


def test_what_ended_in_a_timeout_is_tried_again_in_the_next_batch_but_not_in_this_one():
    repeats, judge = ScoreCache(True), Judge()
    items = [Item(r"hang \boxed{3}", "1")] * 4
    for asked in (1, 2):
        assert {score.outcome for score in repeats.score(items, judge)} == {"timeout"}
        assert len(judge.asked) == asked


def test_no_more_than_so_many_are_kept_and_the_latest_stay():
    repeats, judge = ScoreCache(True, most=2), Judge()
    for n in (1, 2, 1, 3):
        repeats.score([Item(rf"\boxed{{{n}}}", "1")], judge)
    repeats.score([Item(r"\boxed{1}", "1")], judge)
    assert len(judge.asked) == 3
    repeats.score([Item(r"\boxed{2}", "1")], judge)
    assert len(judge.asked) == 4


def test_only_rewards_that_look_at_the_box_alone_are_remembered():
    assert ScoreCache.of(RewardSpec((TermSpec("math"),))) is not None
    assert ScoreCache.of(RewardSpec((TermSpec("custom", custom_module="mine"),))) is None
    assert ScoreCache.of(RewardSpec((TermSpec("math"),), weighted=True)) is None


def test_a_pool_gives_equal_answers_one_verdict():
    items = [(r"so \boxed{0.5}", r"\frac{1}{2}"), (r"thus \boxed{0.5}", r"\frac{1}{2}"), ("none", "7")]
    with RewardPool(RewardSpec((TermSpec("math"),)), workers=1) as pool:
        for _ in range(2):
            assert [score.outcome for score in pool.score(items)] == ["right", "right", "wrong"]
        assert pool.metrics() == {}


def test_the_option_reaches_the_worker():
    item = (r"<think>\boxed{5}</think> five", "5")
    for counts, outcome in ((True, "right"), (False, "wrong")):
        for weighted in (True, False):
            spec = RewardSpec((TermSpec("match", think_boxes=counts),), weighted=weighted)
            with RewardPool(spec, workers=1) as pool:
                assert pool.score([item])[0].outcome == outcome
