"""What a YAML run needs from this machine: its model, data and checkpoint; found out before TRL is imported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrain.checks.keys import WANDB_HINT, has_wandb_key
from retrain.checks.preflight import (
    find_damaged_weights,
    find_missing_model,
    find_missing_tokenizer,
    find_missing_weights,
    is_offline,
    use_cache_if_unreachable,
)
from retrain.config.schema import Data, Reward
from retrain.data import build_source
from retrain.data.hub import FromHub, is_on_hub_only
from retrain.errors import ConfigError, ConfigIssue
from retrain.grpo.settings import FILES, OWN_SETS, RunSettings, advise_split
from retrain.modeling.files import find_model
from retrain.rewards.judge import find_server
from retrain.runtime.text import list_some
from retrain.storage.aside import LOCK_FILE, is_of_run
from retrain.storage.checkpoint import STATE_FILE
from retrain.storage.folder import lock_folder

OUTPUT = "trainer_output"
"""Default of transformers for output_dir."""
EPOCHS = 3.0
"""Default of transformers for num_train_epochs."""
WEIGHTS = ("*model*", "global_step*")
"""Files or folders of weights in a checkpoint: of models and adapters, and of DeepSpeed."""
MODEL_FILES = ("README.md", "config.json", "adapter_config.json", "tokenizer_config.json")
"""Files beside the weights that a run replaces in output_dir."""
# Packages of transformers' trackers, of which one is needed.
_TRACKERS = {
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
    "flyte": ("flytekit",),
    "mlflow": ("mlflow",),
    "neptune": ("neptune",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def choose_checkpoint(output_dir: str, wanted: bool | str | None) -> Path | None:
    """The checkpoint to resume; `True` stands for the last one of the newest run, which may have a lower number than
    those of an earlier run."""
    if not wanted:
        return None
    if isinstance(wanted, str):
        # Without them, transformers finds nothing to load.
        if not any(next(Path(wanted).glob(pattern), None) for pattern in WEIGHTS):
            hint = f"Try: a folder checkpoint-N, or true for the newest in {output_dir}"
            raise ConfigError(f"resume_from_checkpoint = {wanted!r}: there is no checkpoint.  {hint}")
        return _with_state(Path(wanted))
    states = {path: path.parent.name.rpartition("-")[2] for path in Path(output_dir).glob(f"checkpoint-*/{STATE_FILE}")}
    numbered = [path for path, step in states.items() if step.isdigit()]
    if not numbered:
        raise ConfigError(f"resume_from_checkpoint=true, but there is no checkpoint in {output_dir}.")
    newest = max(numbered, key=lambda path: (path.stat().st_mtime_ns, int(states[path])))
    # A copied folder has new times, in any order. What a run has logged begins with what its earlier checkpoints have.
    logged = read_history(newest)
    later = [path for path in numbered if logged and read_history(path)[: len(logged)] == logged]
    return _with_state(max(later or [newest], key=lambda path: int(states[path])).parent)


def _with_state(checkpoint: Path) -> Path:
    """Raise if transformers could not read how far the checkpoint is."""
    try:
        json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{checkpoint / STATE_FILE} cannot be read: {error}.  Try: another checkpoint") from error
    return checkpoint


def read_history(state: Path) -> list[Any]:
    """The rows that a run had logged at a checkpoint, from its state file; empty if that cannot be read."""
    try:
        return list(json.loads(state.read_text(encoding="utf-8"))["log_history"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def steps_if_finished(checkpoint: Path, run: RunSettings, arguments: Mapping[str, Any]) -> int:
    """The steps of a checkpoint after which nothing is left to train, or 0. transformers would take one step more."""
    # For GRPO, the dataset is repeated instead.
    epochs = arguments.get("num_train_epochs", EPOCHS) * (run.artificial_epochs if run.trainer_type == "sft" else 1)
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        step, epoch = int(state["global_step"]), float(state["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    if arguments.get("max_steps", -1) > 0:
        return step if step >= arguments["max_steps"] else 0
    return step if epoch >= epochs else 0


@contextmanager
def locked(output_dir: str) -> Iterator[None]:
    """Keep other runs out of the folder. Of several processes, the first one does so for all."""
    if not is_first_process():
        yield
        return
    folder = Path(output_dir)
    if is_of_run(folder):
        raise ConfigError(f"output_dir = {output_dir!r} holds a run of a TOML file.  Try: another folder")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder, "output_dir")
    except OSError as error:
        raise ConfigError(f"output_dir = {output_dir!r} cannot be written to: {error}.") from error
    try:
        with lock:
            yield
    finally:
        if is_new and [path.name for path in folder.iterdir()] == [LOCK_FILE]:
            # Nothing was trained.
            (folder / LOCK_FILE).unlink()
            folder.rmdir()


def is_first_process() -> bool:
    """Whether this is the only process, or the first of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def check_before_loading(run: RunSettings, arguments: Mapping[str, Any], log: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume, if any. Raise if it is missing, or if the model or the data cannot be had.

    If the Hub cannot be reached, only its cache is used: its libraries would retry for a minute.
    """
    if arguments.get("output_dir") == "":
        raise ConfigError("output_dir is empty.  Try: output_dir=logs/my_run")
    _check_output(Path(arguments.get("output_dir") or OUTPUT), run)
    if arguments.get("temperature", 1.0) <= 0:
        raise ConfigError(
            "temperature must be above 0: completions of one prompt have to differ.  Try: temperature=1.0"
        )
    steps = arguments.get("max_steps", -1)
    if steps == 0 or steps < -1:
        raise ConfigError(f"max_steps must be above 0, or -1 for num_train_epochs, got {steps}.")
    wanted = [name for name in ("eval_strategy", "eval_on_start") if arguments.get(name) not in (None, False, "no")]
    if wanted and not run.val_split:
        is_file = Path(run.dataset_id_or_path).suffix in FILES
        hint = advise_split(run.val_split) if is_file else "val_split=validation"
        raise ConfigError(f"{wanted[0]} needs held-out rows, and there is no val_split.  Try: {hint}")
    if arguments.get("learning_rate", 0.0) < 0:
        raise ConfigError(f"learning_rate must be at least 0, got {arguments['learning_rate']}.")
    _check_trackers(arguments.get("report_to"))
    if "judge" in run.reward_names:
        find_server(Reward(type="judge"))
    checkpoint = choose_checkpoint(arguments.get("output_dir") or OUTPUT, arguments.get("resume_from_checkpoint"))
    issues = tuple(_find_issues(run, arguments))
    from_hub = find_model(run.model_name_or_path).found in ("cache", "download") or bool(_dataset_of_hub(run))
    if not issues and from_hub and use_cache_if_unreachable(log):
        issues = tuple(_find_issues(run, arguments))
    if issues:
        raise ConfigError("this configuration cannot be run here:", issues)
    return checkpoint


def _check_output(folder: Path, run: RunSettings) -> None:
    """Raise if the run would replace its own model, or files that no run wrote."""
    model = find_model(run.model_name_or_path).folder
    if model is not None and model.resolve() == folder.resolve():
        raise ConfigError(
            f"output_dir = {str(folder)!r} is the folder of model_name_or_path, which the run would replace.  "
            "Try: another folder"
        )
    files = [name for name in MODEL_FILES if (folder / name).exists() and not _is_of_trl(folder / name)]
    if files and not (folder / STATE_FILE).exists() and not any(folder.glob("checkpoint-*")):
        raise ConfigError(
            f"output_dir = {str(folder)!r} holds {list_some(files)} and no run: the model that is saved there would "
            "replace it.  Try: another folder"
        )


def _is_of_trl(file: Path) -> bool:
    """Whether this is the card of an interrupted run whose checkpoints were deleted."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.name == "README.md" else ""
    except OSError:
        return False
    return "generated_from_trainer" in text


def _check_trackers(given: str | list[str] | None) -> None:
    names = [given] if isinstance(given, str) else given or []
    for name in names:
        close = get_close_matches(name, _TRACKERS, n=1)
        if close and name not in _TRACKERS:
            raise ConfigError(f"report_to = {name!r} is no tracker.  Did you mean {close[0]}?")
        packages = _TRACKERS.get(name, ())
        if packages and not any(map(find_spec, packages)):
            raise ConfigError(
                f"report_to = {name!r} needs the package {packages[0]}, which is not installed.  "
                f"Try: pip install {packages[0]}, or report_to=none"
            )
    # `all` is every tracker that is installed.
    if ("wandb" in names or ("all" in names and find_spec("wandb"))) and not has_wandb_key():
        raise ConfigError(f"report_to = {given!r} needs a key of wandb, and there is none.  {WANDB_HINT}")


def _find_issues(run: RunSettings, arguments: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    # The arguments may name other files.
    finders = () if arguments.get("model_init_kwargs") else (find_missing_weights,)
    for find in (find_missing_model, *finders, find_damaged_weights):
        yield from find("model_name_or_path", run.model_name_or_path)
    if not run.tokenizer_kwargs:
        yield from find_missing_tokenizer("model_name_or_path", run.model_name_or_path)
    dataset = _dataset_of_hub(run)
    if dataset and is_offline() and is_on_hub_only(dataset):
        yield ConfigIssue(
            "dataset_id_or_path",
            f"= {run.dataset_id_or_path!r}: no such folder, {dataset} is not in the cache of the Hugging Face Hub, and "
            "the Hub cannot be reached.",
            "Try: write the rows to a file, one JSON object per line: dataset_id_or_path=rows.jsonl",
        )


def _dataset_of_hub(run: RunSettings) -> str:
    """The id of the dataset, or "" if the data are a file, a folder or generated."""
    name = run.dataset_id_or_path
    if name not in OWN_SETS:
        return "" if Path(name).expanduser().exists() else name
    source = build_source(Data(source=name))
    return source.dataset if isinstance(source, FromHub) else ""
