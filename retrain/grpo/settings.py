"""Composed settings into a run: which are of the model, which of the data, and which are arguments of GRPOConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk
from peft import LoraConfig
from transformers import AutoTokenizer

from retrain.builtin import resolve_model
from retrain.config.schema import Data
from retrain.data import Endless, load_examples
from retrain.data.rows import ANSWER_FIELDS, PROMPT_FIELDS
from retrain.errors import ConfigError, ConfigIssue, PluginError
from retrain.grpo.config import GRPOConfig
from retrain.grpo.trainer import GRPOTrainer
from retrain.modeling.tokens import explain_missing_model
from retrain.plugins import REGISTRIES, import_path, make_importable
from retrain.runtime.text import plural

OWN_SETS = ("arithmetic", "gsm8k", "math")
FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
ENDLESS = 4096
"""Examples drawn from a set that never ends, when max_train_examples does not say."""

NEVER = 10**9
# Name -> default. What a setting means beyond GRPOConfig.
MODEL = {"name": "", "model_name_or_path": "", "tokenizer_kwargs": None}
LORA = {"lora_rank": 0, "lora_alpha": None, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
DATA = {
    "dataset_id_or_path": "",
    "dataset_config": None,
    "train_split": None,
    "val_split": None,
    "max_train_examples": None,
    "max_val_examples": None,
    "prompt_column": None,
    "answer_column": None,
    "keep_columns": None,
    "system_prompt": "",
    "completion_only_training": True,
    "reward_funcs": None,
}


def run_settings(settings: Mapping[str, Any], say: Callable[[str], None]) -> GRPOTrainer:
    """Train as the settings say."""
    trainer = build_trainer(settings)
    label = settings.get("name") or settings["model_name_or_path"]
    say(f"{label} on {settings['dataset_id_or_path']}: {len(trainer.examples)} prompts")
    result = trainer.train()
    rewards = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    held_out = f", held-out reward {rewards[0]:.4f} before and {rewards[-1]:.4f} after" if rewards else ""
    say(f"Done: {plural(result.global_step, 'step')}{held_out}, logs in {trainer.args.output_dir}.")
    return trainer


def build_trainer(settings: Mapping[str, Any]) -> GRPOTrainer:
    """The trainer that the settings describe; a setting that no part knows is refused."""
    arguments = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    known = (*arguments, *MODEL, *LORA, *DATA)
    _refuse_unknown(settings, known)
    model, lora, data = ({**usual, **_of(settings, usual)} for usual in (MODEL, LORA, DATA))
    _refuse_incomplete(model, lora, data)
    _refuse_unfit(lora, data)
    if data["val_split"] and "eval_strategy" not in settings:
        # Before the first step and after the last, by the run itself, which has the model loaded.
        settings = {**settings, "eval_strategy": "steps", "eval_steps": NEVER}
    args = GRPOConfig(**_of(settings, arguments))
    name = str(model["model_name_or_path"])
    return GRPOTrainer(
        model=name,
        reward_funcs=load_rewards(data["reward_funcs"]),
        args=args,
        train_dataset=load_rows(data, data["train_split"] or "train", data["max_train_examples"]),
        eval_dataset=load_rows(data, data["val_split"], data["max_val_examples"]) if data["val_split"] else None,
        processing_class=load_tokenizer(name, model["tokenizer_kwargs"]),
        peft_config=read_lora(lora),
    )


def _of(settings: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in names}


def _refuse_unknown(settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    problems = []
    for key in settings:
        if key not in known:
            close = get_close_matches(key[:60], known, n=1)
            hint = f"Did you mean {close[0]}?" if close else "docs/grpo.md lists every setting."
            problems.append(ConfigIssue(f"unknown setting {key!r}.", "", hint))
    if problems:
        raise ConfigError("the composed settings cannot be run:", tuple(problems))


def _refuse_incomplete(model: Mapping[str, Any], lora: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    problems = []
    for name, value, hint in (
        ("model_name_or_path", model["model_name_or_path"], "model_name_or_path=builtin:tiny"),
        ("dataset_id_or_path", data["dataset_id_or_path"], "dataset_id_or_path=arithmetic"),
        ("reward_funcs", data["reward_funcs"], "reward_funcs=match"),
    ):
        if not value:
            problems.append(ConfigIssue(name, "is missing.", f"Try: {hint}"))
    if data["completion_only_training"] is not True:
        text = "= false cannot be: a policy gradient is over what was sampled, so prompts are never trained on."
        problems.append(ConfigIssue("completion_only_training", text, "Leave it out."))
    idle = [name for name, usual in LORA.items() if not lora["lora_rank"] and lora[name] != usual]
    problems += [ConfigIssue(name, f"= {lora[name]!r} has no effect: it needs lora_rank.") for name in idle]
    if problems:
        raise ConfigError("the composed settings cannot be run:", tuple(problems))


def _refuse_unfit(lora: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Values that a file or a command line can hold, and the model or the data cannot use."""
    problems = []
    for name in ("max_train_examples", "max_val_examples"):
        value = data[name]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(ConfigIssue(name, f"must be a whole number of at least 1, got {value!r}."))
    for name in ("dataset_config", "train_split", "val_split", "prompt_column", "answer_column", "system_prompt"):
        if data[name] is not None and not isinstance(data[name], str):
            problems.append(ConfigIssue(name, f"must be a text, got {data[name]!r}."))
    if data["keep_columns"] is not None and not _are_names(data["keep_columns"]):
        problems.append(ConfigIssue("keep_columns", f"must be a list of names, got {data['keep_columns']!r}."))
    if lora["lora_target_modules"] != "all-linear" and not _are_names(lora["lora_target_modules"]):
        text = f"must be all-linear or a list of names, got {lora['lora_target_modules']!r}."
        problems.append(ConfigIssue("lora_target_modules", text))
    for name, usual in (("lora_alpha", 1), ("lora_dropout", 0.0)):
        value = usual if lora[name] is None else lora[name]
        if not isinstance(value, int | float) or isinstance(value, bool):
            problems.append(ConfigIssue(name, f"must be a number, got {value!r}."))
    problems += _splits_of_a_file(data)
    if problems:
        raise ConfigError("the composed settings cannot be run:", tuple(problems))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _splits_of_a_file(data: Mapping[str, Any]) -> list[ConfigIssue]:
    """A file, or a dataset saved without splits, is all there is: a split of it would be the whole again."""
    path = Path(str(data["dataset_id_or_path"])).expanduser()
    idle = ["train_split", "val_split", "dataset_config"]
    if path.is_file() and path.suffix in FILES:
        what = "a file, which has no splits or configurations"
    elif (path / "dataset_dict.json").exists():
        what, idle = "a saved dataset, which has no configurations", ["dataset_config"]
    elif (path / "dataset_info.json").exists():
        what = "a saved dataset without splits or configurations"
    else:
        return []
    # "train" is what the whole of a file is called.
    given = [name for name in idle if data[name] is not None and (name, data[name]) != ("train_split", "train")]
    return [
        ConfigIssue(name, f"= {data[name]!r} has no effect: {path} is {what}.", f"Try: {name}=null") for name in given
    ]


