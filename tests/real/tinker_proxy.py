"""Stands between the current Tinker SDK and SkyRL 0.3.0, which speaks the wire format of SDK 0.24.

The SDK of today sends gradients' inputs and wants results as protobuf, and asks for an id of every sample. Nothing else
is changed on the way.
"""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as wire

PROTOBUF = "application/x-protobuf"
STOPS = {"stop": wire.STOP_REASON_STOP, "length": wire.STOP_REASON_LENGTH}


class Proxy:
    """Serves at `url` until it is closed; `target` is the server behind it."""

    def __init__(self, target: str) -> None:
        self.client = httpx.Client(base_url=target, timeout=600)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"client": self.client}))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.client.close()


class _Handler(BaseHTTPRequestHandler):
    client: httpx.Client
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.forward()

    def do_DELETE(self) -> None:
        self.forward()

    def do_POST(self) -> None:
        self.forward()

    def forward(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Type") == PROTOBUF:
            data = json.dumps(request_as_json(data)).encode()
        try:
            reply = self.client.request(
                self.command, self.path, content=data, headers={"Content-Type": "application/json"}
            )
        except httpx.HTTPError:
            self.close_connection = True
            return
        content, kind = reply.content, reply.headers.get("content-type", "application/json")
        if reply.is_success and self.path.endswith("/asample"):
            answer = reply.json()
            count = json.loads(data)["num_samples"]
            answer["sample_sequence_ids"] = [f"{answer['request_id']}/{number}" for number in range(count)]
            content = json.dumps(answer).encode()
        elif reply.is_success and PROTOBUF in self.headers.get("Accept", ""):
            answer = reply.json()
            if "sequences" in answer:
                content, kind = samples_as_protobuf(answer), PROTOBUF
            elif "loss_fn_outputs" in answer:
                content, kind = gradients_as_protobuf(answer), PROTOBUF
        # The SDK gives up on a poll after 45 s and asks again.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(reply.status_code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)


def request_as_json(data: bytes) -> dict[str, Any]:
    request = wire.ForwardBackwardRequest()
    request.ParseFromString(data)
    rows = []
    for datum in request.data:
        chunks = [{"tokens": np.frombuffer(c.encoded_text.tokens, np.int32).tolist()} for c in datum.model_input]
        inputs = {
            name: {"data": np.frombuffer(t.dense, np.int64 if t.dtype == wire.DTYPE_INT64 else np.float32).tolist()}
            for name, t in datum.loss_fn_inputs.items()
        }
        rows.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs})
    settings = dict(request.loss_fn_config) or None
    body = {"data": rows, "loss_fn": request.loss_fn, "loss_fn_config": settings}
    return {"model_id": request.model_id, "forward_backward_input": body}


def samples_as_protobuf(data: dict[str, Any]) -> bytes:
    response = wire.SampleResponse()
    for sequence in data["sequences"]:
        response.sequences.add(
            stop_reason=STOPS[sequence["stop_reason"]],
            tokens=np.asarray(sequence["tokens"], np.int32).tobytes(),
            logprobs=np.asarray(sequence["logprobs"], np.float32).tobytes(),
        )
    return response.SerializeToString()


def gradients_as_protobuf(data: dict[str, Any]) -> bytes:
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add(num_datums=len(data["loss_fn_outputs"]))
    for name in data["loss_fn_outputs"][0]:
        rows = [np.asarray(row[name]["data"], np.float32) for row in data["loss_fn_outputs"]]
        offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype(np.int64)
        field = wire.BatchedTensor(
            data=b"".join(row.tobytes() for row in rows), offsets=offsets.tobytes(), dtype=wire.DTYPE_FLOAT32
        )
        record.fields[name].CopyFrom(field)
    for name, value in (data.get("metrics") or {}).items():
        output.metrics[name] = value
    return output.SerializeToString()
