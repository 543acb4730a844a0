"""Runs loaded from their folders: configuration, metrics and evaluations, grouped into conditions.

A folder is a run, a campaign (manifest.json), or contains runs. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from retrain.analysis.change import Row
from retrain.analysis.scoring import Inputs, named_inputs, read_inputs
from retrain.config import TrainConfig
from retrain.config.load import load_recorded, parse_recorded
from retrain.config.options import free_on_resume, options_by_path, paths_where, replace_values, values_of
from retrain.config.toml import format_value, show_value
from retrain.config.unused import why_unused
from retrain.errors import ConfigError
from retrain.runtime.text import list_some
from retrain.storage.aside import CONFIG_FILE
from retrain.storage.checkpoint import read_settings, read_state
from retrain.storage.folder import SEARCH_DEPTH, describe_differences, subfolders
from retrain.storage.logs import EVALS, MANIFEST, METRICS, only_evaluations, only_steps, parse_rows
from retrain.types import JsonObject

_IN_LABELS = {"algorithm.advantage_mode", "algorithm.transform_mode", "algorithm.algorithm_mode"}
_LONGEST_VALUE = 40


@dataclass(frozen=True)
class RunRecord:
    """One run, loaded from its folder. Rows are by step; of a step that was written twice, the last one counts."""

    path: Path
    condition: str
    seed: int
    config: TrainConfig
    metrics: Mapping[int, Row]
    evaluations: Mapping[int, Row]
    status: str = ""
    torn: int = 0
    """Number of lines that could not be read."""
    inputs: Inputs = field(default_factory=dict)
    steps: int = 0
    """Number of steps taken."""
    attempts: tuple[str, ...] = ()
    """Folders of other attempts at this run, which are left out."""
    edits: tuple[str, ...] = ()
    """Options that differ in config.toml; `config` is what the run was trained with."""

    @property
    def is_evaluated(self) -> bool:
        """Whether there is an evaluation with a rate."""
        return any(row.get("eval_pass_at_1") is not None for row in self.evaluations.values())

    def rows(self, metric: str) -> Mapping[int, Row]:
        """The rows that contain a metric: evaluations or training steps."""
        return self.evaluations if metric.startswith("eval_") else self.metrics


def find_runs(
    paths: Sequence[str | Path], tell_apart: bool = False, read: Callable[[Path], RunRecord] | None = None
) -> list[RunRecord]:
    """All runs in these folders, each with its condition; raises if a run is named twice.

    Two runs with the same condition and seed are an error too, or, with `tell_apart`, named after their folders; but
    attempts that were repeated are left out. `read` loads one run, by default `read_run`.
    """
    runs = label_runs([run for path in paths for run in _find(Path(path).expanduser(), read or read_run)])
    # A page shows a run that is about to begin, and each of several that it was asked for.
    active = {run.path for run in runs if tell_apart and run.status == "running"}
    kept = _leave_out_attempts(runs, active)
    named = {Path(path).expanduser() for path in paths}
    is_asked = len(kept) == 1 and (not tell_apart or {run.path for run in runs} <= named)
    runs = runs if is_asked else kept
    folders = Counter(run.path.resolve() for run in runs)
    twice = [str(folder) for folder, count in folders.items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice.")
    if tell_apart:
        repeated = Counter((run.condition, run.seed) for run in runs)
        return [
            replace(run, condition=f"{run.condition} in {run.path}") if repeated[run.condition, run.seed] > 1 else run
            for run in runs
        ]
    pairs: dict[tuple[str, int], RunRecord] = {}
    for run in runs:
        other = pairs.setdefault((run.condition, run.seed), run)
        if other is not run:
            raise ConfigError(
                f"{other.path} and {run.path} count as the same run: {run.condition} with seed {run.seed}"
                f"{_describe_differences(other.config, run.config)}.  "
                f"Try: leave one out, or compare the two line by line: retrain diff {other.path} {run.path}"
            )
    return runs


def _leave_out_attempts(runs: Sequence[RunRecord], shown: Set[Path]) -> list[RunRecord]:
    """The runs without other attempts at them, except these; each run names those that were left out."""
    same: dict[tuple[str, int], list[RunRecord]] = {}
    for run in runs:
        same.setdefault((run.condition, run.seed), []).append(run)
    attempts: dict[Path, list[str]] = {}
    left_out = set()
    for run in runs:
        others = same[run.condition, run.seed] if run.path not in shown else ()
        if kept := next((other for other in others if _is_attempt(run, other)), None):
            attempts.setdefault(kept.path, []).append(run.path.name)
            left_out.add(run.path)
    return [replace(run, attempts=tuple(attempts.get(run.path, ()))) for run in runs if run.path not in left_out]


def _is_attempt(run: RunRecord, other: RunRecord) -> bool:
    """Whether a run is only an attempt at another: it has no step, or was renamed when the other took its folder."""
    is_numbered = re.fullmatch(rf"{re.escape(other.path.name)}\.\d+", run.path.name) is not None
    # Its configuration still has the name that it was started with.
    is_renamed = is_numbered and Path(run.config.logging.log_dir).name == other.path.name
    return other.steps > 0 and (not run.steps or (is_renamed and run.path.parent == other.path.parent))


def describe_records(runs: Sequence[RunRecord]) -> list[str]:
    """Sentences on attempts that were left out, and on configurations that were edited."""
    attempts = (
        f"Left out as another attempt at {run.path.name}: {list_some(run.attempts)}." for run in runs if run.attempts
    )
    return [*attempts, *(line for run in runs for line in describe_edits(run.path, run.edits))]


def describe_edits(path: Path, edits: Sequence[str]) -> Iterator[str]:
    """A sentence on options that differ in a run's config.toml, if there are any."""
    if edits:
        yield f"{path / CONFIG_FILE} is not what the run was trained with, which is shown here ({list_some(edits)})."


