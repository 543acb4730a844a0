from __future__ import annotations

import pytest

from retrain.report.columns import MAX_POINTS, Columns


def test_a_long_run_is_thinned_to_lowest_mean_and_highest() -> None:
    columns = Columns()
    columns.extend([{"step": step, "loss": float(step % 4)} for step in range(4 * MAX_POINTS)])
    drawn = columns.buckets()
    assert (drawn["size"], len(drawn["steps"])) == (4, MAX_POINTS)
    assert drawn["steps"][:2] == [3, 7]
    assert (drawn["low"]["loss"][0], drawn["series"]["loss"][0], drawn["high"]["loss"][0]) == (0.0, 1.5, 3.0)


def test_borders_of_buckets_do_not_move_as_rows_are_appended() -> None:
    columns = Columns()
    columns.extend([{"step": step, "loss": float(step)} for step in range(1001)])
    before = columns.buckets()
    columns.extend([{"step": step, "loss": float(step)} for step in range(1001, 1006)])
    after, tail = columns.buckets(), columns.buckets(1000)
    assert after["series"]["loss"][:500] == before["series"]["loss"][:500]
    assert tail["from"] == 500 and tail["steps"] == after["steps"][500:] == [1001, 1003, 1005]
    assert tail["series"]["loss"] == after["series"]["loss"][500:]


def test_every_number_is_a_column_and_gaps_are_null() -> None:
    columns = Columns()
    rows = [{"step": 0, "a": 1, "kind": "x", "flag": True}, {"step": 1, "a": None, "env/b": 0.1}]
    columns.extend(rows)
    drawn = columns.buckets()
    assert drawn["series"] == {"a": [1.0, None], "env/b": [None, 0.1]}
    columns.extend([{"step": 2, "kind": "surprisal"}])
    assert columns.texts == {"kind": "surprisal"}


def test_a_step_that_is_written_again_replaces_what_followed() -> None:
    columns = Columns()
    columns.extend([{"step": step, "a": step} for step in range(5)] + [{"step": 3, "a": 9}])
    assert list(columns.steps) == [0, 1, 2, 3]
    assert columns.buckets()["series"]["a"] == [0.0, 1.0, 2.0, 9.0]


def test_tokens_and_hours_add_up() -> None:
    columns = Columns()
    row = {"tokens_per_s": 100.0, "sample_time_s": 2.0, "step_time_s": 1800.0, "train_time_s": 1.0}
    columns.extend([{"step": step} | row for step in range(2)])
    drawn = columns.buckets()
    assert drawn["tokens"] == [200, 400] and drawn["hours"] == [0.5, 1.0]
    assert drawn["series"]["other_time_s"] == [1797.0, 1797.0]


def test_rows_for_the_checks_are_means_over_blocks_except_at_the_ends() -> None:
    columns = Columns()
    columns.extend([{"step": step, "a": step, "rows_excluded": 1} for step in range(1000)])
    rows = columns.rows(("a", "rows_excluded"), most=100, edge=10)
    assert [row["a"] for row in rows[:10]] == list(range(10)) and rows[-1]["a"] == 999
    assert rows[10]["step"] == 10 and rows[10]["a"] == pytest.approx(14.5)
    assert sum(row["rows_excluded"] for row in rows) == 1000


def test_a_range_of_a_long_run_has_all_of_its_steps() -> None:
    columns = Columns()
    columns.extend([{"step": step, "loss": float(step)} for step in range(5000)])
    drawn = columns.window(1000, 1003)
    assert drawn["steps"] == [1000, 1001, 1002, 1003] and drawn["series"]["loss"] == [1000.0, 1001.0, 1002.0, 1003.0]
    assert columns.window(9000, 9001)["steps"] == []


@pytest.mark.parametrize(("rows", "size"), [(0, 1), (1000, 1), (1001, 2), (2000, 2), (2001, 4), (100_000, 128)])
def test_buckets_are_the_smallest_power_of_two_that_fits(rows: int, size: int) -> None:
    columns = Columns()
    columns.extend([{"step": step, "a": 1.0} for step in range(rows)])
    assert columns.bucket_size() == size
    assert len(columns.buckets()["steps"]) == -(-rows // size)
