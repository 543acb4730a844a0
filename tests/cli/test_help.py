"""`retrain help`, `schema`, `completion`, and how output looks on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import BashComplete

from retrain.cli import COMMANDS, app, run
from retrain.config.options import all_options
from retrain.config.reference import json_schema

_RETRAIN = "import sys; sys.argv[0] = 'retrain'; from retrain.cli import main; main()"


def _complete(*words: str) -> list[str]:
    """What bash would be offered for the last word."""
    complete = BashComplete(app, {}, "retrain", "_RETRAIN_COMPLETE")
    return [complete.format_completion(item) for item in complete.get_completions(list(words[:-1]), words[-1])]


def test_help_is_the_whole_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help"]) == 0
    text = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert name in text
        assert summary in text
    for option in all_options():
        assert f"  {option.flag}" in text
        assert option.description in text


def test_help_narrows_to_a_table_an_option_or_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "sepa"]) == 0
    table = capsys.readouterr().out
    assert "--sepa-steps" in table
    assert "--lr" not in table
    for spelling in ("lr", "--lr", "training.lr"):
        assert run(["help", spelling]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["--lr", "FLOAT"]
    assert run(["help", "init"]) == 0
    assert "--template" in capsys.readouterr().out


def test_help_on_something_unknown_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "traning"]) == 2
    assert "Did you mean training?" in capsys.readouterr().err


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert run([name, "--help"]) == 0
        assert f"retrain {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["explain", "plan", "doctor"])
def test_help_of_a_command_names_the_flags_of_training_but_does_not_list_them(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "see `retrain help`" in " ".join(text.split())
    assert "--json" in text
    assert "--lr" not in text


def test_help_of_replay_lists_only_what_a_replay_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--transform-mode" in text
    assert "--backend" not in text


def test_grpo_init_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["grpo", "init", "--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage: retrain grpo init" in text
    assert "nothing is written" in text


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_retrain(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_RETRAIN_COMPLETE" in script
    program = shutil.which(shell)
    if program:
        assert subprocess.run([program, "-n"], input=script, text=True, check=False).returncode == 0


def test_an_unknown_shell_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "fish" in capsys.readouterr().err


def test_flags_complete_with_and_without_a_file_before_them() -> None:
    assert _complete("--advantage-m") == ["plain,--advantage-mode"]
    assert _complete("my.toml", "--advantage-m") == ["plain,--advantage-mode"]


def test_commands_and_files_complete_as_the_first_word() -> None:
    offered = _complete("in")
    assert "plain,init" in offered
    assert "plain,init-plugin" in offered
    assert offered[0].startswith("file,")


def test_values_complete_from_the_schema_and_from_the_registry() -> None:
    assert _complete("--transform-mode", "gtpo_") == ["plain,gtpo_hicra", "plain,gtpo_sepa"]
    assert _complete("--sepa-schedule", "a") == ["plain,auto"]
    assert _complete("init", "--template", "st") == ["plain,standard"]
    assert _complete("explain", "--lora-r") == ["plain,--lora-rank"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_bash_script_fills_the_reply() -> None:
    script = subprocess.run(
        [sys.executable, "-c", _RETRAIN, "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    # `retrain` becomes a shell function, so that the test does not depend on what is installed on the path.
    lines = [
        f'retrain_for_test() {{ {sys.executable} -c "{_RETRAIN}"; }}',
        script.replace("$1)", "retrain_for_test)").replace("$(env ", "$("),
        "COMP_WORDS=(retrain --advantage-m); COMP_CWORD=1; _retrain_completion retrain",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["--advantage-mode"], done.stderr


def _on_a_terminal(arguments: list[str], **variables: str) -> str:
    """The output of a command whose standard output is a terminal."""
    leader, follower = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-c", _RETRAIN, *arguments],
        stdout=follower,
        stdin=subprocess.DEVNULL,
        env=environment | {"TERM": "xterm", "COLUMNS": "100"} | variables,
    )
    os.close(follower)
    chunks = []
    try:
        while chunk := os.read(leader, 65536):
            chunks.append(chunk)
    except OSError:
        pass  # Linux reports the end of a terminal as an error
    os.close(leader)
    assert process.wait() == 0
    return b"".join(chunks).decode()


def test_a_terminal_gets_a_coloured_table_and_no_color_is_honoured() -> None:
    coloured = _on_a_terminal(["plugins"])
    assert "\x1b[32m" in coloured
    assert "[algorithm] advantage_mode" in coloured
    assert "\x1b[32m" not in _on_a_terminal(["plugins"], NO_COLOR="1")


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "─" not in output
