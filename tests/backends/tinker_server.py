"""A Tinker service on the loopback: the wire format of the real one over a small model that really learns.

Gradients, updates and samples are computed with PyTorch. The losses are written down here a second time, in the
service's own terms: sums over tokens, absolute clip thresholds, raw log-probs.
"""

from __future__ import annotations

import copy
import datetime
import json
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as wire
from torch import Tensor

from retrain.config.schema import Inference, Lora, Model
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling.attention import PackedAttention
from retrain.modeling.policy import Policy, load_policy
from retrain.modeling.tokens import load_tokenizer
from retrain.types import Completion, IntArray, Sampling

KEY = "tml-loopback"
CPU = torch.device("cpu")
PROTOBUF = "application/x-protobuf"


class Refused(Exception):
    """An answer with an HTTP status of its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class State:
    """Weights and optimizer as they were saved."""

    adapter: dict[str, Tensor]
    adam: dict[str, Any] | None
    base_model: str
    rank: int


class Trainee:
    """One model that is being trained."""

    def __init__(self, base_model: str, rank: int, seed: int) -> None:
        self.base_model = base_model
        self.rank = rank
        self.policy = load_policy(Model(model=base_model, lora_rank=rank), Lora(), seed, CPU, lambda line: None)
        self.parameters = [p for p in self.policy.adapted.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(self.parameters)

    def forward_backward(self, request: Any) -> Any:
        output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        settings = dict(request.loss_fn_config)
        inputs = [{name: tensor_of(value) for name, value in datum.loss_fn_inputs.items()} for datum in request.data]
        logprobs = raw_logprobs(self.policy, [tokens_of(d) for d in request.data], [t["target_tokens"] for t in inputs])
        loss = torch.stack(
            [LOSSES[request.loss_fn](*row, settings) for row in zip(logprobs, inputs, strict=True)]
        ).sum()
        if not request.forward_only:
            loss.backward()
        rows = [row.detach().numpy().astype(np.float32) for row in logprobs]
        offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype(np.int64)
        field = wire.BatchedTensor(
            data=b"".join(row.tobytes() for row in rows), offsets=offsets.tobytes(), dtype=wire.DTYPE_FLOAT32
        )
        record = output.loss_fn_outputs.add(num_datums=len(rows))
        record.fields["logprobs"].CopyFrom(field)
        output.metrics["loss:sum"] = float(loss.detach())
        return output

    def optim_step(self, adam: dict[str, float]) -> dict[str, Any]:
        for group in self.adam.param_groups:
            group.update(
                lr=adam["learning_rate"],
                betas=(adam["beta1"], adam["beta2"]),
                eps=adam["eps"],
                weight_decay=adam["weight_decay"],
            )
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, adam["grad_clip_norm"] or float("inf"))
        self.adam.step()
        self.adam.zero_grad()
        return {"metrics": {"grad_norm": float(norm)}}

    def state(self, optimizer: bool = True) -> State:
        adapter = {name: tensor.clone() for name, tensor in self.policy.adapter_state().items()}
        adam = copy.deepcopy(self.adam.state_dict()) if optimizer else None
        return State(adapter, adam, self.base_model, self.rank)

    def load(self, state: State, optimizer: bool) -> None:
        self.policy.load_adapter_state(state.adapter)
        if optimizer and state.adam is not None:
            self.adam.load_state_dict(copy.deepcopy(state.adam))


def raw_logprobs(policy: Policy, tokens: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Log-prob of each row's targets after its tokens, untempered."""
    lengths = [len(row) for row in tokens]
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = policy.hidden(torch.cat(tokens)[None], positions[None], PackedAttention(lengths, CPU))[0]
    wanted = torch.cat(targets)[:, None]
    return list(policy.head(hidden).log_softmax(1).gather(1, wanted).squeeze(1).split(lengths))


