"""The folder of a campaign, and whether the campaign that it holds can be continued."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from retrain.analysis.scoring import edited_inputs, read_inputs
from retrain.campaign.manifest import Manifest
from retrain.campaign.plan import Run
from retrain.campaign.progress import DONE, finished_steps
from retrain.checks.code_digest import code_digests
from retrain.config import TrainConfig, load_config
from retrain.config.options import free_on_resume, options_by_path, paths_where
from retrain.config.schema import Campaign
from retrain.data import held_out_section, is_same_digest
from retrain.errors import CheckpointError, ConfigError
from retrain.modeling.digest import digest_models
from retrain.runtime.text import list_some, plural, shorten_path
from retrain.runtime.version import version
from retrain.storage.aside import CONFIG_FILE
from retrain.storage.checkpoint import Checkpoints, read_state
from retrain.storage.folder import describe_differences, meaningful_differences, with_absolute_paths
from retrain.storage.inputs import (
    digest_file_of_data,
    digest_file_of_held_out,
    find_changed_models,
    find_moved_files,
    find_moved_models,
    latest,
)
from retrain.storage.logs import MANIFEST


def choose_folder(config: TrainConfig) -> Path:
    """The folder to resume, log_dir if it is set, or a new folder named after the date."""
    log_dir = Path(config.logging.log_dir).expanduser().absolute()
    if config.resume.from_:
        resumed = Path(config.resume.from_).expanduser().absolute()
        if not resumed.is_dir():
            raise CheckpointError(f"there is no folder {shorten_path(resumed)} to resume from.")
        if not (resumed / MANIFEST).is_file():
            raise CheckpointError(f"{resumed} has no {MANIFEST}, so there is no campaign to resume.")
        is_default = config.logging.log_dir == options_by_path()["logging.log_dir"].default
        if not is_default and log_dir.resolve() != resumed.resolve():
            raise ConfigError(f"[logging] log_dir = {str(log_dir)!r} is not the campaign to resume, {resumed}.")
        return resumed
    if config.campaign_folder:
        # As for a run: an earlier one is renamed where it is, and the link still leads to its disk.
        return log_dir.resolve() if log_dir.is_symlink() else log_dir
    name = datetime.now().strftime("campaign_%Y%m%d_%H%M%S")
    candidates = (log_dir.parent / f"{name}{suffix}" for suffix in ("", *(f"_{n}" for n in range(2, 1000))))
    return next(path for path in candidates if not path.exists())


def check_earlier(earlier: Manifest, config: TrainConfig, runs: Sequence[Run], is_resumed: bool) -> None:
    """Raise if the campaign in the folder cannot be continued with this configuration."""
    if config.campaign is not None and config.campaign.stop_when:
        _require_planned_tests(earlier, config.campaign, runs)
    _require_its_runs(earlier, runs, is_resumed)
    _require_same_campaign(earlier, runs)
    _require_enough_steps(runs)


def _require_planned_tests(earlier: Manifest, campaign: Campaign, runs: Sequence[Run]) -> None:
    """Raise if a campaign that stops early has other seeds, steps or conditions than its tests were planned for."""
    if not earlier.table.get("stop_when"):
        return
    first, *others = dict.fromkeys(record["condition"] for record in earlier.table["runs"])
    baseline, *tested = dict.fromkeys(run.condition for run in runs)
    if (first, sorted(others)) != (baseline, sorted(tested)):
        raise ConfigError(
            f'[campaign] stop_when = "decided" planned its tests for {list_some(others)} against {first}, and their '
            "error rate holds for these conditions only.  "
            'Try: the same conditions with the same first one, another --log-dir, or stop_when = ""'
        )
    planned = sorted({record["seed"] for record in earlier.table["runs"]})
    seeds, steps = campaign.seeds, earlier.table["config"]["campaign"]["max_steps"]
    if steps != campaign.max_steps:
        raise ConfigError(
            f'[campaign] stop_when = "decided" tests runs of {plural(steps, "step")}; with max_steps = '
            f"{campaign.max_steps} it would test them again, and its error rate holds for one series of tests only.  "
            f"Try: max_steps = {steps}, or another --log-dir"
        )
    if planned != sorted(seeds):
        raise ConfigError(
            f'[campaign] stop_when = "decided" planned its tests for seeds {planned}, and their error rate holds for '
            f'these only; there are {sorted(seeds)}.  Try: seeds = {planned}, another --log-dir, or stop_when = ""'
        )


def _require_its_runs(earlier: Manifest, runs: Sequence[Run], is_resumed: bool) -> None:
    """Raise if a campaign lacks open runs of the one in its folder, whose configuration it would replace.

    Unless it is resumed, it must have all conditions that have trained, too.
    """
    conditions, names = {run.condition for run in runs}, {run.name for run in runs}
    # What has finished or failed may be left out; other runs would never be resumed.
    ended = (*DONE, "failed")
    lacking = [r["name"] for r in earlier.table["runs"] if r["name"] not in names and r["status"] not in ended]
    if not is_resumed:
        trained = {r["condition"] for r in earlier.table["runs"] if _steps_taken(earlier.folder / r["folder"])}
        lacking += [c["name"] for c in earlier.table["conditions"] if c["name"] in trained - conditions]
    if lacking:
        raise ConfigError(
            f"{shorten_path(earlier.folder)} holds another campaign, with runs or conditions that this one lacks: "
            f"{list_some(lacking)}.  "
            "Try: another --log-dir, or add your conditions and seeds to those of that campaign"
        )


def _require_enough_steps(runs: Sequence[Run]) -> None:
    """Raise if runs have taken more steps than they are to have: they would be compared with shorter ones."""
    taken = {run.name: max([*_steps_taken(run.folder), 0]) for run in runs}
    ahead = [run for run in runs if taken[run.name] > run.max_steps]
    if ahead:
        name, most = ahead[0].name, max(taken.values())
        raise ConfigError(
            f"[campaign] max_steps = {ahead[0].max_steps} is less than the {plural(taken[name], 'step')} that {name} "
            f"has taken.  Try: max_steps = {most}, or another --log-dir"
        )


def _steps_taken(folder: Path) -> list[int]:
    """Steps of a run's checkpoints, and of its end if it is finished; empty if there are none."""
    end = finished_steps(folder)
    return [*Checkpoints(folder, 1, print).steps(), *([end] if end >= 0 else [])]


