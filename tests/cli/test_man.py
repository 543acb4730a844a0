"""`retrain man`: what it prints in each format, how its generated parts are kept current, and how it fails."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from retrain import manual
from retrain.cli import COMMANDS, man, run
from retrain.config.options import all_options
from retrain.manual import Block, parse_manual, read_manual

TOPICS = [
    "name",
    "synopsis",
    "description",
    "commands",
    "options",
    "quickstart",
    "configuration",
    "rewards",
    "campaigns",
    "squeeze",
    "plugins",
    "environments",
    "distributed-training",
    "python-api",
    "logging",
    "files",
    "exit-status",
    "environment",
    "troubleshooting",
    "glossary",
]


def test_the_manual_has_every_topic_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--list-topics"]) == 0
    assert capsys.readouterr().out.split() == TOPICS


def test_text_in_a_pipe_is_plain_and_at_most_eighty_wide_but_for_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert text.startswith("NAME\n    retrain - train")
    code = {line.strip() for section in read_manual().sections for b in section.blocks for line in b.text.splitlines()}
    wide = [line for line in text.splitlines() if len(line) > 80 and line.strip() not in code]
    assert wide == []


def test_one_topic_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--topic", "Exit Status"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("EXIT STATUS\n")
    assert "130\n" in text
    assert "GLOSSARY" not in text


def test_a_heading_within_a_topic_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--topic", "dead-groups"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("DEAD GROUPS\n") and "resample_dead_groups" in text and "ENTROPY" not in text


def test_json_of_a_topic_holds_its_text_and_its_shell_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--topic", "quickstart", "--format", "json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert list(entry) == ["topic", "title", "text", "commands"]
    assert (entry["topic"], entry["title"]) == ("quickstart", "Quickstart")
    assert "cp retrain.toml my_run.toml" in entry["commands"]
    assert all(re.match(r"(retrain|cp)\b", command) for command in entry["commands"])


def test_json_without_a_topic_is_a_list_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--format", "json"]) == 0
    assert [entry["topic"] for entry in json.loads(capsys.readouterr().out)] == TOPICS


def test_commands_are_joined_over_line_ends_and_lose_their_comments() -> None:
    (section,) = parse_manual("## T\n\n```bash\n# why\nretrain a.toml \\\n    --lr 1  # note\n\n$x\n```\n").sections
    assert section.commands == ["retrain a.toml --lr 1", "$x"]


def test_every_kind_of_block_is_read() -> None:
    source = "# x 2026-01-02\n\n## Two words\n\nA\nb.\n\n### H\n\n- one\n  more\n- two\n\n"
    source += "`t`\n: d\n  e\n`u`\n: f\n\n```toml\na\n\nb\n```\n"
    parsed = parse_manual(source)
    assert parsed.date == "2026-01-02"
    assert parsed.sections[0].topic == "two-words"
    assert parsed.sections[0].blocks == (
        Block("paragraph", "A b."),
        Block("heading", "H"),
        Block("list", items=(("", "one more"), ("", "two"))),
        Block("definitions", items=(("`t`", "d e"), ("`u`", "f"))),
        Block("code", "a\n\nb", language="toml"),
    )


def test_an_unknown_topic_is_rejected_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--topic", "quikstart"]) == 2
    assert capsys.readouterr().err == "error: the manual has no topic 'quikstart'.  Did you mean 'quickstart'?\n"


def test_a_term_that_is_no_topic_is_answered_with_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--topic", "judge"]) == 2
    assert capsys.readouterr().err == "error: the manual has no topic 'judge'.  It is described in 'rewards'.\n"


def test_a_topic_like_no_other_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--topic", "zzz"]) == 2
    topics = capsys.readouterr().err
    assert "Topics: name, synopsis" in topics and ", dead-groups, " in topics and ", truncation, " in topics


def test_two_actions_at_once_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--sync", "--check"]) == 2
    assert "are mutually exclusive" in capsys.readouterr().err


def test_path_names_the_source_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--path"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.read_text(encoding="utf-8").startswith("# retrain(1)")


@pytest.fixture
def copied_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the manual that `retrain man` takes for its own."""
    copy = tmp_path / "retrain.md"
    copy.write_text(manual.SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(manual, "SOURCE", copy)
    monkeypatch.setattr(man, "SOURCE", copy)
    return copy


def test_check_fails_on_a_stale_block_and_sync_fixes_it(
    copied_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["man", "--sync"]) == 0
    current = copied_source.read_text(encoding="utf-8")
    copied_source.write_text(current.replace("### retrain init ", "### retrain start "), encoding="utf-8")
    assert run(["man", "--check"]) == 1
    assert "retrain man --sync" in capsys.readouterr().err
    assert run(["man", "--sync"]) == 0
    assert copied_source.read_text(encoding="utf-8") == current
    assert run(["man", "--check"]) == 0


def test_sync_leaves_the_prose_alone(copied_source: Path) -> None:
    text = copied_source.read_text(encoding="utf-8") + "\nA sentence of mine.\n"
    copied_source.write_text(text, encoding="utf-8")
    assert run(["man", "--sync"]) == 0
    assert copied_source.read_text(encoding="utf-8").endswith("A sentence of mine.\n")


def test_a_source_that_cannot_be_written_is_one_sentence(
    copied_source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied_source.write_text(copied_source.read_text(encoding="utf-8").replace("### retrain init ", "### x "))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert run(["man", "--sync"]) == 2
    assert "cannot be written: Permission denied." in capsys.readouterr().err


def test_the_manual_names_every_command_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    run(["man"])
    text = " ".join(capsys.readouterr().out.split())
    assert [name for name in COMMANDS if f"retrain {name} " not in text] == []
    assert [option.flag for option in all_options() if f", {option.flag}" not in text] == []


class _Page(HTMLParser):
    """Collects ids, links to them, and anything a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {str(values["id"])} if "id" in values else set()
        self.links |= {str(values["href"])} if tag == "a" else set()
        self.fetched += [tag] if tag in ("link", "script", "img", "iframe") else []
        self.open += [tag] if tag != "meta" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_well_formed_page_that_fetches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["man", "--format", "html"]) == 0
    page = _Page()
    page.feed(capsys.readouterr().out)
    assert page.open == []
    assert page.fetched == []
    assert page.links == {f"#{topic}" for topic in page.ids} == {f"#{topic}" for topic in TOPICS}


def _write_roff(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(["man", "--format", "roff"]) == 0
    path = folder / "retrain.1"
    path.write_text(capsys.readouterr().out, encoding="ascii")
    return path


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_no_complaint_about_the_man_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = _write_roff(tmp_path, capsys)
    done = subprocess.run(["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_finds_no_error_in_the_man_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = _write_roff(tmp_path, capsys)
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "error", page], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_man_shows_the_page_with_its_text_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = _write_roff(tmp_path, capsys)
    environment = {"PATH": "/usr/bin:/bin", "MANWIDTH": "200", "LC_ALL": "C.UTF-8", "MANPAGER": "cat", "TERM": "dumb"}
    done = subprocess.run(["man", "-l", page], capture_output=True, text=True, check=True, env=environment)
    if "unminimize" in done.stdout:
        pytest.skip("man is a placeholder on this system")
    assert done.stderr == ""
    shown = re.sub(r".\x08", "", done.stdout)
    for line in ("retrain - train language models", "retrain --resume logs/train", r"\boxed{...}", "EXIT STATUS"):
        assert line in shown


def test_reading_the_manual_imports_neither_the_schema_nor_pydantic() -> None:
    program = (
        "import sys; from retrain.cli import run; run(['man', '--topic', 'quickstart']);"
        "print(sorted({'pydantic', 'rich', 'retrain.config', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
