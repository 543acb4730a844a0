"""Tables and sentences on a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.cli import run
from tests.report.folders import write_run

Show = Callable[..., list[str]]


class Terminal(io.StringIO):
    """Standard output of 80 columns."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Runs a command on such a terminal and returns its lines."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")

    def lines(*arguments: str) -> list[str]:
        with contextlib.redirect_stdout(Terminal()) as stream:
            assert run(arguments) == 0
        return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]

    return lines


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"grpo_{seed}", seed, "grpo")
        write_run(tmp_path / f"maxrl_{seed}", seed, "maxrl")
    return tmp_path


def test_a_comparison_fits(campaign: Path, show: Show) -> None:
    lines = show("compare", str(campaign))
    assert max(map(len, lines)) <= 80
    head = next(line for line in lines if "condition" in line)
    assert head.split()[:3] == ["condition", "mean", "difference"] and "verdict" not in head
    assert any(re.match(r" maxrl\+gtpo_sepa +\d", line) for line in lines), "a name in one piece"


def test_a_status_fits_and_leaves_out_empty_columns(
    campaign: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(campaign)
    lines = show("status", ".")
    assert max(map(len, lines)) <= 80
    assert not any("ETA" in line for line in lines)


def test_plugins_do_not_repeat_their_kind(show: Show) -> None:
    lines = show("plugins")
    assert max(map(len, lines)) <= 80
    assert not any("built in" in line for line in lines)
    assert " grpo         retrain.advantages.episode:grpo" in lines


def test_explain_names_a_folder_once(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", "demo.toml", "--template", "demo"]) == 0
    lines = show("explain", "demo.toml")
    assert max(map(len, lines)) <= 80
    assert lines.count("  logs/demo/") == 1 and "    metrics.jsonl" in lines
    assert sum("default" in line for line in lines) == 2
