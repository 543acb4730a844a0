"""Datasets as rows for TRL: prompts as messages with the columns of the rewards, or prompts with their completions."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk

from retrain.config.schema import Data
from retrain.data import Endless, load_examples
from retrain.data.jsonl import read_objects
from retrain.data.rows import ANSWER_FIELDS, PROMPT_FIELDS, kind_of
from retrain.errors import ConfigError
from retrain.grpo.rewards import NamedReward, load_rewards, text_of
from retrain.grpo.settings import FILES, OWN_SETS, RunSettings
from retrain.runtime.text import plural

PROMPTS = (*PROMPT_FIELDS, "text")
ANSWERS = (*ANSWER_FIELDS, "ground_truth")
COMPLETIONS = ("completion", *ANSWERS)
ENDLESS = 4096
"""Number of examples taken from an endless dataset if max_train_examples is not set."""

Row = dict[str, Any]

_TEXT_FORMATS = ("json", "csv")
# What Arrow raises for values that are of no common type.
_WITHOUT_TYPE = (ValueError, TypeError, ArithmeticError)
# Words in names of files and folders by which `datasets` recognizes a split.
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
# 007 is a text.
_WHOLE = re.compile(r"\s*[+-]?(?!0\d)\d+\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[+-]?(?!0\d)(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_BOOLEAN = re.compile(r"true|false", re.IGNORECASE)
_MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
"""Cells without a value, in columns of numbers."""


def load_rows(run: RunSettings, split: str, limit: int | None, is_sft: bool = False) -> list[Row]:
    """The rows of a split, for GRPO or for SFT."""
    name = run.dataset_id_or_path
    rows: Any
    if name in OWN_SETS:
        examples = load_examples(Data(source=name, split=split))
        count = limit or (ENDLESS if isinstance(examples, Endless) else len(examples))
        rows = [{"prompt": example.prompt, "answer": example.reference} for example in examples[:count]]
        if is_sft:
            # The form in which rewards and evaluations look for an answer.
            rows = [{**row, "completion": f"\\boxed{{{row['answer']}}}"} for row in rows]
    else:
        texts = {*PROMPTS, run.prompt_column, *((*COMPLETIONS, run.answer_column) if is_sft else ())}
        rows = _load_dataset(name, run.dataset_config, split, texts)
        # Not a slice: that of a dataset is its columns.
        rows = [rows[number] for number in range(min(limit, len(rows)))] if limit else rows
    if not len(rows):
        raise ConfigError(f"dataset_id_or_path = {name!r} (split {split!r}) has no rows.")
    convert = _sft_row if is_sft else partial(_grpo_row, rewards=[] if is_sft else _comparing(run))
    try:
        converted = [convert(row, run, number) for number, row in enumerate(rows)]
        other = next(
            (number for number, row in enumerate(converted) if is_sft and row.keys() != converted[0].keys()), 0
        )
        if other:
            shapes = " and ".join("+".join(converted[number]) for number in (0, other))
            raise ConfigError(f"rows 0 and {other} are demonstrations of different shapes: {shapes}.")
    except ConfigError as error:
        raise ConfigError(f"dataset_id_or_path = {name!r}: {error}") from error
    answers = [row["answer"] for row in converted if row.get("answer") is not None]
    if len({isinstance(answer, str) for answer in answers}) == 2 and all(map(_has_text, answers)):
        # A column of a dataset has one type.
        return [{**row, "answer": None if (one := row.get("answer")) is None else text_of(one)} for row in converted]
    return converted


def _load_dataset(name: str, config: str | None, split: str, texts: Collection[str | None]) -> Dataset | list[Row]:
    """The rows; `texts` are columns that hold text, also where a file does not tell text from numbers."""
    path = Path(name).expanduser()
    if (file := _find_text_file(path, split)) is not None:
        try:
            return _read_csv(file, texts) if file.suffix == ".csv" else _read_json(file)
        except (OSError, ValueError) as error:
            reason = f"{file}: {error}"
            raise ConfigError(
                f"dataset_id_or_path = {name!r} (split {split!r}) could not be loaded: {reason}"
            ) from error
    try:
        if path.suffix in FILES and path.is_file():
            return load_dataset(FILES[path.suffix], data_files=str(path), split="train")
        if path.is_dir() and (path / "dataset_dict.json").exists():
            return load_from_disk(str(path))[split]
        if path.is_dir() and (path / "dataset_info.json").exists():
            return load_from_disk(str(path))
        return load_dataset(name, config, split=split)
    except Exception as error:
        # The library raises many kinds, each with the reason in its text.
        words = (str(one) or type(one).__name__ for one in (error, error.__cause__) if one is not None)
        reason = " ".join(": ".join(words).split())[:300]
        raise ConfigError(f"dataset_id_or_path = {name!r} (split {split!r}) could not be loaded: {reason}") from error


def _find_text_file(path: Path, split: str) -> Path | None:
    """The only file of a split with JSON or CSV, if there is one; other folders are left to `datasets`."""
    if path.is_file():
        return path if FILES.get(path.suffix) in _TEXT_FORMATS else None
    if not path.is_dir() or split not in _SPLITS or _has_configs(path / "README.md"):
        return None
    files = (file for pattern in ("*", "*/*", "*/*/*") for file in path.glob(pattern) if file.is_file())
    found = [file for file in files if _names_split(file.relative_to(path), _SPLITS[split])]
    return found[0] if len(found) == 1 and FILES.get(found[0].suffix) in _TEXT_FORMATS else None


def _names_split(path: Path, words: set[str]) -> bool:
    is_hidden = any(part.startswith(".") for part in path.parts)
    return not is_hidden and not words.isdisjoint(re.split(r"[^a-z]+", str(path).lower()))


def _has_configs(card: Path) -> bool:
    """Whether a dataset's card says which files are of which split."""
    try:
        return "configs:" in card.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _read_json(path: Path) -> list[Row]:
    """Rows with all columns of the file. `datasets` would read texts such as 2024-01-05 as times."""
    rows = read_objects(path)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [_as_column([row.get(name) for row in rows]) for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _read_csv(path: Path, texts: Collection[str | None]) -> list[Row]:
    """Rows with texts as they are written. `datasets` takes the type of a column from its first 10,000 rows."""
    # Longer texts than the default limit are ordinary.
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        filled = ((reader.line_num, row) for row in reader if any(map(str.strip, row)))
        try:
            _, names = next(filled, (0, []))
            rows = list(filled)
        except csv.Error as error:
            raise ConfigError(f"{path}: line {reader.line_num} cannot be read: {error}.") from error
    for line, row in rows:
        if len(row) > len(names):
            raise ConfigError(f"{path}: line {line} has {plural(len(row), 'field')}, and the first has {len(names)}.")
    cells = list(itertools.zip_longest(names, *(row for _, row in rows), fillvalue=""))
    columns: dict[str, list[Any]] = {}
    for index, (name, *column) in enumerate(cells):
        unique = f"{name}.{index}" if name in columns else name or f"Unnamed: {index}"
        columns[unique] = [text or None for text in column] if name in texts else _read_column(column)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _read_column(column: list[str]) -> list[Any]:
    """Whole numbers, numbers or true and false if every cell with a value is one; texts otherwise."""
    kinds: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...]
    kinds = ((_WHOLE, int), (_NUMBER, float), (_BOOLEAN, lambda text: text.lower() == "true"))
    values = [text for text in column if text not in _MISSING]
    for pattern, kind in kinds:
        # A decimal holds whole numbers exactly up to this one.
        is_exact = kind is not float or all(abs(int(text)) <= 2**53 for text in values if _WHOLE.fullmatch(text))
        if values and is_exact and all(map(pattern.fullmatch, values)):
            return _as_column([None if text in _MISSING else kind(text) for text in column])
    return [text or None for text in column]


