"""What retrain's HTTP client costs: the same requests through the engine and by a bare loop, and adapter delivery.

    python benchmarks/client.py [--rounds 5] [--concurrency 128] [--tokens 64] [--seconds 2]

A server process answers after a fixed time, as if it had decoded, so every difference is the client's. The bare loop
writes prepared bodies to raw connections that it opened before, and parses the JSON of the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch

from retrain.config import load_config
from retrain.inference_engine.http.engine import HttpEngine
from retrain.inference_engine.http.startup import Survey
from retrain.inference_engine.vllm import VLLM
from retrain.modeling.policy import load_policy
from retrain.modeling.tokens import load_tokenizer
from retrain.types import Sampling


def content_length(head: bytes) -> int:
    return next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: int, seconds: float) -> None:
    """One keep-alive connection of the stand-in server."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        length = content_length(head)
        body = json.loads(await reader.readexactly(length)) if length else {}
        reply: Any = {}
        if "prompt" in body:
            await asyncio.sleep(seconds)
            logprobs = {"token_logprobs": [-0.5] * tokens, "tokens": ["x"] * tokens, "text_offset": list(range(tokens))}
            choice = {"text": "x" * tokens, "logprobs": logprobs, "token_ids": [5] * tokens, "finish_reason": "length"}
            reply = {"choices": [choice | {"index": at} for at in range(body["n"])]}
        data = json.dumps(reply).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        await writer.drain()


def serve(port: Any, tokens: int, seconds: float) -> None:
    async def main() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await answer(reader, writer, tokens, seconds)
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
        port.value = server.sockets[0].getsockname()[1]
        await server.serve_forever()

    asyncio.run(main())


class BareLoop:
    """Sends bodies on connections of their own, all at once, and parses the answers."""

    def __init__(self, url: str) -> None:
        self.place = urlsplit(url)
        self.loop = asyncio.new_event_loop()
        self.connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def open(self, count: int) -> None:
        async def several() -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
            place = self.place
            return [await asyncio.open_connection(place.hostname, place.port) for _ in range(count)]

        self.connections = self.loop.run_until_complete(several())

    def send(self, bodies: list[bytes]) -> None:
        async def one(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            writer.write(head + body)
            head = await reader.readuntil(b"\r\n\r\n")
            return json.loads(await reader.readexactly(content_length(head)))

        async def every() -> None:
            await asyncio.gather(*(one(body, *made) for body, made in zip(bodies, self.connections, strict=True)))

        self.loop.run_until_complete(every())

    def close(self) -> None:
        for _, writer in self.connections:
            writer.close()
        self.loop.run_until_complete(asyncio.sleep(0.1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    port = multiprocessing.Value("i", 0)
    server = multiprocessing.Process(target=serve, args=(port, args.tokens, args.seconds), daemon=True)
    server.start()
    while not port.value:
        time.sleep(0.05)
    url = f"http://127.0.0.1:{port.value}"
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, {"model.model": "builtin:tiny", "model.lora_rank": 16, "backend.devices": "cpu"})
        policy = load_policy(config.model, config.lora, 0, torch.device("cpu"), lambda line: None)
        inference = config.inference.model_copy(update={"engine": "vllm", "url": url, "adapter_dir": folder})
        engine = HttpEngine(VLLM, policy, inference, load_tokenizer("builtin:tiny"), lambda *_: None)
        measure(engine, url, args)
    server.terminate()
    server.join()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and seconds of this process's own computing."""
    clock, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - busy


def measure(engine: Any, url: str, args: argparse.Namespace) -> None:
    engine.survey = Survey(context=1024)
    engine.fleet.servers[0].model = "tiny"
    deliveries = []
    for _ in range(args.rounds):
        engine.newest, engine.adapter = {}, None
        deliveries.append(timed(lambda: engine.sync(engine.policy)))
    print(f"{args.concurrency} completions of {args.tokens} tokens at once, {args.seconds} s each on the server")
    print("| requests | bare loop | retrain | overhead | bare loop, computing | retrain, computing |")
    print("|---|---|---|---|---|---|")
    for n in (16, 1):
        prompts = [torch.randint(5, 400, (32,)).numpy() for _ in range(args.concurrency // n)]
        sampling = Sampling(max_tokens=args.tokens, n=n)
        asks = [ask for at, prompt in enumerate(prompts) for ask in engine._requests(prompt, sampling, at)]
        bodies = [json.dumps(engine.spec.request("tiny", engine.adapter, ask)).encode() for ask in asks]

        def through_engine(asks: list[Any] = asks) -> None:
            # Without the rescoring: that is the trainer's work, not the client's.
            drawn = engine.client.run(engine._draw(asks, args.concurrency))
            engine._completions([row for _, row in drawn])

        bare = BareLoop(url)
        bare.open(len(bodies))
        through_engine()
        plain, ours = [], []
        for _ in range(args.rounds):
            plain.append(timed(lambda bare=bare, bodies=bodies: bare.send(bodies)))
            ours.append(timed(through_engine))
        bare.close()
        (loop, loop_busy), (client, client_busy) = (
            (statistics.median(wall for wall, _ in runs), statistics.median(busy for _, busy in runs))
            for runs in (plain, ours)
        )
        over = f"{100 * (client / loop - 1):.1f}%"
        shape = f"{len(asks)} of {n}"
        print(f"| {shape} | {loop:.2f} s | {client:.2f} s | {over} | {loop_busy:.3f} s | {client_busy:.3f} s |")
    wall, busy = (statistics.median(part) for part in zip(*deliveries, strict=True))
    print(f"adapter delivery, apart from the server's time: {wall:.3f} s, {busy:.3f} s of it computing")
    engine.shutdown()


if __name__ == "__main__":
    main()