def _describe_differences(one: TrainConfig, other: TrainConfig) -> str:
    """The options that make no condition of their own and differ, except those that name or log a run."""
    found = config_differences(one, other).items()
    named = paths_where("identity")
    shown = [f"{path} ({show_value(a)} and {show_value(b)})" for path, (a, b) in found if path not in named]
    return f". What differs is not part of a condition: {', '.join(shown)}" if shown else ""


def _find(path: Path, read: Callable[[Path], RunRecord]) -> list[RunRecord]:
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}.")
    found = list(_search(path, path, SEARCH_DEPTH, read))
    if not found and not (path / MANIFEST).is_file():
        raise ConfigError(f"{path} is neither a run nor a campaign: it has no {CONFIG_FILE} with {METRICS}.")
    return found


def _search(path: Path, root: Path, depth: int, read: Callable[[Path], RunRecord]) -> Iterator[RunRecord]:
    """The runs in a folder: itself, those of a campaign, or those in subfolders."""
    if (path / MANIFEST).is_file():
        entries = read_manifest(path)["runs"]
        order = {name: at for at, name in enumerate(dict.fromkeys(entry["condition"] for entry in entries))}
        # By condition: the first one is the baseline, also if its first run is missing.
        for entry in sorted(entries, key=lambda entry: order[entry["condition"]]):
            if _is_run(path / entry["folder"]):
                run = read(path / entry["folder"])
                if run.status == "finished" and run.steps < entry.get("max_steps", 0):
                    run = replace(run, status="interrupted")  # the campaign has got more steps
                yield replace(run, condition=entry["condition"], seed=entry["seed"])
    elif _is_run(path):
        yield read(path)
    elif depth:
        for folder in subfolders(path, root):
            yield from _search(folder, root, depth - 1, read)


