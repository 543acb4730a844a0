"""The card of a run or campaign: verdict, curves, configuration, versions, tokens and time in Markdown."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from retrain.runtime.text import format_duration, plural
from retrain.types import JsonObject

PACKAGES = ("retrain", "torch", "transformers", "peft", "vllm", "tinker")
SHOWN_PLOTS = ("verdict.png", "eval_pass_at_1.png", "correct_rate.png", "mean_reward.png")
UNKNOWN = "Unknown (not measured, too few steps, or within noise)"
CREATED = "Created by retrain on"
"""What a card says of itself, and is recognized by."""
# What PEFT adds to the template of a card.
_METADATA = r"\A---\n((base_model|library_name|pipeline_tag|tags):.*\n|- (base_model:.*|lora|transformers)\n)*---\n"
_QUANTIZATION = r"The following `bitsandbytes` quantization config was used during training:\n(- [a-z0-9_]+: .*\n)*"
_HEADINGS = re.compile(r"## Training procedure|### Framework versions|- PEFT \S+")


def write_card(data: JsonObject, plots: Sequence[Path] = (), hub: bool = False) -> str:
    """The card in Markdown; `plots` are files beside it, and `hub` adds the metadata of a model card."""
    verdict = data["verdict"]
    parts = [
        *(_metadata(data) if hub else ()),
        f"# {escape(str(data['title']).removeprefix('retrain: '), quote=False)}",
        "",
        f"**{verdict['sentence']}**",
        "",
        f"{data['subtitle']}; {', '.join(data['models'])}. {CREATED} {data['created']}.",
        *_pictures(plots),
        *_runs(data),
        *_health(data),
        *_comparison(verdict),
        *_configuration(data),
        *_versions(data),
    ]
    return "\n".join(parts).rstrip() + "\n"


def is_blank(text: str) -> bool:
    """Whether a README.md is the template that PEFT leaves beside an adapter, with nothing filled in."""
    if "[More Information Needed]" not in text:
        return False
    from huggingface_hub import ModelCard, ModelCardData  # noqa: PLC0415  (takes 0.2 s)

    template = {line.strip() for line in ModelCard.from_template(ModelCardData()).content.splitlines()}
    rest = re.sub(_QUANTIZATION, "", re.sub(_METADATA, "", text))
    return all(line.strip() in template or _HEADINGS.fullmatch(line.strip()) for line in rest.splitlines())


def _metadata(data: JsonObject) -> list[str]:
    names = data["models"]
    models = "".join(f"\n- {name}" for name in names) if len(names) > 1 else f" {''.join(names)}"
    return [
        "---",
        f"base_model:{models}",
        f"library_name: {'peft' if data['is_adapter'] else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, rlvr, retrain]",
        "---",
        "",
    ]


def _pictures(plots: Sequence[Path]) -> list[str]:
    shown = [path for name in SHOWN_PLOTS for path in plots if path.name == name][:2]
    return ["", *(f"![{path.stem.replace('_', ' ')}]({path.name})" for path in shown)] if shown else []


def _runs(data: JsonObject) -> list[str]:
    head = ("run", "condition", "seed", "steps", "held-out before", "held-out after", "sampled tokens", "time")
    rows = []
    for run in data["runs"]:
        evals = [point for point in run["evals"] if point["y"] is not None]
        before = _interval(evals[0]) if len(evals) > 1 or (evals and evals[0]["x"] == 0) else "–"
        if before != "–" and evals[0]["x"]:
            # Earlier ones are not comparable with the last one.
            before += f", step {evals[0]['x']}"
        after = _interval(evals[-1]) if evals and evals[-1]["x"] > 0 else "–"
        total = run["max_steps"] if run["max_steps"] is not None else "?"
        hours, tokens = (run[key][-1] if run[key] else 0.0 for key in ("hours", "tokens"))
        steps = f"{run['done']}/{total}"
        cells = (run["name"], run["condition"], str(run["seed"]), steps, before, after, f"{tokens:,.0f}")
        rows.append((*cells, format_duration(3600 * hours)))
    return ["", "## Runs", "", *_table(head, rows)]


def _interval(point: JsonObject) -> str:
    return f"{100 * point['y']:.1f}% ({100 * point['low']:.1f} to {100 * point['high']:.1f})"


def _health(data: JsonObject) -> list[str]:
    lines = []
    for run in data["runs"]:
        for check in run["health"]:
            if check["level"] in ("warning", "problem"):
                since = f", since step {check['step']}" if check["step"] is not None else ""
                hint = f"`retrain man --topic {check['topic']}`"
                lines.append(f"- {run['name']}: {check['name']}, {check['value']}{since} ({hint})")
    return ["", "## Checks", "", *(lines or _summarize(data))]


def _summarize(data: JsonObject) -> list[str]:
    """The checks that are fine, those that are known in some runs only, and those that are not known in any."""
    levels: dict[str, list[str]] = {}
    for run in data["runs"]:
        for check in run["health"]:
            levels.setdefault(check["name"], []).append(check["level"])
    sides: dict[str, list[str]] = {"Fine": [], "Fine where known": [], UNKNOWN: []}
    for name, found in levels.items():
        known = len(found) - found.count("unknown")
        if known in (0, len(found)):
            sides["Fine" if known else UNKNOWN].append(name)
        else:
            sides["Fine where known"].append(f"{name} ({known} of {plural(len(found), 'run')})")
    return [f"{what}: {', '.join(some)}.  " for what, some in sides.items() if some]


def _comparison(verdict: JsonObject) -> list[str]:
    notes = [f"- {note}" for note in verdict["notes"]]
    if verdict["kind"] != "comparison":
        return ["", *notes] if notes else []
    titles = (f"difference from {verdict['baseline']}", verdict["interval_title"], verdict["p_title"])
    head = ("condition", "seeds", "mean", *titles)
    rows = [(verdict["baseline"], str(verdict["baseline_seeds"]), f"{verdict['baseline_mean']:.4f}", "–", "–", "–")]
    for row in verdict["rows"]:
        low, high = row["interval"] or (None, None)
        reach = f"{low:+.4f} to {high:+.4f}" if low is not None else "–"
        p = "–" if row["p_adjusted"] is None else f"{row['p_adjusted']:.4f}"
        counts = (row["condition"], str(len(row["pairs"])))
        rows.append((*counts, f"{row['mean']:.4f}", f"{row['difference']:+.4f}{row['mark']}", reach, p))
    title = f"## Comparison: {verdict['name']} at step {verdict['step']}"
    return ["", title, "", *_table(head, rows), *(["", *notes] if notes else [])]


def _configuration(data: JsonObject) -> list[str]:
    lines = ["", "## Configuration", "", "Options that differ from the defaults:", ""]
    lines += _table(("option", "value"), [(row["option"], f"`{row['value']}`") for row in data["settings"]])
    if data["configs"]:
        rows = [(row["option"], *(f"`{value}`" for value in row["values"])) for row in data["configs"]]
        lines += ["", "Options that differ between conditions:", "", *_table(("option", *data["config_columns"]), rows)]
    return lines


def _versions(data: JsonObject) -> list[str]:
    if data["origin"]:
        return ["", "## Versions", "", *(f"- {sentence}" for sentence in data["origin"])]
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    here = f"This machine: {', '.join(found)}, {machine}. The run may have used a different machine or other versions."
    return ["", "## Versions", "", here]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return ["None."]
    lines = [
        "| " + " | ".join(escape(cell, quote=False).replace("|", "\\|") for cell in line) + " |"
        for line in (head, *rows)
    ]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]
