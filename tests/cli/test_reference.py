"""Files written from the schema: they load, they are current, and they say what the schema says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.sync import main
from retrain.config import TrainConfig, build_config, load_config
from retrain.config.options import OPTIONAL_SECTIONS, all_options
from retrain.config.reference import (
    SCHEMA_FILE,
    TEMPLATES,
    default_toml,
    describe,
    docs_tables,
    help_text,
    json_schema,
    starter,
)
from retrain.plugins import REGISTRIES

ROOT = Path(__file__).parents[2]


def _load(text: str) -> TrainConfig:
    return build_config(tomllib.loads(text), {}, source="text")


def _uncomment(text: str, section: str) -> str:
    """What an editor's comment key does to the block of a table."""
    before, _, rest = text.partition(f"# [{section}]\n")
    block, separator, after = rest.partition("\n\n")
    lines = [line.removeprefix("#").removeprefix(" ") for line in block.splitlines()]
    return "\n".join([before, f"[{section}]", *lines]) + separator + after


def test_the_default_file_loads_to_the_defaults() -> None:
    assert _load(default_toml()) == TrainConfig()


def test_the_default_file_names_every_option_with_its_description() -> None:
    text = default_toml()
    for option in all_options():
        assert describe(option) in text, option.where


def test_a_copy_of_the_default_file_is_a_training_run(tmp_path: Path) -> None:
    path = tmp_path / "my_run.toml"
    path.write_text((ROOT / "retrain.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert load_config(path).kind == "train"


@pytest.mark.parametrize("section", OPTIONAL_SECTIONS)
def test_a_commented_table_works_once_it_is_uncommented(section: str) -> None:
    text = _uncomment(default_toml(), section).replace('adapter_path = ""', 'adapter_path = "somewhere"')
    config = _load(text)
    assert config.kind == section
    if config.campaign is not None:
        assert len(config.campaign.conditions) == 5


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_starter_loads_and_holds_the_values_of_its_template(template: str) -> None:
    dumped = _load(starter(template)).model_dump(by_alias=True)
    for path, value in TEMPLATES[template].values.items():
        section, _, key = path.partition(".")
        assert dumped[section][key] == value


def test_starters_are_of_the_kind_they_promise() -> None:
    kinds = {name: _load(starter(name)).kind for name in TEMPLATES}
    assert kinds == {
        "demo": "train",
        "quickstart": "train",
        "standard": "train",
        "campaign": "campaign",
        "squeeze": "squeeze",
    }


def test_starters_leave_room_for_answers_of_their_kind() -> None:
    assert _load(starter("quickstart")).training.max_tokens == 1024
    assert _load(starter("standard")).training.max_tokens == 10240


@pytest.mark.parametrize("text", [default_toml(), *(starter(name) for name in TEMPLATES)])
def test_editors_find_the_schema_and_no_line_is_too_long(text: str) -> None:
    assert text.splitlines()[0] == f"#:schema ./{SCHEMA_FILE}"
    assert max(len(line) for line in text.splitlines()) <= 122


def test_a_change_replaces_a_value_of_the_template_or_adds_one() -> None:
    config = _load(starter("demo", {"training.max_steps": 3, "eval.every": 7}))
    assert (config.training.max_steps, config.eval.every) == (3, 7)


def _unknown_keys(table: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Keys of a document that its schema does not have, with a list of tables looked into."""
    unknown = []
    for key, value in table.items():
        if key not in schema["properties"]:
            unknown.append(key)
        elif "properties" in schema["properties"][key]:
            unknown += _unknown_keys(value, schema["properties"][key])
    return unknown


@pytest.mark.parametrize("text", [default_toml(), *(starter(name) for name in TEMPLATES)])
def test_the_schema_has_every_key_that_is_written(text: str) -> None:
    assert _unknown_keys(tomllib.loads(text), json_schema()) == []


def test_the_schema_has_every_option_closed_described_and_without_references() -> None:
    schema = json_schema()
    assert "$ref" not in json.dumps(schema)
    assert set(schema["properties"]) == set(TrainConfig.model_fields)
    for option in all_options():
        section = schema["properties"][option.section]
        assert section["additionalProperties"] is False
        assert section["properties"][option.key]["description"] == option.description
    terms = schema["properties"]["reward"]["properties"]["terms"]["items"]
    assert set(terms["properties"]) == {"type", "weight", "custom_module", "custom_function"}


def test_the_schema_offers_built_in_names_and_allows_others() -> None:
    options = json_schema()["properties"]
    assert options["algorithm"]["properties"]["advantage_mode"]["anyOf"] == [
        {"enum": list(REGISTRIES["advantage"].builtins)},
        {"type": "string"},
    ]
    assert options["environment"]["properties"]["args"]["type"] == ["object", "string"]
    assert options["training"]["properties"]["lr"]["exclusiveMinimum"] == 0


def test_docs_tables_have_a_row_for_every_option() -> None:
    tables = docs_tables()
    for option in all_options():
        assert f"| `{option.key}`<br>`{option.flag}` |" in tables
    assert all(row.count("|") - row.count("\\|") == 4 for row in tables.splitlines() if row.startswith("| "))


def test_help_names_every_flag_and_every_command() -> None:
    text = help_text({"train": "Train."})
    for option in all_options():
        assert f"  {option.flag}" in text
    assert "  train  Train." in text


def test_generated_files_of_the_repository_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, f"run `make sync`: {capsys.readouterr().out}"
