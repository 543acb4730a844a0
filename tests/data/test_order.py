from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.schema import Data, Training
from retrain.data import (
    Endless,
    ExampleOrder,
    Lazy,
    count_examples,
    count_shared,
    load_examples,
    sample_held_out,
)
from retrain.data.arithmetic import is_held_out
from retrain.errors import CheckpointError
from retrain.types import Example


def examples(count: int) -> list[Example]:
    return [Example(f"question {number}", str(number)) for number in range(count)]


def endless() -> Endless:
    return Endless(lambda rng: Example(f"{rng.randrange(10**9)}", ""))


@given(st.integers(1, 30), st.integers(0, 2**40), st.lists(st.integers(0, 20), max_size=8), st.integers(0, 200))
def test_the_position_alone_determines_what_comes_next(size, seed, counts, ahead):
    order = ExampleOrder(examples(size), seed)
    for count in counts:
        order.take(count)
    assert order.position == sum(counts)
    resumed = ExampleOrder(examples(size), seed)
    resumed.load_state_dict(order.state_dict())
    assert resumed.take(ahead) == order.take(ahead)


@given(st.integers(1, 30), st.integers(0, 2**40), st.integers(1, 4))
def test_every_epoch_holds_every_example_once(size, seed, epochs):
    taken = ExampleOrder(examples(size), seed).take(size * epochs)
    for epoch in range(epochs):
        assert Counter(example.reference for example in taken[epoch * size : (epoch + 1) * size]) == Counter(
            map(str, range(size))
        )


@given(st.integers(0, 1000), st.lists(st.integers(1, 7), min_size=1, max_size=10))
def test_it_does_not_matter_in_what_portions_examples_are_taken(seed, counts):
    whole = ExampleOrder(examples(5), seed).take(sum(counts))
    order = ExampleOrder(examples(5), seed)
    assert [example for count in counts for example in order.take(count)] == whole


def test_epochs_and_seeds_differ():
    order = ExampleOrder(examples(50), 1)
    first, second = order.take(50), order.take(50)
    assert first != second
    assert ExampleOrder(examples(50), 2).take(50) != first


def test_the_order_is_the_same_on_every_machine():
    taken = ExampleOrder(examples(8), 42).take(10)
    assert [int(example.reference) for example in taken] == [6, 3, 0, 5, 4, 7, 1, 2, 7, 4]


@given(st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 20))
def test_an_endless_source_is_taken_by_number(seed, position, count):
    order = ExampleOrder(endless(), seed)
    order.take(position)
    drawn = endless().reseed(seed)
    assert order.take(count) == [drawn[number] for number in range(position, position + count)]
    assert order.position == position + count


def test_an_endless_source_gives_other_examples_for_another_seed_and_has_no_last_one():
    assert endless()[:5] == endless()[0:5] != endless().reseed(1)[:5]
    with pytest.raises(IndexError):
        endless()[-1]


@pytest.mark.parametrize("source", [examples(20), endless()])
def test_max_examples_keeps_the_first_rows(source):
    order = ExampleOrder(source, 0, max_examples=3)
    assert {example.prompt for example in order.take(9)} == {example.prompt for example in source[:3]}
    assert ExampleOrder(examples(2), 0, max_examples=5).state_dict()["examples"] == 2


def test_a_bounded_endless_source_is_shuffled_like_the_list_of_its_examples():
    as_list = ExampleOrder(endless().reseed(7)[:20], 7)
    assert ExampleOrder(endless(), 7, max_examples=20).take(60) == as_list.take(60)


def test_a_huge_bound_on_an_endless_source_costs_nothing_and_still_has_epochs():
    drawn = []

    def draw(rng):
        drawn.append(rng)
        return Example(f"{rng.randrange(10**9)}", "")

    count = 100_000_000
    order = ExampleOrder(Endless(draw), 5, max_examples=count)
    assert drawn == []
    first = order.take(3)
    assert first == endless().reseed(5)[:3]
    order.load_state_dict({"position": count - 1, "examples": count})
    assert order.take(4)[1:] == first
    assert len(drawn) == 7