def tokens_of(datum: Any) -> Tensor:
    parts = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in datum.model_input]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def tensor_of(tensor: Any) -> Tensor:
    dtype = np.int64 if tensor.dtype == wire.DTYPE_INT64 else np.float32
    return torch.from_numpy(np.frombuffer(tensor.dense, dtype).copy())


Inputs = dict[str, Tensor]
Settings = dict[str, float]


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return _clipped((logprobs - inputs["logprobs"]).exp(), inputs, settings)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    ratio = (logprobs - inputs["logprobs"]).exp().detach()
    weight = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(weight * logprobs * inputs["advantages"]).sum()


def gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    inside = inputs["sequence_ratio_mask"] != 0
    mean = (logprobs.detach() - inputs["logprobs"])[inside].mean()
    return _clipped((mean + logprobs - logprobs.detach()).exp(), inputs, settings)


def _clipped(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"]).sum()


LOSSES: dict[str, Callable[[Tensor, Inputs, Settings], Tensor]] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
}


class Sampler:
    """One copy of the model that takes on whichever adapter is to be sampled from."""

    def __init__(self, base_model: str, rank: int) -> None:
        self.policy = load_policy(Model(model=base_model, lora_rank=rank), Lora(), 0, CPU, lambda line: None)
        tokenizer = load_tokenizer(base_model)
        self.engine = PyTorchEngine(self.policy, Inference(), tokenizer, lambda phase, done, total: None)

    def sample(self, adapter: dict[str, Tensor], requests: list[dict[str, Any]]) -> list[Any]:
        """Answer requests that differ in nothing but prompt and seed; all are drawn with the first one's seed."""
        request = requests[0]
        # Without one it is the base that is sampled.
        own = self.policy.adapter_state()
        self.policy.load_adapter_state(adapter or {name: torch.zeros_like(tensor) for name, tensor in own.items()})
        self.engine.sync(self.policy)
        params = request["sampling_params"]
        # A service may know no end token by itself.
        self.policy.stop_ids = tuple(params.get("stop") or ())
        prompts = [
            np.array([token for chunk in one["prompt"]["chunks"] for token in chunk["tokens"]], np.int64)
            for one in requests
        ]
        sampling = Sampling(
            max_tokens=params["max_tokens"],
            n=request["num_samples"],
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=max(0, params["top_k"]),
            seed=params["seed"],
        )
        groups = self.engine.generate(prompts, sampling)
        return [self.response(prompt, drawn) for prompt, drawn in zip(prompts, groups, strict=True)]

    def response(self, prompt: IntArray, drawn: list[Completion]) -> Any:
        rows = [torch.from_numpy(np.concatenate([prompt, one.token_ids_T])) for one in drawn]
        with torch.no_grad():
            logprobs = raw_logprobs(self.policy, [row[:-1] for row in rows], [row[1:] for row in rows])
        response = wire.SampleResponse()
        for one, row in zip(drawn, logprobs, strict=True):
            response.sequences.add(
                stop_reason=wire.STOP_REASON_STOP if one.finish_reason == "stop" else wire.STOP_REASON_LENGTH,
                tokens=one.token_ids_T.astype(np.int32).tobytes(),
                logprobs=row[len(prompt) - 1 :].numpy().astype(np.float32).tobytes(),
            )
        return response


