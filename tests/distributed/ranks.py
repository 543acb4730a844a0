"""Functions run by several real processes with gloo between them. Forked from one that has imported all: quick."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from retrain.runtime.ranks import RankInfo

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["retrain.cli.train", "retrain.distributed.run", "tests.e2e.tiny"])
PATIENCE_S = float(os.environ.get("RANKS_PATIENCE_S", "240"))


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, answering: int = 0) -> list[Any]:
    """What `function(rank_info, *arguments)` returns on each rank; the first error is raised here.

    `answering` is how many ranks return at all, where that is not all of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [_FORKS.Pipe(duplex=False) for _ in range(world)]
    processes = [
        _FORKS.Process(
            target=_run, args=(RankInfo(rank, world, rank, world), port, pipes[rank][1], function, arguments)
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for _, sending in pipes:
        sending.close()
    try:
        replies = [_receive(receiving) for receiving, _ in pipes[: answering or world]]
    finally:
        for process in processes:
            process.join(timeout=60)
        alive = [process for process in processes if process.exitcode is None]
        for process in alive:
            process.kill()
    broken = [text for text, _ in replies if text]
    assert not broken, "\n".join(broken)
    assert not alive, "a rank did not end"
    return [result for _, result in replies]


def _receive(pipe: Connection) -> tuple[str, Any]:
    if not pipe.poll(PATIENCE_S):
        return f"no reply from a rank for {PATIENCE_S} s", None
    try:
        reply: tuple[str, Any] = pipe.recv()
    except EOFError:
        return "a rank ended without a word", None
    return reply


def _run(
    rank_info: RankInfo, port: int, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank_info.rank),
        "WORLD_SIZE": str(rank_info.world),
        "LOCAL_RANK": str(rank_info.local_rank),
        "LOCAL_WORLD_SIZE": str(rank_info.local_world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        pipe.send(("", function(rank_info, *arguments)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise
