"""Options by the names they have elsewhere."""

from __future__ import annotations

import pytest

from retrain.cli import run
from retrain.config import build_config
from retrain.config.options import all_options
from retrain.config.synonyms import synonyms
from retrain.errors import ConfigError


def test_a_synonym_is_of_one_option_and_no_flag() -> None:
    assert sum(len(option.facets.synonyms or ()) for option in all_options()) == len(synonyms()) > 50
    flags = {option.flag for option in all_options()}
    assert not {f"--{name.replace('_', '-')}" for name in synonyms()} & flags


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--learning-rte", "--lr"),
        ("--training.learning-rate", "--lr"),
        ("--num-generations", "--group-size"),
        ("--output-dir", "--log-dir"),
        ("--max-new-tokens", "--max-tokens"),
    ],
)
def test_a_flag_of_another_tool_is_answered_with_ours(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([typed, "1"]) == 2
    assert f"No such option '{typed}'. Did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        ({"learning_rate": 1e-4}, "Did you mean lr?"),
        ({"steps": 10}, "Did you mean max_steps?"),
        ({"max_grad_norm": 1.0}, "Did you mean [loss] grad_clip?"),
    ],
)
def test_a_key_of_another_tool_is_answered_with_ours(table: dict[str, float], hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config({"training": table}, {}, "run.toml")
    assert hint in str(raised.value)


@pytest.mark.parametrize("rest", [[], ["small.toml"], ["--max-steps", "1"]])
def test_a_misspelt_train_is_answered_with_what_help_lists(capsys: pytest.CaptureFixture[str], rest: list[str]) -> None:
    assert run(["trian", *rest]) == 2
    assert capsys.readouterr().err == (
        "error: there is no file or command 'trian'.  Did you mean train? It needs no command.  "
        "Try: retrain my_run.toml\n"
    )
