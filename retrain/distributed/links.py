"""How rank 0 talks to the others: a connection to each, on which commands go out and answers come back.

Threads read and write, never the main one, which a signal may interrupt in the middle of a message. A process that dies
closes its connection, so that the other end knows at once; a machine that vanishes is missed by TCP's keep-alive.
Tensors do not travel here: that is torch.distributed's business.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch.distributed as dist

from retrain.errors import BackendError
from retrain.runtime.interrupts import deferred
from retrain.runtime.ranks import Place

# A process that does not end by itself, since it hangs in a collective with one that is gone, is ended after this.
GRACE_S = 40.0
# Several ranks may fail at once: one of them is the cause, the others have lost it.
_SETTLING_S = 1.0
_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Hello:
    """Who has connected."""

    rank: int
    pid: int
    host: str


@dataclass(frozen=True)
class Command:
    """A numbered order."""

    number: int
    order: Any


@dataclass(frozen=True)
class Abandon:
    """The answers to commands up to this number are not wanted any more."""

    number: int


@dataclass(frozen=True)
class Stop:
    """The run is over."""


@dataclass(frozen=True)
class Gone:
    """Rank 0 has ended without saying so."""


@dataclass(frozen=True)
class Answer:
    """What came of a command."""

    number: int
    result: Any


@dataclass(frozen=True)
class Failed:
    """A rank's last words. `lost_peer`: it failed only because another had gone."""

    trace: str
    lost_peer: bool


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and what it said."""

    who: Hello
    trace: str
    lost_peer: bool = False

    def __str__(self) -> str:
        return f"rank {self.who.rank} (process {self.who.pid} on {self.who.host})"


class AbandonedError(Exception):
    """Raised in a worker whose answer is not wanted any more."""


def has_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that a collective lost one of its members."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)


class Hub:
    """Rank 0's end of every connection."""

    def __init__(self, place: Place, connections: dict[Connection, Hello]) -> None:
        self.place = place
        self.connections = connections
        self.by_rank = {who.rank: connection for connection, who in connections.items()}
        self.inbox: queue.Queue[tuple[int, Answer] | None] = queue.Queue()
        self.number = 0
        self.owed: dict[int, int] = {}
        """Ranks that have yet to answer, and to which command."""
        self.failure: Failure | None = None
        self.told = False
        self.busy_writing = False
        self.closing = False
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrain-ranks-out")
        self.reader = threading.Thread(target=self._read, name="retrain-ranks-in", daemon=True)
        self.previous = signal.signal(signal.SIGUSR1, self._on_failure)
        self.reader.start()

    @classmethod
    def open(cls, place: Place) -> Hub:
        """Wait for every other rank to connect."""
        local = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
        key = secrets.token_bytes(32)
        with Listener(("127.0.0.1" if local else "0.0.0.0", 0), "AF_INET", place.world, authkey=key) as listener:
            dist.broadcast_object_list([listener.address[1], key], src=0)
            connections: dict[Connection, Hello] = {}
            while len(connections) < place.world - 1:
                connection = listener.accept()
                keep_alive(connection)
                connections[connection] = connection.recv()
        return cls(place, connections)

    def tell(self, orders: dict[int, Any]) -> None:
        """Give ranks their orders, once they have answered the ones before."""
        self.collect()
        self.number += 1
        with deferred():
            for rank, order in orders.items():
                self.owed[rank] = self.number
                self._send(rank, Command(self.number, order))

    def tell_all(self, order: Any) -> None:
        """Give every other rank the same order."""
        self.tell(dict.fromkeys(self.by_rank, order))

    def collect(self) -> dict[int, Any]:
        """Wait for the answers that are owed."""
        answers = {}
        while self.owed:
            self.check()
            try:
                told = self.inbox.get(timeout=1.0)
            except queue.Empty:
                continue
            if told is not None and self.owed.get(told[0]) == told[1].number:
                answers[told[0]] = told[1].result
                del self.owed[told[0]]
        return answers

    def abandon(self) -> None:
        """Let the ranks stop what they are doing; their answers are dropped when the next order is given."""
        for rank in self.owed:
            self._send(rank, Abandon(self.number))

    def check(self) -> None:
        """Raise when a rank has failed."""
        if self.failure is not None:
            raise self._broken()

    def _broken(self) -> BackendError:
        self.told = True
        return BackendError(f"{self.failure} failed, so the run cannot go on.")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error of a collective into one that names the rank that is gone."""
        try:
            yield
        except RuntimeError as error:
            until = time.monotonic() + (5 * _SETTLING_S if has_lost_peer(error) else 0.0)
            while self.failure is None and time.monotonic() < until:
                time.sleep(0.05)
            if self.failure is None:
                raise
            raise self._broken() from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What is written here is finished although a rank fails."""
        self.busy_writing = True
        try:
            yield
        finally:
            self.busy_writing = False

    def close(self) -> None:
        """Tell everybody that the run is over."""
        self.closing = True
        for rank in self.by_rank:
            self._send(rank, Stop())
        self.writer.shutdown(wait=self.failure is None)
        signal.signal(signal.SIGUSR1, self.previous)

    def _send(self, rank: int, message: Any) -> None:
        def send() -> None:
            # A connection that is gone is noticed by the reader.
            with suppress(OSError, ValueError):
                self.by_rank[rank].send(message)

        self.writer.submit(send)

    def _read(self) -> None:
        open_ones = list(self.connections)
        failures: list[Failure] = []
        since = 0.0
        while open_ones and not (failures and time.monotonic() - since > _SETTLING_S):
            for ready in wait(open_ones, timeout=0.2):
                assert isinstance(ready, Connection)
                who = self.connections[ready]
                try:
                    message = ready.recv()
                except (EOFError, OSError):
                    open_ones.remove(ready)
                    message = Failed("", lost_peer=False)
                if isinstance(message, Answer):
                    self.inbox.put((who.rank, message))
                elif not self.closing and who.rank not in [failure.who.rank for failure in failures]:
                    since = since or time.monotonic()
                    failures.append(Failure(who, message.trace, message.lost_peer))
        if failures:
            self._announce(min(failures, key=lambda failure: failure.lost_peer))

    def _announce(self, failure: Failure) -> None:
        """Show what happened, interrupt the main thread, and end the process if that does not help."""
        trace = failure.trace or "It ended without a word: it was killed, perhaps for want of memory.\n"
        with suppress(OSError, ValueError):
            print(f"\n{failure} failed:\n{trace}", file=sys.stderr, flush=True)
        self.failure = failure
        self.inbox.put(None)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(GRACE_S)
        while self.busy_writing:
            time.sleep(0.5)
        os._exit(1)

    def _on_failure(self, number: int, frame: Any) -> None:
        if not self.told and not self.busy_writing and not self.closing:
            self.check()


