"""The manual, the docs site and the README are accurate: current, linked, loadable, and naming real commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from retrain.analysis.health import check_health
from retrain.cli import COMMANDS, app, run
from retrain.cli.sync import generated_files
from retrain.config import load_config
from retrain.config.options import all_options
from retrain.manual import read_manual

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MANUAL = ROOT / "retrain" / "manual" / "retrain.md"
PAGES = [*sorted(DOCS.glob("**/*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"\s+#\s.*$|^#.*$", re.MULTILINE)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _fences(path: Path, language: str) -> list[str]:
    return [found[2] for found in _FENCE.finditer(path.read_text(encoding="utf-8")) if found[1] == language]


def _prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def _anchors(path: Path) -> set[str]:
    """The ids that mkdocs gives to headings."""
    titles = re.findall(r"^#+ (.+)$", _prose(path), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.strip().lower())) for title in titles}


def test_the_manual_is_current() -> None:
    assert run(["man", "--check"]) == 0


def test_generated_docs_are_current() -> None:
    files = generated_files(ROOT)
    assert DOCS / "configuration.md" in files
    stale = [_name(path) for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make sync`"


def _nav_pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from _nav_pages(child)


def test_the_navigation_lists_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(_nav_pages(nav)) == sorted(str(path.relative_to(DOCS)) for path in DOCS.glob("**/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_internal_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in _anchors(path)):
            broken.append(link)
    assert broken == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="mkdocstrings is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    # Not --quiet: a warning that is not printed is not counted either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<(?:script|link)[^>]+(?:src|href)="https?://[^"]+\.(?:js|css)', page) == []


@pytest.mark.parametrize("page", [*PAGES, MANUAL], ids=_name)
def test_toml_in_the_docs_loads(page: Path, tmp_path: Path) -> None:
    # What begins with a [project] table belongs in somebody's pyproject.toml.
    blocks = [text for text in _fences(page, "toml") if not text.startswith("[project")]
    for index, text in enumerate(blocks):
        path = tmp_path / f"block_{index}.toml"
        path.write_text(text, encoding="utf-8")
        load_config(path)


def _shell_commands(page: Path) -> Iterator[list[str]]:
    """Every call of retrain in a shell block or in backticks, as words. Brackets mark a synopsis, not a call."""
    blocks = (_COMMENT.sub("", text).replace("\\\n", " ") for text in _fences(page, "bash"))
    spans = re.findall(r"`(retrain [^`]+)`", _prose(page))
    for line in [*(line.strip() for block in blocks for line in block.splitlines()), *spans]:
        if re.match(r"retrain\b(?!\.)", line) and "[" not in line:
            yield shlex.split(line)[1:]


def _load(name: str) -> click.Command:
    command = app.get_command(click.Context(app), name)
    assert command is not None
    return command


@pytest.mark.parametrize("page", [*PAGES, MANUAL], ids=_name)
def test_commands_in_the_docs_exist_with_their_flags(page: Path) -> None:
    wrong = []
    for words in _shell_commands(page):
        first = words[0] if words else ""
        if first in ("COMMAND", "--version", "--help"):
            continue
        if first and not first.startswith("--") and first not in COMMANDS and not first.endswith(".toml"):
            wrong.append(f"there is no command: retrain {first}")
            continue
        command = _load(first if first in COMMANDS else "train")
        known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        # replay takes the flags of a configuration without declaring each.
        known |= {"--help"} | {flag for option in _load("train").params for flag in option.opts if first == "replay"}
        wrong += [
            f"{first or 'retrain'} has no flag {word}" for word in words if word[:2] == "--" and word not in known
        ]
    assert wrong == []


def test_percentages_are_written_one_way() -> None:
    # As in the lines of a step, which say correct=18.8%.
    texts = [*PAGES, *sorted((ROOT / "retrain").glob("**/*.py")), *sorted((ROOT / "retrain").glob("**/*.js"))]
    spaced = re.compile(r"[0-9}] %(?!\w)")
    assert [_name(path) for path in texts if spaced.search(path.read_text(encoding="utf-8"))] == [], "write 5%"


def test_make_targets_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"^make ([\w-]+)", page.read_text("utf-8"), re.MULTILINE)}
    named |= {name for page in PAGES for name in re.findall(r"`make ([\w-]+)`", page.read_text(encoding="utf-8"))}
    assert named - targets == set()


def test_the_python_of_the_readme_works() -> None:
    reward: dict[str, Any] = {}
    for text, names in zip(_fences(ROOT / "README.md", "python"), (reward, {}), strict=True):
        exec(text, names)
    assert [reward["score"](text, "5") for text in ("3 + 2 = 5", "6", "none")] == [1.0, 0.0, 0.0]


def test_dependencies_each_have_a_reason() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    design = (DOCS / "design.md").read_text(encoding="utf-8")
    names = set(re.findall(r'^\s*(?:\w+ = \[)?"([a-z][\w-]+)>=', project, re.MULTILINE)) - {"hatchling"}
    assert len(names) > 10
    assert sorted(name for name in names if name not in design) == []


def test_troubleshooting_names_real_options_metrics_and_checks() -> None:
    page = DOCS / "troubleshooting.md"
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", _prose(page)))
    assert len(named) > 30
    metrics = set(re.findall(r"`([\w/]+)`", (DOCS / "logging.md").read_text(encoding="utf-8")))
    assert named - metrics - {option.key for option in all_options()} == set()
    checks = check_health([])
    assert set(re.findall(r"The check `([^`]+)`", _prose(page))) == {check.name for check in checks}
    assert {check.topic for check in checks} <= _anchors(page)
    manual = read_manual()
    assert all("Fix" in str(manual.find(check.topic).blocks) for check in checks)
