"""A server of ours on the loopback interface that has vLLM's wire format, with a small real model.

It holds a policy of its own and loads adapters from disk, as a real one does; a test tells it how to misbehave.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from e2e.tiny import PlainTokenizer, config_for, policy_for
from safetensors.torch import load_file

from retrain.config.schema import Inference
from retrain.inference_engine.http.proof import PolicyScorer, Row
from retrain.inference_engine.http.startup import MEANINGS
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.types import Sampling

Reply = tuple[int, Any]


@dataclass
class Loopback:
    """One server. Its fields may be changed while it runs."""

    model: Path
    name: str = "tiny"
    meaning: str = "sampled"
    context: int = 256
    key: str = ""
    loads_adapters: bool = True
    max_rank: int = 64
    rank_status: int = 400
    """How an adapter above that is answered."""
    sends_ids: bool = True
    sends_logprobs: bool = True
    takes_n: bool = True
    token_shift: int = 0
    delay_s: float = 0.0
    faults: list[Callable[[dict[str, Any]], Reply | bytes | None]] = field(default_factory=list)
    """Each is used up by one completion request, and answers in place of it; None lets the request through."""
    alter: Callable[[dict[str, Any], list[dict[str, Any]]], list[dict[str, Any]]] = lambda body, choices: choices
    """What stands between server and client: it is given a request and its choices, and gives what is sent."""
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
    """What becomes of a request before the server sees it."""
    sends_prompt_ids: bool = True
    serves_instead: str = ""
    """An adapter that is used whatever is asked for, as if somebody had swapped it."""
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = config_for(self.model)
        self.policy = policy_for(config, trained=False)
        self.base = {name: tensor.clone() for name, tensor in self.policy.adapter_state().items()}
        self.engine = PyTorchEngine(self.policy, Inference(), PlainTokenizer(), lambda *_: None)
        self.scorer = PolicyScorer(self.policy)
        self.adapters: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Loopback:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, at the port of last time if there was one; adapters are forgotten."""
        self.adapters.clear()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: dict[str, Any]) -> None:
                key = self.headers.get("Authorization", "").removeprefix("Bearer ")
                reply = server.respond(self.path, body, key)
                if isinstance(reply, bytes):
                    self.wfile.write(reply)
                    self.close_connection = True
                    return
                status, content = reply
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that hung up

        self.http = Listener(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_address[1]
        self.down = False
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Refuse connections from now on, and drop those that are open at their next request."""
        self.down = True
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def respond(self, path: str, body: dict[str, Any], key: str) -> Reply | bytes:
        if self.down:
            return b""
        if self.key and key != self.key and path != "/health":
            return 401, {"error": "Unauthorized"}
        routes: dict[str, Callable[[dict[str, Any]], Reply | bytes]] = {
            "/health": lambda _: (200, {}),
            "/v1/models": lambda _: (200, {"data": self.listed()}),
            "/tokenize": self.tokenize,
            "/v1/completions": self.complete,
            "/v1/load_lora_adapter": self.load,
            "/v1/unload_lora_adapter": self.unload,
        }
        if path not in routes or ("lora" in path and not self.loads_adapters):
            return 404, {"detail": "Not Found"}
        return routes[path](body)

    def listed(self) -> list[dict[str, Any]]:
        own = {"id": self.name, "parent": None, "root": str(self.model), "max_model_len": self.context}
        return [own, *({"id": name, "parent": self.name} for name in self.adapters)]

    def tokenize(self, body: dict[str, Any]) -> Reply:
        return 200, {"tokens": [ord(character) + self.token_shift for character in body["prompt"]]}

    def load(self, body: dict[str, Any]) -> Reply:
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not path.is_dir():
            return 404, {"error": {"message": f"Loading lora {name} failed: No adapter found for {path}"}}
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > self.max_rank:
            return self.rank_status, {
                "error": {"message": f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."}
            }
        tensors = load_file(str(path / "adapter_model.safetensors"))
        self.adapters[name] = {key.replace(".weight", ".default.weight"): value for key, value in tensors.items()}
        self.events.append(f"load {name}")
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: dict[str, Any]) -> Reply:
        name = body["lora_name"]
        if name not in self.adapters:
            return 404, {"error": {"message": f"The lora adapter '{name}' cannot be found."}}
        del self.adapters[name]
        self.events.append(f"unload {name}")
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def complete(self, body: dict[str, Any]) -> Reply | bytes:
        self.asked.append(body)
        time.sleep(self.delay_s)
        if self.faults:
            fault = self.faults.pop(0)(body)
            if fault is not None:
                return fault
        model = self.serves_instead or body["model"]
        if model != self.name and model not in self.adapters:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            return 400, {"error": {"message": f"This model's maximum context length is {self.context} tokens."}}
        choices = self.choices(self.change(body), self.adapters.get(model))
        return 200, {"choices": self.alter(body, choices)}

    def choices(self, body: dict[str, Any], adapter: dict[str, Any] | None) -> list[dict[str, Any]]:
        sampling = Sampling(
            max_tokens=body["max_tokens"],
            n=body["n"] if self.takes_n else 1,
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(0, body.get("top_k", 0)),
            min_p=body.get("min_p", 0.0),
            repetition_penalty=body.get("repetition_penalty", 1.0),
            seed=body["seed"],
        )
        prompt = np.array(body["prompt"])
        with self.lock:
            self.policy.load_adapter_state(self.base if adapter is None else adapter)
            self.engine.sync(self.policy)
            drawn = self.engine.generate([prompt], sampling)[0]
            rows = [Row(prompt, c.token_ids_T, c.logprobs_T) for c in drawn]
            # Greedy decoding is at no temperature, so what is reported of it is of none.
            meaning = "raw" if sampling.is_greedy else self.meaning
            scored = self.scorer.logprobs(
                rows, MEANINGS[meaning](replace(sampling, temperature=sampling.temperature or 1.0))
            )
        choices = []
        for index, (completion, logprobs) in enumerate(zip(drawn, scored, strict=True)):
            choice: dict[str, Any] = {"index": index, "text": completion.text, "finish_reason": "stop"}
            choice["token_ids"] = completion.token_ids_T.tolist() if self.sends_ids else None
            choice["logprobs"] = {"token_logprobs": [float(v) for v in logprobs]} if self.sends_logprobs else None
            choice["prompt_token_ids"] = body["prompt"] if self.sends_prompt_ids else None
            choices.append(choice)
        return choices
