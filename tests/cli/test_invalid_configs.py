"""Ways to break a configuration: each has its own message, and the message names the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from retrain.cli import run
from retrain.config.reference import starter

# What is done to a starter file, what the message must name, and what it must suggest.
_BREAKS: dict[str, tuple[str, str, str, str]] = {
    "a misspelt key": ("max_steps = 20", "max_stepz = 20", "[training] max_stepz", "Did you mean max_steps?"),
    "a misspelt table": ("[training]", "[trainnning]", "[trainnning]", "Did you mean [training]?"),
    "a key in the wrong table": (
        "max_steps = 20",
        "lora_rank = 8",
        "[training] lora_rank",
        "Did you mean [model] lora_rank?",
    ),
    "a value out of bounds": ("batch_size = 4", "batch_size = -4", "[training] batch_size", "Try: batch_size = 8"),
    "a fraction for a count": ("batch_size = 4", "batch_size = 3.9", "[training] batch_size", "whole number"),
    "a string for a number": (
        "max_tokens = 1024",
        'max_tokens = "1024"',
        "[training] max_tokens",
        "Try: max_tokens = 1024",
    ),
    "an unknown method": ('"gtpo_sepa"', '"gtpo_sepia"', "[algorithm] transform_mode", "Did you mean 'gtpo_sepa'?"),
    "an impossible device": ('"auto"', '"tpu"', "[backend] devices", 'Try: devices = "auto"'),
    "an unfinished reward": ('type = "match"', 'type = "custom"', "[reward] custom_module", "Try: custom_module ="),
    "a group of one": ("group_size = 8", "group_size = 1", "[training] group_size", "Try: group_size = 16"),
    "a broken line": ("max_steps = 20", "max_steps = = 20", "(line", "^"),
    "a key outside any table": ("[backend]", "lr = 1e-5\n[backend]", "lr", "Did you mean [training] lr?"),
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", _BREAKS)
def test_a_broken_configuration_names_the_fix(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, named, suggested = _BREAKS[name]
    text = starter("quickstart")
    assert old in text
    Path("retrain.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    assert run([]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert suggested in message
    assert "Traceback" not in message


def test_applying_the_hint_makes_the_file_load(capsys: pytest.CaptureFixture[str]) -> None:
    Path("retrain.toml").write_text("[training]\nlr = -1.0\n", encoding="utf-8")
    assert run([]) == 2
    hint = capsys.readouterr().err.partition("Try: ")[2].strip()
    Path("retrain.toml").write_text(f"[training]\n{hint}\n", encoding="utf-8")
    assert run(["explain"]) == 0


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (["absent.toml"], "retrain init"),
        (["exlain"], "retrain explain"),
        (["."], "folder"),
        (["retrain.tml"], "Did you mean retrain.toml?"),
        (["plan", "./retrain.tml", "--lr", "1"], "Did you mean ./retrain.toml?"),
        (["nowhere/retrain.tml"], "retrain init"),
        (["logs/demo"], "Try: retrain --resume logs/demo"),
        (["plan", "logs/demo"], "Try: retrain plan logs/demo/config.toml"),
        (["retrain.toml", "--lr", "fast"], "[training] lr"),
        (["retrain.toml", "--learning-rate", "1"], "--learning-rate"),
        (["retrain.toml", "--steps", "1"], "Did you mean '--max-steps' or '--sepa-steps'?"),
        (["init", "--tempalte", "demo"], "--template"),
    ],
)
def test_a_wrong_command_line_says_what_to_do(
    arguments: list[str], suggested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("retrain.toml").write_text(starter("quickstart"), encoding="utf-8")
    Path("logs/demo").mkdir(parents=True)
    Path("logs/demo/config.toml").write_text("", encoding="utf-8")
    assert run(arguments) == 2
    message = capsys.readouterr().err
    assert suggested in message
    assert "Traceback" not in message


def test_a_shell_sees_the_exit_code_and_only_the_message() -> None:
    Path("retrain.toml").write_text("[training]\nlr = -1.0\n", encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "retrain"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: retrain.toml has 1 problem:",
        "  [training] lr must be > 0, got -1.0.  Try: lr = 4e-05",
    ]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["--lr", "abc"],
            [
                "error: the command line has 1 problem:",
                '  --lr ([training] lr) must be a number, got "abc".  Try: --lr 4e-05',
            ],
        ),
        (
            ["--lr", "abc", "--seeds", "[1]"],
            [
                "error: the command line has 2 problems:",
                "  --seeds ([campaign] seeds) was set, but the file has no such table.  Try: add a [campaign] table",
                '  --lr ([training] lr) must be a number, got "abc".  Try: --lr 4e-05',
            ],
        ),
        (
            ["bad.toml", "--max-steps", "0"],
            [
                "error: bad.toml has 2 problems:",
                "  [training] lr must be > 0, got -1.0.  Try: lr = 4e-05",
                "  --max-steps ([campaign] max_steps) must be >= 1, got 0.  Try: --max-steps 500",
            ],
        ),
        (["bad.toml"], ["error: bad.toml has 1 problem:", "  [training] lr must be > 0, got -1.0.  Try: lr = 4e-05"]),
    ],
)
def test_what_is_wrong_with_a_flag_is_not_a_problem_of_the_file(
    arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("retrain.toml").write_text(starter("quickstart"), encoding="utf-8")
    Path("bad.toml").write_text("[training]\nlr = -1.0\n[campaign]\n", encoding="utf-8")
    assert run(arguments) == 2
    assert capsys.readouterr().err.splitlines() == lines
