"""Every option is declared once, described in a sentence, and reached by flags of its own."""

from __future__ import annotations

import re

import click
import pytest

from retrain.config.flags import click_options
from retrain.config.options import Option, all_options, section_type
from retrain.config.schema import TrainConfig
from retrain.plugins import REGISTRIES

KEY = re.compile(r"[a-z][a-z0-9_]*")
FLAG = re.compile(r"--[a-z][a-z0-9-]*")


@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.path)
def test_an_option_has_a_description_of_one_sentence(option: Option) -> None:
    text = option.description
    assert text.endswith(".") and not text.endswith(".."), text
    assert text[0].isupper() or text.split()[0].rstrip(",") in ("math", "match", "linear", "decided", "auto"), text
    assert "\n" not in text and len(text) <= 120
    # A full stop inside would begin a second sentence; one more is let pass for what a value means.
    assert len(re.findall(r"\.\s+[A-Z]", text)) <= 1, text


@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.path)
def test_an_option_is_spelt_in_lower_case_and_its_flag_in_kebab_case(option: Option) -> None:
    assert KEY.fullmatch(option.key) and KEY.fullmatch(option.section)
    assert FLAG.fullmatch(option.flag)
    assert not option.flag.startswith("--no-")


def test_every_flag_is_unique() -> None:
    spellings = [flag for option in click_options() for flag in (*option.opts, *option.secondary_opts)]
    assert len(spellings) == len(set(spellings))


def test_no_flag_takes_the_name_of_one_of_the_command() -> None:
    taken = {"--help", "--version", "--force-resume"}
    assert not taken & {flag for option in click_options() for flag in option.opts}


def test_every_option_has_a_flag_in_click() -> None:
    names = {option.name for option in click_options()}
    assert len(names) == len(all_options())
    assert all(isinstance(option, click.Option) and option.help for option in click_options())


def test_a_name_that_selects_a_part_has_a_registry() -> None:
    kinds = {option.kind for option in all_options() if option.kind}
    assert kinds == set(REGISTRIES)


@pytest.mark.parametrize("name", TrainConfig.model_fields)
def test_every_table_says_what_it_is_about(name: str) -> None:
    text = section_type(name).__doc__ or ""
    assert text.strip().endswith(".")