@dataclass
class TinkerServer:
    """The service: start it, point `[model] base_url` at `url`, and look at `seen` afterwards."""

    folder: Path
    base_model: str = "builtin:tiny"
    context: int | None = 256
    batching: bool = False
    """Sample what is queued together: faster, but what is drawn then depends on what came in time."""
    seen: list[tuple[str, Any]] = field(default_factory=list)
    """Every request but polls and heartbeats, with its body."""
    faults: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Called before a request to that path is answered; may raise Refused, or sleep."""

    def __post_init__(self) -> None:
        self.worker = ThreadPoolExecutor(max_workers=1)
        self.trainees: dict[str, Trainee] = {}
        self.states: dict[str, State] = {}
        self.sampling: dict[str, dict[str, Tensor]] = {}
        self.sampler: Sampler | None = None
        self.futures: dict[str, Future[Any]] = {}
        self.files: dict[str, Path] = {}
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.queued: list[tuple[dict[str, Any], Future[Any]]] = []
        handler = type("Handler", (_Handler,), {"service": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> TinkerServer:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(10)
        self.worker.shutdown(cancel_futures=True)

    def paths(self) -> list[str]:
        """The requests in order, by the last part of their path."""
        return [path.rsplit("/", 1)[-1] for path, _ in self.seen]

    def answer(self, method: str, path: str, body: Any) -> Any:
        """The reply to one request: a dict for JSON, a path for a file."""
        name = path.removeprefix("/api/v1/")
        if path.startswith("/files/"):
            return self.files[path]
        if name in ("healthz", "telemetry", "session_heartbeat"):
            return {"status": "ok", "type": "session_heartbeat"}
        if name in ("client/config", "client/dynamic_config"):
            return {}
        if name == "get_server_capabilities":
            model = {"model_name": self.base_model, "max_context_length": self.context}
            return {"supported_models": [model]}
        if name == "create_sampling_session":
            session = self.fresh("sampling")
            self.sampling[session] = {}
            return {"sampling_session_id": session, "type": "create_sampling_session"}
        if name == "create_session":
            return {"session_id": self.fresh("session")}
        if name.startswith("sessions/"):
            return {}
        if name == "weights_info":
            state = self.state(body["tinker_path"])
            return {"base_model": state.base_model, "is_lora": True, "lora_rank": state.rank, "train_unembed": False}
        if name.startswith("training_runs/"):
            return self.answer_checkpoint(method, name.split("/"))
        if name in WORK:
            return self.promise(name, body)
        raise Refused(404, f"no such endpoint: {path}")

    def answer_checkpoint(self, method: str, parts: list[str]) -> Any:
        path = f"tinker://{parts[1]}/{parts[3]}/{parts[4]}"
        if method == "DELETE":
            self.state(path)
            del self.states[path]
            return {}
        folder = self.folder / parts[1] / parts[4]
        urls = {}
        for file in sorted(folder.iterdir()):
            place = f"/files/{parts[1]}/{parts[4]}/{file.name}"
            self.files[place] = file
            urls[file.name] = self.url + place
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        return {"urls": urls, "expires": expires.isoformat()}

    def promise(self, name: str, body: Any) -> dict[str, Any]:
        """Queue the work; the client asks for the result with retrieve_future."""
        request = self.fresh("request")
        if name.startswith("save_weights"):
            self.reserve_name(name, body)
        if name == "asample" and self.batching:
            self.futures[request] = Future()
            self.queued.append((body, self.futures[request]))
            self.worker.submit(self.sample_queued)
        else:
            self.futures[request] = self.worker.submit(WORK[name], self, body)
        promise: dict[str, Any] = {"request_id": request}
        if name == "asample":
            promise["sample_sequence_ids"] = [f"{request}/{n}" for n in range(body["num_samples"])]
        return promise

    def reserve_name(self, name: str, body: dict[str, Any]) -> None:
        kind = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights"}.get(name, "external_weights")
        if body.get("path") and f"tinker://{body['model_id']}/{kind}/{body['path']}" in self.states:
            raise Refused(409, f"{body['path']} exists already")

    def sample_queued(self) -> None:
        time.sleep(0.05)
        batch, self.queued = self.queued, []
        if batch:
            responses = self.sample([body for body, _ in batch])
            for (_, future), response in zip(batch, responses, strict=True):
                future.set_result(response)

    def create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        run, lora = self.fresh("run"), body["lora_config"]
        self.trainees[run] = Trainee(body["base_model"], lora["rank"], lora.get("seed") or 0)
        return {"model_id": run, "type": "create_model"}

    def forward_backward(self, request: Any) -> Any:
        return self.trainees[request.model_id].forward_backward(request)

    def optim_step(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.trainees[body["model_id"]].optim_step(body["adam_params"])

    def save_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        self.states[path] = self.trainees[body["model_id"]].state()
        return {"path": path, "type": "save_weights"}

    def load_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        self.trainees[body["model_id"]].load(self.state(body["path"]), body["optimizer"])
        return {"path": body["path"], "type": "load_weights"}

    def save_weights_for_sampler(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self.fresh("sampling")
        self.sampling[session] = self.trainees[body["model_id"]].state(optimizer=False).adapter
        return {"path": None, "sampling_session_id": session, "type": "save_weights_for_sampler"}

    def save_weights_external(self, body: dict[str, Any]) -> dict[str, Any]:
        path = f"tinker://{body['model_id']}/external_weights/{body['path']}"
        trainee = self.trainees[body["model_id"]]
        self.states[path] = trainee.state(optimizer=False)
        trainee.policy.save_adapter(self.folder / body["model_id"] / body["path"])
        return {"path": path, "type": "save_weights_external"}

    def asample(self, body: dict[str, Any]) -> Any:
        return self.sample([body])[0]

    def sample(self, bodies: list[dict[str, Any]]) -> list[Any]:
        if self.sampler is None:
            rank = next(iter(self.trainees.values())).rank
            self.sampler = Sampler(self.base_model, rank)
        return self.sampler.sample(self.sampling[bodies[0]["sampling_session_id"]], bodies)

    def state(self, path: str) -> State:
        if path not in self.states:
            raise Refused(404, f"there is no {path}")
        return self.states[path]

    def fresh(self, kind: str) -> str:
        with self.lock:
            self.counts[kind] += 1
            return f"{kind}-{self.counts[kind]}"


WORK: dict[str, Callable[[TinkerServer, Any], Any]] = {
    name: getattr(TinkerServer, name)
    for name in (
        "create_model",
        "forward_backward",
        "optim_step",
        "save_weights",
        "load_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "asample",
    )
}


class _Handler(BaseHTTPRequestHandler):
    service: TinkerServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply()

    def do_DELETE(self) -> None:
        self.reply()

    def do_POST(self) -> None:
        self.reply()

    def reply(self) -> None:
        path = urllib.parse.unquote(self.path.split("?")[0])
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body: Any = data
        if self.headers.get("Content-Type") == PROTOBUF:
            body = wire.ForwardBackwardRequest()
            body.ParseFromString(data)
        elif data:
            body = json.loads(data)
        name = path.removeprefix("/api/v1/")
        if name not in ("retrieve_future", "session_heartbeat", "healthz", "telemetry"):
            self.service.seen.append((name, body))
        try:
            self.service.faults.get(name, lambda: None)()
            if name != "healthz" and not path.startswith("/files/") and self.headers.get("X-API-Key") != KEY:
                raise Refused(401, "invalid key")
            answer = self.retrieve(body) if name == "retrieve_future" else self.service.answer(self.command, path, body)
            self.send(200, answer)
        except Refused as rejected:
            self.send(rejected.status, {"error": {"message": str(rejected)}, "detail": str(rejected)})
        except (BrokenPipeError, ConnectionResetError):
            pass

    def retrieve(self, body: dict[str, Any]) -> Any:
        future = self.service.futures.get(body["request_id"])
        if future is None:
            raise Refused(404, "no such request")
        for _ in range(200):
            if future.done():
                break
            time.sleep(0.005 if _ < 100 else 0.05)
        else:
            raise Refused(408, "try again")
        error = future.exception()
        if error is not None:
            return {"error": f"{type(error).__name__}: {error}", "category": "user"}
        return future.result()

    def send(self, status: int, answer: Any) -> None:
        if isinstance(answer, Path):
            content, kind = answer.read_bytes(), "application/octet-stream"
        elif isinstance(answer, dict):
            content, kind = json.dumps(answer).encode(), "application/json"
        else:
            content, kind = answer.SerializeToString(), PROTOBUF
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
