"""Control connections between rank 0 and the other ranks: commands go out, results come back.

Background threads read and write, because a signal may interrupt the main thread in the middle of a message. A process
that dies closes its connection, so the other end notices at once; a lost machine is noticed by TCP keep-alive.
Tensors are not sent here but by torch.distributed.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from retrain.errors import BackendError
from retrain.runtime.interrupts import deferred
from retrain.runtime.ranks import RankInfo

if TYPE_CHECKING:
    from retrain.distributed.worker import Worker

RankCommand = Callable[["Worker"], object]
"""A method of `Worker` with its arguments."""

# A process that hangs in a collective with a lost rank is ended after this time.
GRACE_S = 40.0
# When several ranks fail at once, one is the cause and the others lost their connection to it.
_SETTLING_S = 1.0
_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Hello:
    """Identifies the process that connected."""

    rank: int
    pid: int
    host: str


@dataclass(frozen=True)
class Command:
    """A command with its sequence number."""

    number: int
    command: RankCommand


@dataclass(frozen=True)
class Abandon:
    """Results of commands up to this number are no longer needed."""

    number: int


@dataclass(frozen=True)
class Stop:
    """The run is over."""


@dataclass(frozen=True)
class MainRankLost:
    """Rank 0 ended without sending `Stop`."""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command."""

    number: int
    result: object


@dataclass(frozen=True)
class Failed:
    """A rank failed. `lost_peer`: only because another rank was gone."""

    trace: str
    lost_peer: bool


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, with its traceback."""

    who: Hello
    trace: str
    lost_peer: bool = False

    def __str__(self) -> str:
        return f"rank {self.who.rank} (process {self.who.pid} on {self.who.host})"


class CommandAbandoned(Exception):
    """Raised in a worker whose result is no longer needed."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only means that a collective lost one of its ranks."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)