def read_lora(lora: Mapping[str, Any]) -> LoraConfig | None:
    """The adapter, or None to train the whole model."""
    rank = lora["lora_rank"]
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise ConfigError(f"lora_rank must be a whole number, 0 for the whole model, got {rank!r}.")
    if not rank:
        return None
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if lora["lora_alpha"] is None else lora["lora_alpha"],
        lora_dropout=lora["lora_dropout"],
        target_modules=lora["lora_target_modules"],
        task_type="CAUSAL_LM",
    )


def load_rewards(given: Any) -> list[Any]:
    """Rewards by name stay names; `module:function` is imported from the working directory or what is installed."""
    rewards = []
    for name in given if isinstance(given, list) else [given]:
        if not isinstance(name, str):
            raise ConfigError(f"reward_funcs holds {name!r}.  Try: a name such as math, or my_rewards:function")
        if ":" in name and name not in REGISTRIES["reward"].names():
            make_importable((".",))
            try:
                rewards.append(import_path(name, "reward"))
            except PluginError as error:
                raise ConfigError(f"reward_funcs: {error}") from error
        else:
            rewards.append(name)
    return rewards


def load_tokenizer(model: str, kwargs: Any) -> Any:
    """The model's tokenizer, made with the given arguments."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(f"tokenizer_kwargs must be a table, got {kwargs!r}.")
    try:
        return AutoTokenizer.from_pretrained(resolve_model(model), **(kwargs or {}))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(explain_missing_model(model, error)) from error


def load_rows(data: Mapping[str, Any], split: str, most: int | None) -> list[dict[str, Any]]:
    """The rows of a split: a conversation, an answer, and the columns that rewards are to see."""
    name = str(data["dataset_id_or_path"])
    if name in OWN_SETS:
        examples = load_examples(Data(source=name, split=split))
        count = most or (ENDLESS if isinstance(examples, Endless) else len(examples))
        rows: Any = [{"prompt": example.prompt, "answer": example.reference} for example in examples[:count]]
    else:
        rows = _load_dataset(name, data["dataset_config"], split)
        rows = rows.select(range(min(most, len(rows)))) if most else rows
    return [_row(row, data, number) for number, row in enumerate(rows)]


def _load_dataset(name: str, config: str | None, split: str) -> Dataset:
    path = Path(name).expanduser()
    try:
        if path.suffix in FILES and path.is_file():
            # A file is one split, whatever it is called.
            return load_dataset(FILES[path.suffix], data_files=str(path), split="train")
        if path.is_dir() and (path / "dataset_dict.json").exists():
            return load_from_disk(str(path))[split]
        if path.is_dir() and (path / "dataset_info.json").exists():
            return load_from_disk(str(path))
        return load_dataset(name, config, split=split)
    except Exception as error:
        # The library raises many kinds; each says in its own words that there is no such dataset or split.
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"dataset_id_or_path = {name!r} (split {split!r}) could not be loaded: {reason}") from error


def _row(row: Mapping[str, Any], data: Mapping[str, Any], number: int) -> dict[str, Any]:
    prompt = _pick(row, data["prompt_column"], PROMPT_FIELDS, number)
    answer = _pick(row, data["answer_column"], ANSWER_FIELDS, number, needed=bool(data["answer_column"]))
    asked = row[prompt]
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if data["system_prompt"] and isinstance(messages, list | tuple):
        messages = [{"role": "system", "content": str(data["system_prompt"])}, *messages]
    rest = {key: value for key, value in row.items() if key not in (prompt, answer)}
    if data["keep_columns"] is not None:
        lacking = [name for name in data["keep_columns"] if name not in row]
        if lacking:
            raise ConfigError(f"keep_columns names {lacking[0]!r}; row {number} has {', '.join(row)}.")
        rest = {key: rest[key] for key in data["keep_columns"] if key in rest}
    # The columns that were named win over others of the file that are called so.
    return {**rest, "prompt": messages, **({"answer": row[answer]} if answer else {})}


def _pick(row: Mapping[str, Any], named: str | None, usual: tuple[str, ...], number: int, needed: bool = True) -> str:
    found = next((name for name in ((named,) if named else usual) if row.get(name) is not None), "")
    if needed and not found:
        raise ConfigError(
            f"row {number} has none of {', '.join((named,) if named else usual)}; it has {', '.join(row)}."
        )
    return found
