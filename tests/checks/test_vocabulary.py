"""Tokens that a model has no embedding for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from retrain.assemble import Overrides, assemble
from retrain.backends.local import LocalBackend
from retrain.builtin import resolve_model
from retrain.checks.vocabulary import check_template
from retrain.cli import trial
from retrain.config import TrainConfig, load_config
from retrain.errors import ConfigError
from retrain.modeling.files import find_model, read_vocabulary_size
from retrain.modeling.tokens import load_tokenizer

NEW = "<|think|>"
SENTENCE = re.escape(
    f'the token "{NEW}" with the id 486, and the model has embeddings for ids up to 485 (vocab_size = 486'
)


class LoadedError(Exception):
    """Stands for the model: nothing was found before it."""


def _load_model(*arguments: object) -> NoReturn:
    raise LoadedError


def _write_model(folder: Path, in_template: bool) -> Path:
    """The built-in model with a token more in its tokenizer, which its template may write."""
    shutil.copytree(resolve_model("builtin:tiny"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": 486, "content": NEW, "special": True} | flags)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if in_template:
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text() + NEW)
    return folder


def _set_vocabulary(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def _config(folder: Path, model: Path | str, **options: Any) -> TrainConfig:
    given = {
        "model.model": str(model),
        "backend.devices": "cpu",
        "data.source": "arithmetic",
        "training.max_tokens": 32,
        "logging.log_dir": str(folder / "logs"),
        "reward.workers": 1,
    }
    return load_config(None, given | {key.replace("__", "."): value for key, value in options.items()})


def _start(config: TrainConfig) -> None:
    with assemble(config, overrides=Overrides(backend=_load_model)):
        pass


@pytest.mark.parametrize(
    "options",
    [{}, {"environment__provider": "builtin", "environment__id": "guess-number"}, {"teaching__enabled": True}],
    ids=["data", "environment", "teaching"],
)
def test_a_template_with_a_token_without_embedding_ends_the_run_before_the_model_is_loaded(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    config = _config(tmp_path, _write_model(tmp_path / "model", in_template=True), **options)
    with pytest.raises(ConfigError, match=SENTENCE):
        _start(config)


def test_a_token_without_embedding_that_no_prompt_has_is_fine(tmp_path: Path) -> None:
    config = _config(tmp_path, _write_model(tmp_path / "model", in_template=False))
    with pytest.raises(LoadedError):
        _start(config)


def test_a_padded_model_has_embeddings_to_spare(tmp_path: Path) -> None:
    model = _write_model(tmp_path / "model", in_template=True)
    _set_vocabulary(model, vocab_size=512)
    with pytest.raises(LoadedError):
        _start(_config(tmp_path, model))


@pytest.mark.parametrize("table", ["data", "eval"])
def test_a_prompt_with_a_token_without_embedding_is_found_in_its_table(tmp_path: Path, table: str) -> None:
    model, rows = _write_model(tmp_path / "model", in_template=False), tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": f"{NEW} 1 + 1?", "answer": "2"}))
    options = {"eval__every": int(table == "eval"), f"{table}__source": "jsonl", f"{table}__path": str(rows)}
    config = _config(tmp_path, model, **options)
    with pytest.raises(ConfigError, match=rf"prompts of \[{table}\] have {SENTENCE}"):
        _start(config)
    with pytest.raises(ConfigError, match=rf"prompts of \[{table}\] have {SENTENCE}"):
        trial._try_prompts(config, f"[{table}]")


@pytest.mark.parametrize("where", ["[model] model", "[teaching] student_model"])
def test_the_doctor_tries_the_template_of_each_model(tmp_path: Path, where: str) -> None:
    model = _write_model(tmp_path / "model", in_template=True)
    student = {"teaching__enabled": True, "teaching__student_model": str(model)}
    is_student = where != "[model] model"
    config = _config(tmp_path, "builtin:tiny" if is_student else model, **(student if is_student else {}))
    attempts = dict(trial._trials(config))
    expected = rf'^{re.escape(where)} = ".*": its chat template or tokenizer adds {SENTENCE}'
    with pytest.raises(ConfigError, match=expected):
        attempts[f"{where}, tokenizer"](config)


def test_the_template_of_a_student_is_checked_before_the_student_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _write_model(tmp_path / "model", in_template=True)
    monkeypatch.setattr(LocalBackend, "frozen", _load_model)
    config = _config(tmp_path, "builtin:tiny", teaching__enabled=True, teaching__student_model=str(model))
    with pytest.raises(ConfigError, match=SENTENCE), assemble(config):
        pass


def test_the_vocabulary_of_a_service_and_of_overridden_settings_is_not_known(tmp_path: Path) -> None:
    model = _write_model(tmp_path / "model", in_template=True)
    tokenizer = load_tokenizer(str(model))
    check_template(_config(tmp_path, model, backend__backend="tinker"), tokenizer)
    check_template(_config(tmp_path, model, model__init_kwargs={"vocab_size": 512}), tokenizer)


def test_a_template_that_refuses_the_probe_is_left_to_the_prompts(tmp_path: Path) -> None:
    model = _write_model(tmp_path / "model", in_template=True)
    (model / "chat_template.jinja").write_text("{{ raise_exception('only with tools') }}")
    check_template(_config(tmp_path, model), load_tokenizer(str(model)))


def test_the_vocabulary_of_a_model_that_reads_images_is_that_of_its_text(tmp_path: Path) -> None:
    files = find_model(str(_write_model(tmp_path / "model", in_template=False)))
    assert read_vocabulary_size(files) == 486
    _set_vocabulary(tmp_path / "model", text_config={"vocab_size": 99})
    assert read_vocabulary_size(files) == 99
    _set_vocabulary(tmp_path / "model", text_config={})
    assert read_vocabulary_size(files) is None
