"""Every command in the pages on experiments is run, on the built-in model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from retrain.cli import run
from tests.report.folders import write_run

DOCS = Path(__file__).parents[2] / "docs"
RUN = """
[backend]
devices = "cpu"
adapter_path = "adapter"

[model]
model = "builtin:tiny"
lora_rank = 4

[training]
max_steps = 2
batch_size = 2
group_size = 4
max_tokens = 8
save_every = 1

[data]
source = "arithmetic"

[eval]
every = 2
max_examples = 4

[reward]
workers = 1
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command; a shell loop is unrolled, and continued lines are joined."""

    def unroll(match: re.Match[str]) -> str:
        name, values, body = match.groups()
        return "".join(body.replace(f"${name}", value) for value in values.split())

    for block in blocks(page, "bash"):
        text = re.sub(r"for (\w+) in ([^;]+); do\n(.*?)^done$", unroll, block, flags=re.M | re.S)
        for line in filter(None, map(str.strip, text.replace("\\\n", " ").splitlines())):
            words = shlex.split(line, comments=True)
            assert words[0] == "retrain", line
            yield words[1:]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_run.toml").write_text(RUN)
    return tmp_path


@pytest.mark.slow
def test_the_commands_of_the_research_guide_work(capsys: pytest.CaptureFixture[str]) -> None:
    given = list(commands("research-guide.md"))
    for words in given:
        assert run(words) == 0, words
    text = capsys.readouterr().out
    assert {words[0] for words in given} == {"my_run.toml", "compare", "diff"}
    assert "Noise floor" in text and "Options that differ" in text


@pytest.mark.slow
def test_the_commands_of_the_squeeze_page_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Long enough for an answer, or no group would teach anything and the adapter stayed zero.
    assert run(["my_run.toml", "--seed", "1", "--max-tokens", "48", "--batch-size", "4"]) == 0
    (folder / "squeeze.toml").write_text(blocks("squeeze.md", "toml")[0])
    for words in commands("squeeze.md"):
        assert run(words) == 0, words
    assert "Wrote the adapter at rank 2 to small_adapter" in capsys.readouterr().out
    exec(blocks("squeeze.md", "python")[0], {})
    assert (folder / "small_adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_the_commands_of_the_back_pressure_page_work(folder: Path) -> None:
    for words in commands("back-pressure.md"):
        assert run(words) == 0, words
    assert '"bp_action": "explore"' in (folder / "logs" / "train" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_the_commands_of_the_campaign_page_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = "logs/campaign_20261115_101500"
    settings = RUN.replace('adapter_path = "adapter"\n', "").replace("max_steps = 2\n", "")
    campaign = "[campaign]\nseeds = [1, 2]\nmax_steps = 1\nshare_model = true\n"
    conditions = "".join(
        f'[[campaign.conditions]]\nadvantage_mode = "{mode}"\ntransform_mode = "none"\n' for mode in ("grpo", "maxrl")
    )
    text = f'{settings}\n[logging]\nlog_dir = "{place}"\n{campaign}{conditions}'
    (folder / "campaign.toml").write_text(text)
    write_run(folder / "exp" / "one", 1)
    given = list(commands("campaigns.md"))
    for words in given:
        assert run(words) == 0, words
    assert {words[0] for words in given} == {
        "explain", "campaign.toml", "--resume", "status", "top", "compare", "report"
    }  # fmt: skip
    assert "Campaign of 4 runs" in capsys.readouterr().out
    assert (folder / place / "report.html").is_file()


@pytest.mark.slow
def test_the_commands_of_the_capacity_page_work(capsys: pytest.CaptureFixture[str]) -> None:
    given = list(commands("capacity-planning.md"))
    for words in given:
        assert run(words) == 0, words
    assert {words[0] for words in given} == {"plan", "my_run.toml"}
    assert "median" in capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_of_the_logging_page_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for words in commands("logging.md"):
        absent = "--trackio-project" in words and find_spec("trackio") is None
        assert run(words) == (2 if absent else 0), words
    scope: dict[str, list[float]] = {}
    exec(blocks("logging.md", "python")[0], scope)
    assert len(scope["rewards"]) == 2


@pytest.mark.slow
def test_the_commands_of_the_reports_page_work(folder: Path) -> None:
    for mode in ("grpo", "maxrl"):
        write_run(folder / "logs" / "sweep" / mode, 1, mode)
    write_run(folder / "logs" / "train", 1, "grpo")
    for words in commands("reports.md"):
        if words[0] == "ui":
            assert serves(words)
        else:
            has_plots = "--png" in words or (words[0] == "card" and "--no-plots" not in words)
            absent = has_plots and find_spec("matplotlib") is None
            assert run(words) == (2 if absent else 0), words
    assert (folder / "report.html").is_file() and (folder / "logs" / "sweep" / "report.html").is_file()


def serves(words: list[str]) -> bool:
    """Whether the page is there while the command runs; on a free port, so that tests do not meet."""
    command = [sys.executable, "-u", "-m", "retrain", *words[:-1], "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            with urllib.request.urlopen(server.stdout.readline().split()[2], timeout=60) as answer:
                return b"<title>retrain report</title>" in answer.read()
        finally:
            server.kill()
