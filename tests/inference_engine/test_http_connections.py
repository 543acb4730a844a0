"""The connections below the client, against a server that writes exactly the given bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from retrain.inference_engine.http.client import Client, RequestRejected, Transient

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ONE = OK + b'Content-Length: 7\r\n\r\n{"a":1}'
CUT = None
"""A script's word for: close the connection."""


class Scripted:
    """Accepts connections, one after the other; each answers its requests by a script, and is then closed."""

    def __init__(self, scripts: list[list[bytes | None]]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.scripts, self.received = scripts, [b""] * len(scripts)
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        for at, script in enumerate(self.scripts):
            connection, _ = self.listener.accept()
            with connection:
                for reply in script:
                    self.received[at] += connection.recv(65536)
                    if reply is CUT:
                        break
                    connection.sendall(reply)
            self.closed.set()
        self.listener.close()


@pytest.fixture
def client() -> Iterator[Client]:
    one = Client(5.0)
    yield one
    one.close()


Serve = Callable[..., Scripted]


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[Scripted] = []

    def start(*scripts: list[bytes | None]) -> Scripted:
        started.append(Scripted(list(scripts)))
        return started[-1]

    yield start
    for one in started:
        one.thread.join(5)
        assert not one.thread.is_alive()


def test_a_connection_is_used_again_and_a_request_is_one_packet(client: Client, serve: Serve) -> None:
    server = serve([ONE, ONE])
    for _ in range(2):
        assert client.run(client.call(f"{server.address}/v1/x?y=1", {"n": 1})) == {"a": 1}
    assert server.received[0].count(b"POST /v1/x?y=1 HTTP/1.1\r\n") == 2
    assert server.received[0].endswith(b'Content-Length: 8\r\n\r\n{"n": 1}')


def test_what_follows_an_answer_is_not_taken_for_the_next_one(client: Client, serve: Serve) -> None:
    server = serve([ONE + ONE.replace(b"1}", b"9}")], [ONE.replace(b"1}", b"2}")])
    assert [client.run(client.call(server.address)) for _ in range(2)] == [{"a": 1}, {"a": 2}]


def test_a_kept_connection_that_the_server_has_closed_is_not_an_error(client: Client, serve: Serve) -> None:
    server = serve([ONE], [ONE])
    client.run(client.call(server.address))
    assert server.closed.wait(5)
    assert client.run(client.call(server.address)) == {"a": 1}


def test_a_kept_connection_that_closes_on_the_request_is_replaced_once(client: Client, serve: Serve) -> None:
    server = serve([ONE, CUT], [ONE])
    client.run(client.call(server.address))
    assert client.run(client.call(server.address, {})) == {"a": 1}
    server = serve([ONE, CUT], [CUT])
    client.run(client.call(server.address))
    with pytest.raises(Transient, match="closed before a response") as failure:
        client.run(client.call(server.address, {}))
    assert failure.value.down


@pytest.mark.parametrize(
    "answer",
    [
        OK + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n',
        OK + b'Connection: close\r\n\r\n{"a":1}',
        b"HTTP/1.1 100 Continue\r\n\r\n" + ONE,
    ],
    ids=["chunked", "until it closes", "after an interim answer"],
)
def test_every_way_to_end_an_answer_is_understood(client: Client, serve: Serve, answer: bytes) -> None:
    server = serve([answer])
    assert client.run(client.call(server.address)) == {"a": 1}


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (OK + b'Content-Length: 70\r\n\r\n{"a', "closed connection without sending complete message body"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "RemoteProtocolError"),
        (OK + b'Content-Length: 3\r\n\r\n{"a', "invalid JSON"),
    ],
)
def test_half_an_answer_or_another_protocol_is_a_failure_that_may_pass(
    client: Client, serve: Serve, answer: bytes, sentence: str
) -> None:
    server = serve([answer])
    with pytest.raises(Transient, match=sentence):
        client.run(client.call(server.address))


def test_a_time_out_is_not_sent_again(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Transient, match="no reply within 0 s") as failure:
            client.run(client.call(address, {}, timeout_s=0.2))
        assert not failure.value.down
        silent.accept()[0].close()
        silent.settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent.accept()


def test_a_closed_port_and_an_unknown_host_are_down(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for address, sentence in (
        (f"http://127.0.0.1:{port}", "ConnectionRefused"),
        ("http://no.such.invalid", "gaierror"),
    ):
        with pytest.raises(Transient, match=sentence) as failure:
            client.run(client.call(address))
        assert failure.value.down


def test_a_redirection_is_a_refusal(client: Client, serve: Serve) -> None:
    server = serve([b"HTTP/1.1 307 x\r\nLocation: /elsewhere\r\nContent-Length: 5\r\n\r\nmoved"])
    with pytest.raises(RequestRejected, match="307: moved"):
        client.run(client.call(server.address))
