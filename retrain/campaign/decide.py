"""Statistics of a campaign: early stopping while it runs, and the final comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from retrain.analysis.comparison import compare_runs, explanation_lines, find_unlike_runs, fit_table
from retrain.analysis.measure import default_metric, measure, require_same_model
from retrain.analysis.runs import RunRecord, find_runs
from retrain.analysis.stats import sequential_test
from retrain.campaign.manifest import Manifest
from retrain.campaign.plan import Run
from retrain.campaign.progress import DONE
from retrain.errors import ConfigError
from retrain.runtime.text import list_some, plural
from retrain.types import JsonObject

ALPHA = 0.05


class EarlyStopping:
    """`stop_when = "decided"`: a sequential test of each condition against the first, after each finished seed.

    Decisions are final; decisions and skipped runs are recorded in the manifest.
    """

    def __init__(self, runs: Sequence[Run], manifest: Manifest) -> None:
        self.conditions = list(dict.fromkeys(run.condition for run in runs))
        # Of all sessions: seeds that the file no longer has were tested, too.
        self.seeds = len({record["seed"] for record in manifest.table["runs"]})
        self.manifest = manifest
        self.table: JsonObject = manifest.table.setdefault(
            "stop_when",
            {"rule": "decided", "alpha": ALPHA, "baseline": self.conditions[0], "decisions": {}, "skipped": []},
        )

    def update(self) -> list[str]:
        """Test every undecided pair; returns a sentence for each new decision."""
        runs = finished_runs(self.manifest)
        values = self._measure(runs)
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
                unlike = find_unlike_runs(runs, self.table["metric"], baseline)
                differs = "differs from" if name in unlike else f"is {word} than"
                records = self.manifest.table["runs"]
                waiting = any(r["condition"] == name and r["status"] == "pending" for r in records)
                sentences.append(
                    f"Decided after {decision.seeds} seeds: {name} {differs} {baseline} "
                    f"(p = {decision.p_value:.2g} ≤ {decision.level:.2g}). "
                    + ("Its remaining seeds are skipped." if waiting else "All its seeds have started.")
                )
        return sentences

    def is_settled(self, condition: str) -> bool:
        """Whether more runs of a condition cannot change any decision."""
        baseline, *others = self.conditions
        decided = self.table["decisions"]
        return all(name in decided for name in others) if condition == baseline else condition in decided

    def _measure(self, runs: Sequence[RunRecord]) -> Mapping[str, Mapping[int, float]]:
        if not runs:
            return {}
        # The same metric at every look: the choice must not depend on the results.
        metric = self.table.setdefault("metric", default_metric(runs))
        try:
            return measure(runs, metric).values
        except ConfigError:
            return {}  # no step to compare at yet; `summarize` says why


def finished_runs(manifest: Manifest) -> list[RunRecord]:
    """The runs of a campaign that finished."""
    finished = {r["folder"].rpartition("/")[2] for r in manifest.table["runs"] if r["status"] == "finished"}
    return [run for run in find_runs([manifest.folder]) if run.path.name in finished] if finished else []


def summarize(manifest: Manifest, width: int | None = None) -> list[str]:
    """The comparison of all conditions with the first as lines of at most `width`, or why there is none."""
    runs = finished_runs(manifest)
    names = list(dict.fromkeys(run.condition for run in runs))
    if len(names) < 2:
        return []
    try:
        require_same_model(runs)
        report = compare_runs(runs)
    except ConfigError as error:
        return [f"No comparison: {error}"]
    rows = fit_table(report, width)
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(f"{cell:<{size}}" for cell, size in zip(row, sizes, strict=True)).rstrip() for row in rows]
    unfinished = [r["name"] for r in manifest.table["runs"] if r["status"] not in DONE]
    left_out = [f"Not finished, and left out: {list_some(unfinished)}."] if unfinished else []
    return [f"\n{report.metric} at step {report.step}, paired by seed:", *table, *explanation_lines(report), *left_out]


def stopped_early(table: JsonObject) -> list[str]:
    """Sentences on the use of early stopping and the runs it skipped."""
    stopping = table.get("stop_when")
    if not stopping:
        return []
    # A run that was skipped may have been run by a later session.
    statuses = {record["name"]: record["status"] for record in table["runs"]}
    skipped = [name for name in stopping["skipped"] if statuses.get(name) == "skipped"]
    what = f"skipped {plural(len(skipped), 'run')}: {', '.join(skipped)}" if skipped else "no run was skipped"
    return [
        f'stop_when = "decided" was used: a sequential test of {stopping.get("metric", "-")} at '
        f"α = {stopping['alpha']:g}; {what}."
    ]
