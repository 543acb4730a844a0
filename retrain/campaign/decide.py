"""What the numbers of a campaign say, while it runs and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from retrain.analysis.comparison import COLUMNS, compare_runs, explanation_lines, table_rows
from retrain.analysis.runs import RunRecord, default_metric, find_runs, measure
from retrain.analysis.stats import FIRST_LOOK, sequential_test
from retrain.campaign.manifest import Manifest
from retrain.campaign.plan import Run
from retrain.errors import ConfigError

ALPHA = 0.05


class EarlyLook:
    """`stop_when = "decided"`: a sequential test of each condition against the first one, after each seed that ends.

    A decision stands for good; what was decided and skipped is in the manifest.
    """

    def __init__(self, runs: Sequence[Run], manifest: Manifest) -> None:
        self.conditions = list(dict.fromkeys(run.condition for run in runs))
        self.seeds = len({run.seed for run in runs})
        self.manifest = manifest
        self.table: dict[str, Any] = manifest.table.setdefault(
            "stop_when", {"rule": "decided", "alpha": ALPHA, "decisions": {}, "skipped": []}
        )

    def look(self) -> list[str]:
        """Test every pair that is open; returns a sentence for each that is decided now."""
        values = self._measure()
        baseline, *others = self.conditions
        sentences = []
        for name in others:
            if name in self.table["decisions"] or baseline not in values or name not in values:
                continue
            shared = [seed for seed in values[baseline] if seed in values[name]]
            differences = [values[name][seed] - values[baseline][seed] for seed in shared]
            decision = sequential_test(differences, self.seeds, ALPHA, len(others))
            if decision.decided:
                self.table["decisions"][name] = asdict(decision)
                word = "better" if decision.better else "worse"
                sentences.append(
                    f"Decided after {decision.seeds} seeds: {name} is {word} than {baseline} "
                    f"(p = {decision.p_value:.2g}, each look at {decision.level:.2g}). Its other seeds are skipped."
                )
        return sentences

    def is_settled(self, condition: str) -> bool:
        """Whether more runs of a condition would change no decision."""
        baseline, *others = self.conditions
        decided = self.table["decisions"]
        return all(name in decided for name in others) if condition == baseline else condition in decided

    def _measure(self) -> Mapping[str, Mapping[int, float]]:
        runs = finished_runs(self.manifest)
        if not runs:
            return {}
        # One metric for all looks: the choice must not depend on the results.
        metric = self.table.setdefault("metric", default_metric(runs))
        return measure(runs, metric).values


def refuse_few_seeds(seeds: int) -> None:
    """The first look needs some seeds, and after it some must be left to skip."""
    if seeds <= FIRST_LOOK:
        raise ConfigError(
            f'[campaign] stop_when = "decided" first looks after {FIRST_LOOK} seeds, and there are {seeds}: nothing '
            'would be left to stop.  Try: more seeds, or stop_when = ""'
        )


def finished_runs(manifest: Manifest) -> list[RunRecord]:
    """The runs of a campaign that ended well."""
    finished = {r["folder"].rpartition("/")[2] for r in manifest.table["runs"] if r["status"] == "finished"}
    return [run for run in find_runs([manifest.folder]) if run.path.name in finished] if finished else []


def summarise(manifest: Manifest) -> list[str]:
    """The comparison of all conditions with the first, as lines; or why there is none."""
    runs = finished_runs(manifest)
    names = list(dict.fromkeys(run.condition for run in runs))
    if len(names) < 2:
        return []
    try:
        data = compare_runs(runs)
    except ConfigError as error:
        return [f"No comparison: {error}"]
    rows = [COLUMNS, *table_rows(data)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"\n{data['metric']} at step {data['step']}, paired by seed:", *table, *explanation_lines(data)]


def stopped_early(table: Mapping[str, Any]) -> list[str]:
    """Sentences that say that a campaign looked at its results while it ran, and what it left out for that."""
    looked = table.get("stop_when")
    if not looked:
        return []
    skipped = looked["skipped"]
    what = f"{len(skipped)} runs were skipped: {', '.join(skipped)}" if skipped else "no run was skipped"
    return [
        f'stop_when = "decided" was used, a sequential test of {looked.get("metric", "-")} at α = {looked["alpha"]:g}; '
        f"{what}."
    ]