def _is_run(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and (path / METRICS).is_file()


def read_manifest(path: Path) -> JsonObject:
    """The manifest of a campaign; checks the entries of its runs."""
    try:
        table = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for entry in table["runs"]:
            str(entry["folder"]), str(entry["condition"]), int(entry["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / MANIFEST} is not a valid manifest: {error!r}.") from error
    result: JsonObject = table
    return result


def read_run(path: Path) -> RunRecord:
    """Load one run; incomplete lines are skipped and counted."""
    state = read_state(path)
    config, edits = read_config(path, state)
    metrics, torn = read_rows(path / METRICS)
    evaluations, torn_too = read_rows(path / EVALS, only_evaluations)
    return RunRecord(
        path,
        config.condition,
        config.training.seed,
        config,
        metrics,
        evaluations,
        str(state.get("status", "")),
        torn + torn_too,
        read_inputs(state, config),
        max(metrics, default=-1) + 1,
        edits=edits,
    )


def read_config(path: Path, state: JsonObject) -> tuple[TrainConfig, tuple[str, ...]]:
    """The configuration that a run was trained with, and what differs in its config.toml, which can be edited."""
    config = load_recorded(path / CONFIG_FILE)
    text = read_settings(path, state) if state.get("status") == "finished" else ""
    try:
        trained = parse_recorded(text, "the checkpoint") if text else config
    except ConfigError:
        return config, ()  # of another version
    if trained == config:
        return config, ()
    # Since then, files may have moved, and the run may have been evaluated again.
    evaluation = {path for path in options_by_path() if path.startswith("eval.")}
    later = paths_where("path") | (paths_where("identity") & free_on_resume()) | evaluation
    edits = describe_differences(trained, config, options_by_path().keys() - later)
    if not edits:
        return config, ()
    now, known = values_of(config), values_of(trained).keys()
    return replace_values(trained, {path: now[path] for path in later & now.keys() & known}), tuple(edits)


def read_rows(
    path: Path, choose: Callable[[Iterable[JsonObject]], Iterable[JsonObject]] = only_steps
) -> tuple[dict[int, Row], int]:
    """The chosen rows of a JSONL file by step, and the number of other lines."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}, 0
    lines = [line for line in text.split("\n") if line.strip()]
    valid = list(choose(parse_rows(lines)))
    rows = {int(row["step"]): row for row in valid}
    return dict(sorted(rows.items())), len(lines) - len(valid)


def label_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Add options to the labels of conditions that have the same label and differ in them."""
    settings = _methods(runs)
    names = _label_names(settings)
    ways = {path: _choose_way(path, [options[path] for options in settings]) for path in names}
    labelled = []
    for run, options in zip(runs, settings, strict=True):
        others = [values for other, values in zip(runs, settings, strict=True) if other.condition == run.condition]
        differing = [path for path in options if any(values.get(path) != options[path] for values in others)]
        extra = "".join(f",{names[path]}={ways[path](options[path])}" for path in differing)
        labelled.append(replace(run, condition=run.condition + extra))
    return labelled


def find_unlabelled(runs: Sequence[RunRecord], baseline: str) -> list[str]:
    """Sentences on options in which a condition differs from the baseline, and that no label shows."""
    settings = _methods(runs)
    names = _label_names(settings)
    methods = {run.condition: method for run, method in zip(runs, settings, strict=True)}
    first, found = methods.get(baseline, {}), []
    for label, method in methods.items():
        shown = {path for path, name in names.items() if _shows(label, path, name) and _shows(baseline, path, name)}
        differing = [p for p in method if p not in shown | _IN_LABELS and first and method[p] != first.get(p)]
        if differing:
            both = [f"{path} ({', '.join(_tell_apart(path, method[path], first.get(path)))})" for path in differing]
            found.append(f"{label} and {baseline} also differ in {list_some(both)}.")
    return found


def _label_names(settings: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """What labels call the options in which these differ: the key, if only one of them has it."""
    paths = settings[0] if settings else ()
    differing = [path for path in paths if any(options[path] != settings[0][path] for options in settings)]
    keys = Counter(path.split(".")[-1] for path in differing)
    return {path: key if keys[key := path.split(".")[-1]] == 1 else path for path in differing}


def _shows(label: str, path: str, name: str) -> bool:
    return any(re.search(rf"(?<![A-Za-z0-9.]){re.escape(each)}=", label) for each in (path, name))


def _methods(runs: Sequence[RunRecord]) -> list[dict[str, object]]:
    """The options of each run that are part of its method."""
    # Where, how long and how fast a run went is not, nor is its seed.
    excluded = free_on_resume() | paths_where("identity")
    optimizers = [run.config.optimizer for run in runs]
    if any(each.schedule != "constant" or 0 < each.warmup_steps < 1 for each in optimizers):
        # The learning rate of a step depends on the number of steps.
        excluded -= {"training.max_steps", "training.epochs"}
    methods = [{p: v for p, v in values_of(run.config).items() if p not in excluded} for run in runs]
    known = options_by_path()
    for path in {path for method in methods for path in method if method[path] != methods[0][path]}:
        written: list[object] = []
        for run, method in zip(runs, methods, strict=True):
            # Without effect, its value is not part of the method.
            value = known[path].default if why_unused(known[path], run.config) else method[path]
            # Equal tables may have another order.
            if value not in written:
                written.append(value)
            method[path] = written[written.index(value)]
    # The same file or model in another place is the same.
    first: dict[tuple[str, str], object] = {}
    for run, method in zip(runs, methods, strict=True):
        for path, digest in named_inputs(run.inputs, run.config).items():
            method[path] = first.setdefault((path, digest), method[path])
    return methods


def _tell_apart(path: str, *values: object) -> list[str]:
    return [*map(_choose_way(path, values), values)]


def _choose_way(path: str, values: Sequence[object]) -> Callable[[object], str]:
    """How to write these values of an option: as short as they stay different, since tables would become too wide."""
    ways: list[Callable[[object], str]] = [partial(_shorten, length=_LONGEST_VALUE), _shorten]
    if path in paths_where("path"):
        most = max((value.count("/") for value in values if isinstance(value, str)), default=0)
        ways = [partial(_shorten, parts=parts) for parts in range(1, most + 1)] + ways[1:]
    different = {format_value(value) for value in values}
    return next((way for way in ways if len(set(map(way, values))) == len(different)), format_value)


def _shorten(value: object, length: int | None = None, parts: int = 0) -> str:
    """A value on one line: the beginning of a text, or the last parts of a path; by default all of it."""
    text = value if isinstance(value, str) else format_value(value)
    text = "/".join(text.rstrip("/").split("/")[-parts:]) if parts else text
    text = text if text.isprintable() else json.dumps(text)[1:-1]
    return text if length is None or len(text) <= length else f"{text[: length - 1]}…"


def config_differences(one: TrainConfig, other: TrainConfig) -> dict[str, tuple[object, object]]:
    """Options that differ, by `section.key`."""
    before, after = values_of(one), values_of(other)
    paths = sorted(before.keys() | after.keys())
    return {p: (before.get(p), after.get(p)) for p in paths if before.get(p) != after.get(p)}