def _as_column(values: list[Any]) -> list[Any]:
    """Values that a column can hold; whole numbers that would not fit or not stay exact become text."""
    largest = 2**53 if any(isinstance(value, float) for value in values) else 2**63 - 1
    if all(not isinstance(value, int) or abs(value) <= largest for value in values):
        return values
    return [text_of(value) if isinstance(value, int | float) else value for value in values]


def to_dataset(rows: Sequence[Row]) -> Dataset:
    """The rows as a dataset; an error names the column that has no type."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        return Dataset.from_dict(columns)
    except _WITHOUT_TYPE as error:
        for name, values in columns.items():
            try:
                Dataset.from_dict({name: values})
            except _WITHOUT_TYPE as reason:
                text = " ".join(str(reason).split())
                hint = "" if name in ("prompt", "answer", "completion", "text") else "  Try: keep_columns=[] without it"
                raise ConfigError(f"the column {name!r} of the dataset cannot be used: {text}.{hint}") from error
        raise


def _grpo_row(row: Mapping[str, Any], run: RunSettings, number: int, rewards: Sequence[str]) -> Row:
    prompt = _pick(row, run.prompt_column, PROMPTS, number)
    answer = _pick(row, run.answer_column, ANSWERS, number, bool(run.answer_column) or bool(rewards))
    # A plugin takes any answer, as its text.
    if not {"match", "math"}.isdisjoint(rewards) and not _has_text(row[answer]):
        hint = "  Try: name its JSON file itself, or write it as text" if isinstance(row[answer], datetime) else ""
        text = f"row {number} has {kind_of(row[answer])} in {answer!r}, where text or a number belongs.{hint}"
        raise ConfigError(text)
    columns = {key: value for key, value in row.items() if key not in (prompt, answer)}
    if run.keep_columns is not None:
        missing = [name for name in run.keep_columns if name not in row]
        if missing:
            raise ConfigError(f"keep_columns names {missing[0]!r}; row {number} has {', '.join(row)}.")
        columns = {key: row[key] for key in run.keep_columns}
    # The selected columns replace others with these names.
    return {
        **columns,
        "prompt": _messages(row[prompt], run, prompt, number),
        **({"answer": row[answer]} if answer else {}),
    }


def _comparing(run: RunSettings) -> list[str]:
    """The rewards that compare completions with an answer; functions of the user take what they need."""
    functions = load_rewards([name for name in run.reward_names if ":" not in name])
    return [one.__name__ for one in functions if isinstance(one, NamedReward) and one.__name__ != "judge"]


def _has_text(value: object) -> bool:
    """Whether it is no list, object or time; all else, such as a date, has one text."""
    return isinstance(value, str | bytes) or not isinstance(value, Sequence | Mapping | datetime)


def _sft_row(row: Mapping[str, Any], run: RunSettings, number: int) -> Row:
    conversation = row.get("messages")
    if conversation and not run.prompt_column:
        *asked, answered = _conversation(conversation, "messages", number, "a list of messages")
        if not asked:
            raise ConfigError(f"row {number} has one message in 'messages', where a prompt and a completion belong.")
        return {"prompt": _messages(asked, run, "messages", number), "completion": [answered]}
    prompt = _pick(row, run.prompt_column, PROMPTS, number)
    # A row with only `text` is trained on from its first token, unless training is on completions only.
    needs_completion = prompt != "text" or bool(run.completion_only_training)
    completion = _pick(row, run.answer_column, COMPLETIONS, number, needs_completion)
    if not completion:
        if not isinstance(row[prompt], str):
            raise ConfigError(f"row {number} has {kind_of(row[prompt])} in {prompt!r}, where text belongs.")
        return {"text": row[prompt]}
    answer = row[completion]
    completed = (
        [{"role": "assistant", "content": text_of(answer)}]
        if _has_text(answer)
        else _conversation(answer, completion, number)
    )
    return {"prompt": _messages(row[prompt], run, prompt, number), "completion": completed}


def _messages(prompt: Any, run: RunSettings, column: str, number: int) -> list[Any]:
    is_text = isinstance(prompt, str)
    messages = [{"role": "user", "content": prompt}] if is_text else _conversation(prompt, column, number)
    return [{"role": "system", "content": run.system_prompt}, *messages] if run.system_prompt else messages


def _conversation(value: Any, column: str, number: int, belongs: str = "text or a list of messages") -> list[Any]:
    """Messages, each with a role; one that calls tools may have no content."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"row {number} has {kind_of(value)} in {column!r}, where {belongs} belongs.")
    if not value:
        raise ConfigError(f"row {number} has an empty {column}.")
    for message in value:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or (message.get("content") is None and not message.get("tool_calls")):
            raise ConfigError(f"row {number} has a message without role and content in {column!r}.")
    return list(value)


def _pick(
    row: Mapping[str, Any], named: str | None, usual: tuple[str, ...], number: int, is_required: bool = True
) -> str:
    names = (named,) if named else usual
    found = next((name for name in names if row.get(name) not in (None, "")), "")
    if is_required and not found:
        empty = [name for name in names if name in row]
        if empty:
            raise ConfigError(f"row {number} has an empty {empty[0]}.")
        close = get_close_matches(names[0], list(row), n=1) if named else []
        hint = f"  Did you mean {close[0]}?" if close else ""
        lack = f"no column {named}" if named else f"none of {', '.join(names)}"
        raise ConfigError(f"row {number} has {lack}; it has {', '.join(row)}.{hint}")
    return found