class Hub:
    """Rank 0's end of all connections."""

    def __init__(self, rank_info: RankInfo, connections: dict[Connection, Hello]) -> None:
        self.rank_info = rank_info
        self.connections = connections
        self.by_rank = {who.rank: connection for connection, who in connections.items()}
        self.inbox: queue.Queue[tuple[int, CommandResult] | None] = queue.Queue()
        self.number = 0
        self.pending: dict[int, int] = {}
        """Ranks that have not replied yet, and the number of their command."""
        self.failure: Failure | None = None
        self.reported = False
        self.busy_writing = False
        self.closing = False
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrain-ranks-out")
        self.reader = threading.Thread(target=self._read, name="retrain-ranks-in", daemon=True)
        self.previous = signal.signal(signal.SIGUSR1, self._on_failure)
        self.reader.start()

    @classmethod
    def open(cls, rank_info: RankInfo) -> Hub:
        """Wait for every other rank to connect."""
        local = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
        key = secrets.token_bytes(32)
        with Listener(("127.0.0.1" if local else "0.0.0.0", 0), "AF_INET", rank_info.world, authkey=key) as listener:
            dist.broadcast_object_list([listener.address[1], key], src=0)
            connections: dict[Connection, Hello] = {}
            while len(connections) < rank_info.world - 1:
                connection = listener.accept()
                keep_alive(connection)
                connections[connection] = connection.recv()
        return cls(rank_info, connections)

    def send(self, commands: Mapping[int, RankCommand]) -> None:
        """Send commands to ranks, once they have replied to the previous ones."""
        self.collect()
        self.number += 1
        with deferred():
            for rank, command in commands.items():
                self.pending[rank] = self.number
                self._send(rank, Command(self.number, command))

    def broadcast(self, command: RankCommand) -> None:
        """Send the same command to every other rank."""
        self.send(dict.fromkeys(self.by_rank, command))

    def collect(self) -> dict[int, Any]:
        """Wait for the pending results."""
        results = {}
        while self.pending:
            self.check()
            try:
                reply = self.inbox.get(timeout=1.0)
            except queue.Empty:
                continue
            if reply is not None and self.pending.get(reply[0]) == reply[1].number:
                results[reply[0]] = reply[1].result
                del self.pending[reply[0]]
        return results

    def abandon(self) -> None:
        """Cancel the pending commands; their results are dropped before the next command is sent."""
        for rank in self.pending:
            self._send(rank, Abandon(self.number))

    def check(self) -> None:
        """Raise if a rank has failed."""
        if self.failure is not None:
            raise self._broken()

    def _broken(self) -> BackendError:
        self.reported = True
        return BackendError(f"{self.failure} failed, so the run cannot continue.")

    @contextmanager
    def blaming_failed_rank(self) -> Iterator[None]:
        """Turn an error of a collective into one that names the lost rank."""
        try:
            yield
        except RuntimeError as error:
            until = time.monotonic() + (5 * _SETTLING_S if is_lost_peer(error) else 0.0)
            while self.failure is None and time.monotonic() < until:
                time.sleep(0.05)
            if self.failure is None:
                raise
            raise self._broken() from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let a write finish even if a rank fails."""
        self.busy_writing = True
        try:
            yield
        finally:
            self.busy_writing = False

    def close(self) -> None:
        """Tell all ranks that the run is over."""
        self.closing = True
        for rank in self.by_rank:
            self._send(rank, Stop())
        self.writer.shutdown(wait=self.failure is None)
        signal.signal(signal.SIGUSR1, self.previous)

    def _send(self, rank: int, message: object) -> None:
        def send() -> None:
            # The reader notices a closed connection.
            with suppress(OSError, ValueError):
                self.by_rank[rank].send(message)

        self.writer.submit(send)

    def _read(self) -> None:
        connections = list(self.connections)
        failures: list[Failure] = []
        since = 0.0
        while connections and not (failures and time.monotonic() - since > _SETTLING_S):
            for ready in wait(connections, timeout=0.2):
                assert isinstance(ready, Connection)
                who = self.connections[ready]
                try:
                    message = ready.recv()
                except (EOFError, OSError):
                    connections.remove(ready)
                    message = Failed("", lost_peer=False)
                if isinstance(message, CommandResult):
                    self.inbox.put((who.rank, message))
                elif not self.closing and who.rank not in [failure.who.rank for failure in failures]:
                    since = since or time.monotonic()
                    failures.append(Failure(who, message.trace, message.lost_peer))
        if failures:
            self._announce(min(failures, key=lambda failure: failure.lost_peer))

    def _announce(self, failure: Failure) -> None:
        """Print the failure, interrupt the main thread, and end the process if it hangs."""
        trace = failure.trace or "It ended without a message; it may have been killed for lack of memory.\n"
        with suppress(OSError, ValueError):
            print(f"\n{failure} failed:\n{trace}", file=sys.stderr, flush=True)
        self.failure = failure
        self.inbox.put(None)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(GRACE_S)
        while self.busy_writing:
            time.sleep(0.5)
        os._exit(1)

    def _on_failure(self, number: int, frame: FrameType | None) -> None:
        if not self.reported and not self.busy_writing and not self.closing:
            self.check()


class Link:
    """A worker's end of its connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.commands: queue.Queue[Command | Stop | MainRankLost] = queue.Queue()
        self.abandoned = 0
        self.current = 0
        threading.Thread(target=self._read, name="retrain-rank", daemon=True).start()

    @classmethod
    def open(cls, rank_info: RankInfo) -> Link:
        """Connect to rank 0."""
        address: list[Any] = [None, None]
        dist.broadcast_object_list(address, src=0)
        connection = Client((os.environ.get("MASTER_ADDR", "localhost"), address[0]), "AF_INET", authkey=address[1])
        keep_alive(connection)
        connection.send(Hello(rank_info.rank, os.getpid(), socket.gethostname()))
        return cls(connection)

    def next(self) -> RankCommand | None:
        """The next command; None when the run is over."""
        command = self.commands.get()
        if isinstance(command, MainRankLost):
            raise BackendError("rank 0 ended unexpectedly.")
        if isinstance(command, Stop):
            return None
        self.current = command.number
        return command.command

    def reply(self, result: object) -> None:
        """Send the result of the current command."""
        self.connection.send(CommandResult(self.current, result))

    def fail(self, trace: str, lost_peer: bool) -> None:
        """Report a failure before this process ends."""
        with suppress(OSError):
            self.connection.send(Failed(trace, lost_peer))

    def raise_if_abandoned(self) -> None:
        """Raise CommandAbandoned if rank 0 no longer waits for the current command."""
        if self.abandoned >= self.current:
            raise CommandAbandoned

    def _read(self) -> None:
        """Queue commands; when the connection ends, end this process if it does not end by itself."""
        message: Any = None
        while not isinstance(message, Stop):
            try:
                message = self.connection.recv()
            except (EOFError, OSError):
                message = None
                break
            if isinstance(message, Abandon):
                self.abandoned = message.number
            else:
                self.commands.put(message)
        if not isinstance(message, Stop):
            print("Rank 0 ended unexpectedly.", file=sys.stderr, flush=True)
            self.abandoned = sys.maxsize
            self.commands.put(MainRankLost())
        time.sleep(GRACE_S / 2)
        os._exit(1)


def keep_alive(connection: Connection) -> None:
    """Enable TCP keep-alive: a lost machine is noticed within half a minute."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if name in vars(socket):
                own.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)
