"""The report's curves as PNG files, for papers and slides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrain.errors import ConfigError, MissingExtraError
from retrain.runtime.packages import install_command
from retrain.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {
    "correct_rate": "Correct rate of the training batch",
    "mean_reward": "Mean reward",
    "loss": "Loss",
    "exec_entropy_mean": "{uncertainty} of execution tokens",
    "plan_entropy_mean": "{uncertainty} of planning tokens",
    "sepa_lambda": "SEPA λ",
    "tokens_per_s": "Sampled tokens per second",
}

EVALUATION, VERDICT = "eval_pass_at_1", "verdict"
SOFTWARE = {"Software": "retrain"}
"""Written into each file, by which it is recognized later."""

HEIGHT = 3.6
"""Height of a plot without its legend, in inches."""
LEGEND_ENTRIES = 8
LABEL_CHARACTERS = 76


def write_plots(data: JsonObject, folder: Path, otherwise: str = "", replace: bool = False) -> list[Path]:
    """Write one file per curve with values; returns the files. `otherwise` says what to do without matplotlib.

    Files that were not drawn here are kept, and an error, unless `replace` says that the folder is known.
    """
    try:
        import matplotlib  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"plots need matplotlib.  Try: {install_command('matplotlib')}{otherwise}") from error
    matplotlib.use("Agg")
    if not replace:
        check_drawn_here([folder / f"{name}.png" for name in (*CURVES, EVALUATION, VERDICT)])
    folder.mkdir(parents=True, exist_ok=True)
    kind = str(data["runs"][0]["uncertainty"]).replace("_", " ").capitalize()
    titles = {key: title.format(uncertainty=kind) for key, title in CURVES.items()}
    written = [path for key, title in titles.items() for path in _plot(data, key, title, folder)]
    return [*written, *_plot_evaluation(data, folder)]


def check_drawn_here(paths: Sequence[Path]) -> None:
    """Raise if there is a file that was not drawn here."""
    mark = "\0".join(*SOFTWARE.items()).encode()
    for path in paths:
        if path.is_file() and mark not in path.read_bytes():
            raise ConfigError(
                f"{path} does not say that retrain drew it, and stays.  Try: another folder, or delete it"
            )


def write_verdict_plot(data: JsonObject, folder: Path) -> list[Path]:
    """Every condition against the baseline: a dot per seed, mean difference and interval, and the noise floor."""
    verdict = data["verdict"]
    if verdict["kind"] != "comparison":
        return []
    from matplotlib import pyplot  # noqa: PLC0415  (an extra)

    rows = verdict["rows"]
    figure, axes = pyplot.subplots(figsize=(6, 1.4 + 0.5 * len(rows)), layout="constrained")
    if verdict["noise"]:
        axes.axvspan(-verdict["noise"], verdict["noise"], color="0.93", label="noise floor: two runs of one condition")
    axes.axvline(0, color="0.6", linewidth=0.8)
    for at, row in enumerate(rows):
        color = f"C{at + 1}"
        if row["interval"]:
            axes.plot(row["interval"], [at, at], color=color, linewidth=2)
        axes.plot(row["difference"], at, "D", color=color)
        axes.plot([pair["difference"] for pair in row["pairs"]], [at - 0.22] * len(row["pairs"]), ".", color=color)
    axes.set_yticks(range(len(rows)), [legend_labels([row["condition"]])[0] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(title=f"Difference from {verdict['baseline']}", xlabel=f"{verdict['name']}, step {verdict['step']}")
    if verdict["noise"]:
        figure.legend(loc="outside lower left", fontsize="small", frameon=False)
    path = folder / f"{VERDICT}.png"
    figure.savefig(path, dpi=150, metadata=SOFTWARE)
    pyplot.close(figure)
    return [path]


def _plot(data: JsonObject, key: str, title: str, folder: Path) -> Iterator[Path]:
    from matplotlib import pyplot  # noqa: PLC0415  (an extra)

    figure, axes = pyplot.subplots(figsize=(6, HEIGHT), layout="constrained")
    for condition in dict.fromkeys(run["condition"] for run in data["runs"]):
        steps, low, mean, high = band([run for run in data["runs"] if run["condition"] == condition], key)
        # A condition without SEPA logs a λ of 0.
        if len(steps) and (key != "sepa_lambda" or high.any()):
            (line,) = axes.plot(steps, mean, label=condition)
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    if axes.lines:
        yield _save(figure, axes, title, folder / f"{key}.png")
    pyplot.close(figure)


def _plot_evaluation(data: JsonObject, folder: Path) -> Iterator[Path]:
    from matplotlib import pyplot  # noqa: PLC0415  (an extra)

    runs = [run for run in data["runs"] if run["evals"]]
    if not runs:
        return
    figure, axes = pyplot.subplots(figsize=(6, HEIGHT), layout="constrained")
    names = list(dict.fromkeys(run["condition"] for run in runs))
    named: set[str] = set()
    for run in runs:
        steps, means = [point["x"] for point in run["evals"]], [point["y"] for point in run["evals"]]
        reach = [[p["y"] - p["low"] for p in run["evals"]], [p["high"] - p["y"] for p in run["evals"]]]
        color = f"C{names.index(run['condition'])}"
        # Runs of one condition look alike, so that it is named once.
        label = None if run["condition"] in named else run["condition"]
        named.add(run["condition"])
        axes.errorbar(steps, means, yerr=reach, capsize=2, color=color, alpha=0.8, label=label)
    yield _save(figure, axes, "Held-out pass@1, 95% intervals", folder / f"{EVALUATION}.png")
    pyplot.close(figure)


def _save(figure: Figure, axes: Axes, title: str, path: Path) -> Path:
    """Save a plot with its legend below, where it covers no curve however many and long its entries are."""
    from matplotlib.lines import Line2D  # noqa: PLC0415  (an extra)

    axes.set(title=title, xlabel="step")
    handles, labels = axes.get_legend_handles_labels()
    shown = legend_labels(labels)
    # The entry that counts the others has no line.
    handles = [*handles[:LEGEND_ENTRIES], Line2D([], [], linestyle="none")][: len(shown)]
    figure.legend(handles, shown, loc="outside lower left", fontsize="small", frameon=False)
    figure.set_figheight(HEIGHT + 0.2 * len(shown))
    figure.savefig(path, dpi=150, metadata=SOFTWARE)
    return path


def legend_labels(labels: Sequence[str]) -> list[str]:
    """The entries of a legend that fits below a plot: the first ones, without the middle of a long one."""
    half = LABEL_CHARACTERS // 2
    short = [each if len(each) <= LABEL_CHARACTERS else f"{each[:half]}…{each[-half:]}" for each in labels]
    more = [f"… {len(labels) - LEGEND_ENTRIES} more"] if len(labels) > LEGEND_ENTRIES else []
    # Two dollar signs would begin and end a formula.
    return [each.replace("$", r"\$") for each in short[:LEGEND_ENTRIES]] + more


def band(runs: list[JsonObject], key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and the lowest, mean and highest value over runs at each step."""
    at: dict[int, list[float]] = {}
    for run in runs:
        for step, value in zip(run["steps"], run["series"].get(key, ()), strict=False):
            if value is not None:
                at.setdefault(step, []).append(value)
    steps = sorted(at)
    columns = [[fold(at[step]) for step in steps] for fold in (min, lambda v: sum(v) / len(v), max)]
    return np.array(steps), *(np.array(column) for column in columns)  # type: ignore[return-value]
