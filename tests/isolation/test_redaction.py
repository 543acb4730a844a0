"""What is hidden in text of third-party code, and what such code can see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from retrain.cli import run
from retrain.config import TrainConfig
from retrain.errors import PluginError
from retrain.isolation.redaction import public_environment, redact, redact_all
from retrain.isolation.tracebacks import format_traceback
from retrain.rewards.custom import to_value
from retrain.rewards.wire import read_tail
from retrain.tracking import completions_table
from retrain.tracking.console import Console
from retrain.tracking.jsonl import JsonlTracker
from retrain.types import Completion, Example, Group, Score


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://user:hunter2@host.example/v1 failed", "GET https://***@host.example/v1 failed"),
        ("postgres://u:p@ss@db/x", "postgres://***@db/x"),
        ("http://me@corp.example:hunter2@proxy:8080/", "http://***@proxy:8080/"),
        ("https://0123456789abcdef@host/x ssh://git@host", "https://***@host/x ssh://git@host"),
        ("Authorization: Basic bWVAY29ycDpodW50ZXIy", "Authorization: Basic ***"),
        ('{"Authorization": "Basic bWVAY29ycDpodW50ZXIy"}', '{"Authorization": "Basic ***"}'),
        ("https://h/v1?api_key=abc123&x=1", "https://h/v1?api_key=***&x=1"),
        ("https://h/v1?x=1&access_token=abc", "https://h/v1?x=1&access_token=***"),
        ("Authorization: Bearer abcdefghijkl", "Authorization: Bearer ***"),
        ("key sk-proj-0123456789abcdefXYZ!", "key ***!"),
        ("hf_0123456789abcdefghijklmnop", "***"),
    ],
)
def test_a_password_or_key_in_a_text_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "see http://localhost:8000/v1 and a@b.example",
        "http://h:80/path@2",
        "Basic arithmetic, Authorization: Basic authentication is required",
        "ssh://git@host:22/x and http://me@h:80 a@b",
        "x = 3? y=4 & z=5",
        "Basic arithmetic, bearer of news",
        "a risk-free task",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "text", ["http://" + ":" * 100_000 + " a@b", "http://" + "a:" * 50_000 + " x@y", "http://" + "@" * 100_000]
)
def test_long_text_takes_no_time(text: str) -> None:
    began = time.process_time()
    assert redact(text) == text
    assert time.process_time() - began < 1.0


def test_a_key_may_begin_like_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "/bPxRfiCYEXAMPLE/KEYwJalrXUtnFEMI")
    monkeypatch.setenv("SSH_KEY", str(tmp_path / "not_yet"))
    monkeypatch.setenv("OTHER_KEY", "//abcdefghijklmnop")
    assert redact("key=/bPxRfiCYEXAMPLE/KEYwJalrXUtnFEMI //abcdefghijklmnop") == "key=*** ***"
    assert redact(f"{tmp_path}/not_yet is missing") == f"{tmp_path}/not_yet is missing"


def test_a_secret_is_hidden_as_a_url_quotes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_KEY", "open/sesame+99\udcff")
    assert redact("GET /?q=open%2Fsesame%2B99%FF, /open/sesame%2B99%FF") == "GET /?q=***, /***"


def test_text_of_a_reward_is_redacted_before_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    with pytest.raises(PluginError, match=r"returned 'x{70}\*\*\*' \(str\)"):
        to_value("x" * 70 + "opensesame99")
    error = RuntimeError("opensesame99" + "x" * 3995)
    assert "same99" not in format_traceback(error)
    printed = tmp_path / "printed"
    printed.write_text("opensesame99" + "x" * 3995)
    with printed.open("rb") as file:
        assert read_tail(file.fileno()) == "***" + "x" * 3995


def test_secrets_of_the_environment_are_hidden_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    monkeypatch.setenv("DATABASE_URL", "postgres://root:correcthorse@db/x")
    monkeypatch.setenv("SHORT_TOKEN", "true")
    monkeypatch.setenv("MONKEY", "bananabanana")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.sock")
    text = "opensesame99, correcthorse, true, bananabanana, /tmp/agent.sock"
    assert redact(text) == "***, ***, true, bananabanana, /tmp/agent.sock"
    row = {"detail": "opensesame99", "transcript": ({"role": "tool", "content": "opensesame99"},), "reward": 1.0}
    assert redact_all(row) == {"detail": "***", "transcript": [{"role": "tool", "content": "***"}], "reward": 1.0}


def test_secrets_are_hidden_in_every_form_they_are_printed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "MIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC"
    key = f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----"
    values = {
        "SSH_PRIVATE_KEY": "first line 1234\nsecond line 5678",
        "DB_PASSWORD": 'it\'s "a" back\\slash',
        "PGPASSWORD": "hunter22",
        "MYTOKEN": "plainvalue99",
        "GH_PAT": "schlüssel-ß-99",
        "MAIL_PASSWORD": "abc1234",
        "SERVICE_ACCOUNT_JSON": json.dumps({"private_key": key}),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    encoded = {name: value.encode() for name, value in values.items()}
    texts = repr(values), ascii(values), repr(encoded), json.dumps(values), json.dumps(values, ensure_ascii=False)
    for text in (*texts, "\n".join(values.values())):
        hidden = redact(text)
        for part in ("1234", "5678", "slash", "hunter22", "plainvalue", "schl", "MIIE", "hkiG"):
            assert part not in hidden, (part, hidden)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "bananabanana")
    assert redact("bananabanana glpat-abcdefghijklmnopqrst") == "bananabanana ***"


def test_foreign_code_sees_public_variables_and_those_that_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    monkeypatch.setenv("MY_GRADER", "strict")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("https_proxy", "http://user:hunter2@proxy:3128")
    seen = public_environment()
    assert "PATH" in seen and seen["LC_ALL"] == "C.UTF-8"
    assert not {"ACME_API_KEY", "MY_GRADER", "https_proxy"} & set(seen)
    seen = public_environment(["MY_*", "https_proxy"])
    assert (seen["MY_GRADER"], seen["https_proxy"]) == ("strict", "http://user:hunter2@proxy:3128")


def test_console_logs_tables_and_errors_hide_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    stream = StringIO()
    Console(stream).print("the grader said opensesame99")
    assert stream.getvalue() == "the grader said ***\n"
    transcript = ({"role": "tool", "content": "ACME_API_KEY=opensesame99"},)
    completion = Completion(np.arange(3), np.zeros(3), "opensesame99", "stop", transcript=transcript)
    group = Group(Example("2 + 2?", "4"), np.arange(2), (completion,), (Score(0.0, "error", "x opensesame99"),))
    tracker = JsonlTracker(tmp_path)
    tracker.start(TrainConfig())
    tracker.log(0, {"mean_reward": 0.0, "condition": "grpo+none"}, [group])
    tracker.finish()
    (row,) = (tmp_path / "emergence" / "generations.jsonl").read_text().splitlines()
    assert row.count("***") == 3 and "opensesame99" not in row
    assert completions_table(0, [group])["data"][0][2] == "***"
    assert run(["no-such-file-opensesame99.toml"]) == 2
    assert "no-such-file-***.toml" in capsys.readouterr().err


# A progress bar may write once more as the program exits, and then nothing may be left in a buffer of its own.
@pytest.mark.parametrize("end", ["", "os._exit(0)"])
def test_what_plugins_print_from_the_training_process_hides_secrets(end: str, tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text(
        "import logging, os, sys, warnings\n"
        "from retrain.isolation.redaction import redacted_output\n"
        "with redacted_output():\n"
        "    bar = sys.stdout\n"
        "    print('key', os.environ['ACME_API_KEY'], '\\u2713')\n"
        "    warnings.warn(os.environ['ACME_API_KEY'])\n"
        "    logging.error('from https://me:hunter2222@host.example')\n"
        "    sys.stdout.write('no newline')\n"
        "print(', and as before', flush=True)\n"
        f"bar.write('a bar\\n')\n{end}\n"
    )
    own = {"ACME_API_KEY": "opensesame99", "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ | own, check=True)
    assert ran.stdout == "key *** \\u2713\nno newline, and as before\na bar\n"
    assert "UserWarning: ***" in ran.stderr and "ERROR:root:from https://***@host.example" in ran.stderr
    assert "opensesame99" not in ran.stderr and "Exception" not in ran.stderr


@pytest.mark.slow
def test_the_command_line_hides_secrets_that_a_plugin_prints(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import os\nprint('loaded with', os.environ['ACME_API_KEY'])\n"
        "class Source:\n    def __init__(self, section): ...\n    def load(self): raise ValueError\n"
    )
    (tmp_path / "retrain.toml").write_text(
        '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 8\n'
        '[data]\nsource = "loud.Source"\n'
    )
    variables = os.environ | {"ACME_API_KEY": "opensesame99"}
    command = [sys.executable, "-m", "retrain", "retrain.toml"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=variables, check=False)
    assert "loaded with ***" in ran.stdout and "opensesame99" not in ran.stdout + ran.stderr
