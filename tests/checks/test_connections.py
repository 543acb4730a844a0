"""Servers that are asked before anything is loaded."""

from __future__ import annotations

import http.server
import socket
import threading
from pathlib import Path

import pytest

from retrain.checks.connections import announce_wait, check_not_refused, explain_no_judge, explain_no_response
from retrain.cli import run, train
from retrain.config import load_config
from retrain.config.reference import starter
from retrain.errors import BackendError, RetrainError

ABSENT = "http://127.0.0.1:9"


def announced(rank: int = 32, **inference: object) -> list[str]:
    lines: list[str] = []
    options = {"model.model": "builtin:tiny", "model.lora_rank": rank} | {
        f"inference.{key}": value for key, value in inference.items()
    }
    announce_wait(load_config(None, options), lines.append)
    return lines


def test_a_server_that_is_absent_is_announced_with_the_wait_and_its_command() -> None:
    (line,) = announced(engine="vllm", url=ABSENT, wait_s=300.0)
    assert line.startswith(
        f"No vllm server responds at {ABSENT}: [Errno 111] Connection refused. "
        "The run will wait up to 300 s for it (--inference-wait-s). To start one: "
    )
    flags = "--port 9 --enable-lora --max-lora-rank 32 --logprobs-mode processed_logprobs"
    assert "vllm serve " in line and line.endswith(flags)


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("https://other.example/v1/models?key=abc", "it redirects to https://other.example, which is not followed."),
        ("https://other.example:none/v1", "it redirects to what is no URL."),
        ("/v1/models/", ""),
    ],
)
def test_a_judge_that_redirects_to_another_server_is_none(location: str, problem: str) -> None:
    class Redirecting(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(308)
            self.send_header("Location", location)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        assert explain_no_judge(f"http://127.0.0.1:{server.server_port}/v1/models", "sk-1") == problem
        server.shutdown()


@pytest.mark.parametrize(
    ("engine", "rank", "flag"), [("vllm", 4, "8"), ("vllm", 33, "64"), ("vllm", 300, "320"), ("sglang", 33, "33")]
)
def test_the_command_takes_adapters_of_the_rank(engine: str, rank: int, flag: str) -> None:
    (line,) = announced(rank, engine=engine, url=ABSENT)
    assert f" --max-lora-rank {flag} " in line


def test_nothing_is_announced_for_a_server_that_responds_or_is_started_by_the_run() -> None:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        assert announced(engine="vllm", url=f"http://127.0.0.1:{server.server_port}") == []
        server.shutdown()
    assert announced(engine="vllm", launch=True) == announced(engine="pytorch") == []


def test_a_run_announces_the_wait_before_it_loads_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise RetrainError("loading")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_train", load)
    (tmp_path / "run.toml").write_text(starter("demo"))
    assert run(["run.toml", "--inference-engine", "vllm", "--inference-url", ABSENT]) == 1
    output = capsys.readouterr()
    assert f"No vllm server responds at {ABSENT}" in output.out and "error: loading" in output.err


def test_no_response_has_a_reason() -> None:
    assert explain_no_response(ABSENT) == "[Errno 111] Connection refused."


def test_a_port_that_does_not_speak_http_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert explain_no_response(url) == "what listens there does not speak HTTP."


def test_a_url_without_a_port_suggests_that_of_its_scheme() -> None:
    (line,) = announced(engine="vllm", url="http://127.0.0.1", wait_s=1.0)
    assert " --port 80 --enable-lora " in line


def test_a_tinker_address_is_tried_without_its_password_and_not_at_all_behind_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # By itself, no proxy.
    monkeypatch.setenv("no_proxy", "localhost")
    with pytest.raises(BackendError, match=r"at http://127.0.0.1:9: .*refused") as caught:
        check_not_refused("http://user:secret99@127.0.0.1:9")
    assert "secret99" not in str(caught.value)
    with pytest.raises(BackendError, match="nonnumeric port"):
        check_not_refused("http://localhost:abc")
    monkeypatch.setenv("ALL_PROXY", ABSENT)
    check_not_refused(ABSENT)