def _require_same_campaign(earlier: Manifest, runs: Sequence[Run]) -> None:
    """Raise unless the version and settings are the same, so that runs stay comparable."""
    if earlier.version != version():
        raise CheckpointError(
            f"{earlier.folder} was run by retrain {earlier.version}, and this is {version()}: their runs may not be "
            "comparable.  Try: that version, a new campaign, or --force-resume"
        )
    digests: dict[str, dict[str, str]] = {}
    """Of each model once; runs share them."""
    problems: dict[str, str] = {}
    for run in runs:
        stored = run.folder / CONFIG_FILE
        # What ended before its first checkpoint is started anew.
        if not stored.is_file() or not _steps_taken(run.folder):
            continue
        trained, wanted = load_config(stored), with_absolute_paths(run.config)
        if {wanted.model.model, wanted.teaching.student_model} - digests.keys() - {""}:
            digests |= digest_models(wanted)
        state = read_state(run.folder)
        moved = find_moved_files(state, trained, wanted) | find_moved_models(state, trained, wanted, digests)
        differences = meaningful_differences(trained, wanted, moved) + find_changed_models(state, digests)
        if trained.eval.every and wanted.eval.every:
            # A single run may be evaluated otherwise; the runs of a campaign are compared.
            otherwise = describe_differences(trained, wanted, paths_where("held_out") & free_on_resume() - moved)
            differences += otherwise
            file = held_out_section(wanted)
            key = f"{file} {wanted.eval.max_examples}"
            if key not in problems:
                problems[key] = digest_file_of_held_out(wanted)
            evaluated = latest(state.get("held_out"))
            if not otherwise and evaluated and problems[key] and not is_same_digest(evaluated, problems[key]):
                differences.append(f"the held-out problems in {file.path} have changed since")
        if differences:
            raise CheckpointError(
                f"{run.folder} was trained with other settings:\n"
                + "\n".join(f"  {line}" for line in differences)
                + "\nTry: restore them, start a new campaign, or --force-resume"
            )


def find_edits(runs: Sequence[Run]) -> list[str]:
    """Warnings about rewards, plugins and data files that were edited since runs of the campaign were trained."""
    edited: dict[str, list[str]] = {}
    data: dict[str, str] = {}
    for run in runs:
        state, section = read_state(run.folder), run.config.data
        # A run that failed at its first step has trained nothing; the edit may be the remedy.
        if not state.get("step"):
            continue
        used = f"{section} {run.config.training.max_examples}"
        if state.get("data") and used not in data:
            data[used] = digest_file_of_data(run.config)
        now = {"code": code_digests(run.config), "data": data.get(used)}
        before = {key: state.get(key) for key in now}
        for name in edited_inputs(read_inputs(before, run.config), read_inputs(now, run.config)):
            edited.setdefault(name, []).append(run.name)
    return [
        f"{name} changed since {list_some(names)} {'was' if len(names) == 1 else 'were'} trained; later runs may not "
        "be comparable with them"
        for name, names in edited.items()
    ]
