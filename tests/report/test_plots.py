"""Plots and their legends."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.report.plots import LABEL_CHARACTERS, LEGEND_ENTRIES, legend_labels, write_plots, write_verdict_plot


def test_a_legend_has_a_few_short_entries_and_counts_the_others() -> None:
    assert legend_labels(["grpo+none", "maxrl+none,cost=1$"]) == ["grpo+none", r"maxrl+none,cost=1\$"]
    many = legend_labels([f"grpo+none in logs/{'long/' * 20}run_{n}" for n in range(13)])
    assert len(many) == LEGEND_ENTRIES + 1 and many[-1] == "… 5 more"
    assert many[0].startswith("grpo+none in logs/long") and many[0].endswith("long/run_0")
    assert max(map(len, many)) == LABEL_CHARACTERS + 1


def test_runs_without_sepa_have_no_plot_of_its_lambda(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = {"condition": "grpo+none", "uncertainty": "surprisal", "evals": [], "steps": [0, 1]}
    runs = [run | {"series": {"loss": [0.5, 0.4], "sepa_lambda": [0.0, 0.0]}}]
    assert [path.name for path in write_plots({"runs": runs}, tmp_path)] == ["loss.png"]


def test_a_comparison_becomes_a_forest_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {
        "condition": "maxrl+none",
        "difference": 0.1,
        "interval": [0.02, 0.18],
        "pairs": [{"seed": seed, "difference": 0.05 * seed} for seed in (1, 2, 3)],
    }
    verdict = {
        "kind": "comparison",
        "rows": [row] * 12,
        "noise": 0.04,
        "baseline": "grpo+none",
        "name": "pass@1",
        "step": 9,
    }
    assert [path.name for path in write_verdict_plot({"verdict": verdict}, tmp_path)] == ["verdict.png"]
    assert (tmp_path / "verdict.png").read_bytes().startswith(b"\x89PNG")
    assert write_verdict_plot({"verdict": {"kind": "evaluation"}}, tmp_path) == []
