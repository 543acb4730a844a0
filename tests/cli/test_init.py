"""`retrain init`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from retrain.cli import app, run
from retrain.config import load_config
from retrain.config.reference import SCHEMA_FILE, TEMPLATES, starter


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_writes_quickstart_and_its_schema_and_says_what_is_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init"]) == 0
    assert Path("retrain.toml").read_text(encoding="utf-8") == starter("quickstart")
    assert json.loads(Path(SCHEMA_FILE).read_text(encoding="utf-8"))["title"] == "retrain configuration"
    output = capsys.readouterr().out
    assert "Wrote retrain.toml" in output
    assert "retrain explain" in output
    assert "retrain doctor" in output


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_is_written_to_where_it_was_asked_for(template: str) -> None:
    assert run(["init", "runs/mine.toml", "--template", template]) == 0
    load_config("runs/mine.toml")
    assert (Path("runs") / SCHEMA_FILE).exists()


def test_a_template_in_place_of_a_file_is_refused_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "demo"]) == 2
    assert "Try: retrain init --template demo" in capsys.readouterr().err and not Path("demo").exists()
    assert run(["init", "demo", "--template", "campaign"]) == 0 and Path("demo").exists()


@pytest.mark.parametrize("template", ["demo", "quickstart", "standard"])
def test_the_adapter_of_a_template_is_inside_its_log_folder(template: str) -> None:
    values = TEMPLATES[template].values
    assert values["backend.adapter_path"] == f"{values['logging.log_dir']}/adapter"


def test_the_squeeze_template_reads_the_adapter_of_quickstart() -> None:
    assert TEMPLATES["squeeze"].values["squeeze.adapter_path"] == TEMPLATES["quickstart"].values["backend.adapter_path"]


def test_list_names_the_templates_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TEMPLATES)
    assert list(Path().iterdir()) == []


def test_an_existing_file_is_rejected_and_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("retrain.toml").write_text("# mine\n", encoding="utf-8")
    assert run(["init"]) == 2
    assert "--force" in capsys.readouterr().err
    assert Path("retrain.toml").read_text(encoding="utf-8") == "# mine\n"
    assert not Path(SCHEMA_FILE).exists()


def test_force_replaces_an_existing_file() -> None:
    Path("retrain.toml").write_text("# mine\n", encoding="utf-8")
    assert run(["init", "--force", "--template", "demo"]) == 0
    assert Path("retrain.toml").read_text(encoding="utf-8") == starter("demo")


def test_a_folder_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    assert run(["init", "runs", "--force"]) == 2
    assert "runs/retrain.toml" in capsys.readouterr().err


def test_an_unknown_template_is_rejected_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--template", "quick"]) == 2
    assert "quickstart" in capsys.readouterr().err


def test_questions_are_few_the_file_is_shown_and_then_written() -> None:
    result = CliRunner().invoke(
        app, ["init", "--interactive"], input="quickstart\nbuiltin:tiny\ncpu\narithmetic\n5\ny\n"
    )
    assert result.exit_code == 0, result.output
    asked = [line for line in result.output.splitlines() if line.endswith(("]: ", "]: y")) or "]:" in line]
    assert len(asked) <= 6  # five questions, and whether to write
    assert 'model = "builtin:tiny"' in result.output
    config = load_config("retrain.toml")
    assert config.backend.devices == "cpu"
    assert config.training.max_steps == 5
    assert config.data.source == "arithmetic"


def test_a_wrong_answer_is_explained_and_asked_for_again() -> None:
    answers = "quickstart\nbuiltin:tiny\ntpu\ncpu\narithmetics\narithmetic\n0\n5\ny\n"
    result = CliRunner().invoke(app, ["init", "--interactive"], input=answers)
    assert result.exit_code == 0, result.output
    assert "a device is cpu or gpu:N" in result.output
    assert "Did you mean 'arithmetic'?" in result.output
    assert "[training] max_steps must be >= 1" in result.output


@pytest.mark.parametrize("template", TEMPLATES)
def test_enter_at_every_question_writes_the_template(template: str) -> None:
    result = CliRunner().invoke(app, ["init", "--interactive", "--template", template], input="\n" * 6)
    assert result.exit_code == 0, result.output
    expected = starter(template)
    assert load_config("retrain.toml") == load_config(_written("expected.toml", expected))


def test_a_no_at_the_end_writes_nothing() -> None:
    result = CliRunner().invoke(app, ["init", "--interactive"], input="\n\n\n\n\nn\n")
    assert "Nothing was written." in result.output
    assert list(Path().iterdir()) == []


def test_an_existing_file_is_only_replaced_on_a_clear_yes() -> None:
    Path("retrain.toml").write_text("# mine\n", encoding="utf-8")
    CliRunner().invoke(app, ["init", "--interactive"], input="\n" * 6)
    assert Path("retrain.toml").read_text(encoding="utf-8") == "# mine\n"
    CliRunner().invoke(app, ["init", "--interactive"], input="\n" * 5 + "y\n")
    assert Path("retrain.toml").read_text(encoding="utf-8") == starter("quickstart")


def test_training_without_a_file_says_how_to_get_one() -> None:
    done = subprocess.run([sys.executable, "-m", "retrain"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "retrain init" in done.stderr
    assert "Traceback" not in done.stderr


def _written(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name