def test_a_checkpoint_of_other_data_is_rejected():
    with pytest.raises(CheckpointError, match="made with 4 examples, the data now has 5"):
        ExampleOrder(examples(5), 0).load_state_dict(ExampleOrder(examples(4), 0).state_dict())


def test_nothing_cannot_be_put_into_an_order():
    with pytest.raises(ValueError, match="no examples"):
        ExampleOrder([], 0)


@given(st.integers(0, 2**32))
def test_arithmetic_never_trains_on_a_held_out_problem(seed):
    train, test = (load_examples(Data(source="arithmetic", split=split)) for split in ("train", "test"))
    assert not any(is_held_out(str(example.prompt)) for example in ExampleOrder(train, seed).take(5))
    assert all(is_held_out(str(example.prompt)) for example in ExampleOrder(test, seed).take(5))


def test_arithmetic_answers_are_right():
    for example in ExampleOrder(load_examples(Data(source="arithmetic")), 3).take(50):
        assert str(eval(example.prompt.removesuffix("=?"))) == example.reference


def test_a_digest_tells_other_prompts_references_and_orders_apart() -> None:
    chat = Example(({"role": "user", "content": "a"},), "1")
    lists = [[Example("a", "1"), Example("b", "2")], [Example("b", "2"), Example("a", "1")]]
    lists += [[Example("a", "1"), Example("b", "3")], [Example("c", "1"), Example("b", "2")], [chat, Example("b", "2")]]
    assert len({ExampleOrder(each, 0).digest for each in lists}) == len(lists)
    assert ExampleOrder(lists[0], 0).digest == ExampleOrder(list(lists[0]), 7).digest
    assert ExampleOrder(Endless(lambda rng: chat), 0).digest == ""
    assert ExampleOrder(Endless(lambda rng: chat), 0, max_examples=3).digest == ""


def test_a_digest_does_not_fetch_examples_one_by_one() -> None:
    def make(place: int) -> Example:
        raise AssertionError("an environment would have to make every example")

    assert ExampleOrder(Lazy(make, range(10)), 0).digest == ""


def test_held_out_problems_are_a_random_sample_that_is_always_the_same() -> None:
    lines: list[str] = []
    rows = examples(100)
    drawn = sample_held_out(rows, 20, lines.append)
    assert lines == ["Evaluating 20 of 100 held-out problems ([eval] max_examples), the same in every run"]
    assert drawn == sample_held_out(examples(100), 20, lines.append)
    # Of a sorted file, not only the beginning; in the order of the file.
    places = [rows.index(one) for one in drawn]
    assert len(set(places)) == 20
    assert places == sorted(places) and places[:6] == [0, 2, 5, 13, 20, 22] and any(place >= 80 for place in places)
    lazy = Lazy(rows.__getitem__, range(100))
    assert list(sample_held_out(lazy, 20, lines.append)) == drawn
    lines.clear()
    assert sample_held_out(rows, 100, lines.append) is rows
    assert sample_held_out(endless(), 4, lines.append) == endless().reseed(0)[:4] and lines == []


@pytest.mark.parametrize(("epochs", "count"), [(1.1, 110), (0.07, 7), (2, 200), (0.001, 1), (1.105, 111)])
def test_epochs_are_counted_as_decimals(epochs: float, count: int) -> None:
    # As floats, 1.1 * 100 is above 110.
    assert count_examples(Training(epochs=epochs), examples(100)) == count


def test_a_question_is_the_same_as_text_and_as_a_message() -> None:
    texts = [Example("1+1=?", "2"), Example("1+2=?\n", "3")]
    message = Example(({"role": "user", "content": " 1+2=?"},), "3")
    with_system = Example(({"role": "system", "content": "1+1=?"}, {"role": "user", "content": "Go"}), "2")
    assert count_shared(texts, [message]) == count_shared([message], texts) == 1
    assert count_shared(texts, [with_system]) == 0 and count_shared([with_system], [with_system]) == 1
