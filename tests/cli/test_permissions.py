"""Files and folders of another user, as on a shared machine. Root may read them all, so it gives that up here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from folders import write_run

NO_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
USER = NO_RIGHTS if os.geteuid() == 0 else []
Call = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[data]\nsource = "arithmetic"\n'


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Runs commands in a folder with the private folder `theirs`."""
    (tmp_path / "retrain.toml").write_text(CONFIG + "[training]\nmax_steps = 1\nmax_tokens = 8\n")
    (tmp_path / "theirs").mkdir(mode=0o000)
    if (USER and shutil.which("setpriv") is None) or _may_list(tmp_path / "theirs"):
        pytest.skip("root cannot give up its rights here")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*USER, sys.executable, "-m", "retrain", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    yield run
    (tmp_path / "theirs").chmod(0o700)


def _may_list(folder: Path) -> bool:
    return subprocess.run([*USER, "ls", str(folder)], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ["retrain.toml", "--log-dir", "theirs"],
        ["doctor", "retrain.toml", "--log-dir", "theirs/new"],
        ["explain", "retrain.toml", "--resume", "theirs/run"],
        ["plan", "retrain.toml", "--data-source", "jsonl", "--data-path", "theirs/a.jsonl"],
        ["retrain.toml", "--model", "./theirs/model"],
        ["doctor", "retrain.toml", "--adapter-path", "theirs/adapter"],
    ],
    ids=lambda words: f"{words[0]}-{words[-1]}",
)
def test_a_path_in_a_private_folder_is_refused_in_a_sentence(call: Call, words: list[str]) -> None:
    done = call(*words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"= '{words[-1]}' is in a folder that you have no permission to enter.  Try: another path" in done.stderr


def test_explain_tells_that_a_run_cannot_write_its_logs(call: Call, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir(mode=0o555)
    done = call("explain", "retrain.toml", "--log-dir", "full/run")
    assert done.returncode == 1
    assert "full cannot be written to.  Try: another --log-dir" in done.stdout


def test_private_runs_are_left_out_and_one_that_is_named_is_refused(call: Call, tmp_path: Path) -> None:
    write_run(tmp_path / "logs" / "mine", [0.1, 0.2])
    write_run(tmp_path / "logs" / "private", [0.1, 0.2])
    (tmp_path / "logs" / "private").chmod(0o000)
    done = call("status", "logs")
    assert done.returncode == 0 and "mine" in done.stdout and "private" not in done.stdout
    for words in (["status", "theirs/logs"], ["--resume", "logs/private"], ["init", "theirs/a.toml"]):
        done = call(*words)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr and "permission" in done.stderr
    (tmp_path / "logs" / "private").chmod(0o700)


def test_a_reader_that_leaves_early_is_not_complained_about(tmp_path: Path) -> None:
    # Without PYTHONUNBUFFERED, output stays in a buffer until the program exits.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "retrain", "--version"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, check=False)
    os.close(write_end)
    assert done.stderr == b""
