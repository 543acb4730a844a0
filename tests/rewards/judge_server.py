"""A judge on the loopback device that speaks OpenAI's chat completions and does what a test scripts."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FENCE = re.compile(r"^=====[0-9a-f]{32}=====$", re.MULTILINE)


@dataclass(frozen=True)
class Reply:
    """What goes back: a status, a body (an object becomes JSON, text stays), headers, and a wait before it."""

    body: object
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0


def completion(content: object, prompt_tokens: int = 100, completion_tokens: int = 1) -> Reply:
    """The usual answer."""
    return Reply(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"},
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }
    )


def refusal(status: int, message: str, headers: dict[str, str] | None = None, code: str = "") -> Reply:
    """An error as OpenAI words it."""
    return Reply({"error": {"message": message, "type": "error", "code": code}}, status, headers or {})


def fenced_answer(body: dict[str, Any]) -> tuple[str, str]:
    """The answer as a careful judge reads it, and all that stands outside: the fence is the one the system names."""
    system, user = (message["content"] for message in body["messages"])
    (fence,) = FENCE.findall(system.split(" that read ")[1].splitlines()[0])
    before, answer, after = user.split(f"{fence}")
    return answer.strip("\n"), before + after


def agree(body: dict[str, Any]) -> Reply:
    """Yes when the fenced answer ends in the reference."""
    answer, outside = fenced_answer(body)
    reference = outside.split("Reference answer:\n")[1].split("\n")[0]
    return completion("yes" if re.findall(r"\d+", answer)[-1:] == [reference] else "no")


class JudgeServer:
    """Answers each request by `script(body)`; keeps bodies and headers, and the most requests at a time."""

    def __init__(self, script: Callable[[dict[str, Any]], Reply] = agree) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.busiest = 0
        self.is_down = False
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.answer(self, body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:
                """A client that hung up is part of some tests."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if self.is_down:  # connections that were kept alive outlast the listening socket
            handler.close_connection = True
            return
        with self.lock:
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        reply = (
            refusal(404, f"no route {handler.path}") if handler.path != "/v1/chat/completions" else self.script(body)
        )
        time.sleep(reply.wait_s)
        with self.lock:
            self.busy -= 1
        data = reply.body.encode() if isinstance(reply.body, str) else json.dumps(reply.body).encode()
        handler.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def __enter__(self) -> JudgeServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_down = True
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