class Link:
    """A worker's end of its connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.commands: queue.Queue[Command | Stop | Gone] = queue.Queue()
        self.abandoned = 0
        self.current = 0
        threading.Thread(target=self._read, name="retrain-rank", daemon=True).start()

    @classmethod
    def open(cls, place: Place) -> Link:
        """Connect to rank 0."""
        told: list[Any] = [None, None]
        dist.broadcast_object_list(told, src=0)
        connection = Client((os.environ.get("MASTER_ADDR", "localhost"), told[0]), "AF_INET", authkey=told[1])
        keep_alive(connection)
        connection.send(Hello(place.rank, os.getpid(), socket.gethostname()))
        return cls(connection)

    def next(self) -> Any | None:
        """The next order; None when the run is over."""
        command = self.commands.get()
        if isinstance(command, Gone):
            raise BackendError("rank 0 is gone.")
        if isinstance(command, Stop):
            return None
        self.current = command.number
        return command.order

    def answer(self, result: Any) -> None:
        """Answer the order under way."""
        self.connection.send(Answer(self.current, result))

    def fail(self, trace: str, lost_peer: bool) -> None:
        """Say what went wrong before this process ends."""
        with suppress(OSError):
            self.connection.send(Failed(trace, lost_peer))

    def raise_if_abandoned(self) -> None:
        """Raise AbandonedError if rank 0 no longer waits for the command under way."""
        if self.abandoned >= self.current:
            raise AbandonedError

    def _read(self) -> None:
        """Pass orders on; when there are no more, end this process if it does not end by itself."""
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
            print("Rank 0 is gone.", file=sys.stderr, flush=True)
            self.abandoned = sys.maxsize
            self.commands.put(Gone())
        time.sleep(GRACE_S / 2)
        os._exit(1)


def keep_alive(connection: Connection) -> None:
    """Let the system look after an idle connection: a machine that vanished is missed within half a minute."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if name in vars(socket):
                own.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)
