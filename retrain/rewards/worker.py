"""The worker process: reads items, writes one reply for each, and exits with its parent. It has a guard process.

The user's code owns file descriptors 0, 1 and 2 here: no input, and output goes to a file of the parent. Messages use
private copies of the pipes. Nothing heavy is imported unless the reward needs it.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import SimpleQueue

from retrain.errors import RetrainError
from retrain.isolation.framing import PipeWriter
from retrain.isolation.sources import import_as_read
from retrain.isolation.tracebacks import describe_error
from retrain.rewards import load_reward
from retrain.rewards.custom import call_reward, extras_of
from retrain.rewards.weighted import Term, WeightedReward
from retrain.rewards.wire import Reply, RewardSpec, Start, Work, pack_reply, read_tail, unpack_request

_KEPT_LINES = 12

Evaluate = Callable[[str, str, Mapping[str, object]], Reply]


def main() -> None:
    """Serve the parent until it closes the pipe."""
    requests: SimpleQueue[Start | Work] = SimpleQueue()
    threading.Thread(target=_listen, args=(os.dup(0), requests), daemon=True).start()
    replies = PipeWriter(os.dup(1))
    streams = _Streams()
    start = requests.get()
    assert isinstance(start, Start)
    _limit_process(start.memory_mb)
    import_as_read(start.sources)
    evaluate, ready = _prepare(start.spec)
    replies.write(pack_reply(ready))
    while True:
        work = requests.get()
        assert isinstance(work, Work) and evaluate is not None
        for number, (response, reference, extras) in enumerate(work.items, start=work.first):
            streams.refresh()
            replies.write(pack_reply(replace(evaluate(response, reference, extras), number=number)))


def _listen(fd: int, requests: SimpleQueue[Start | Work]) -> None:
    """Queue the parent's requests; exits when the parent exits, and the guard kills the rest."""
    with os.fdopen(fd, "rb") as stream:
        while (request := unpack_request(stream)) is not None:
            requests.put(request)
        os._exit(0)


class _Streams:
    """The standard streams of the user's code: no input, and all output to one file."""

    def __init__(self) -> None:
        self._output = os.dup(2)
        self._nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(self._nowhere, 0)
        os.dup2(self._output, 1)
        for stream in (sys.stdout, sys.stderr):
            # Unpaired surrogates in printed text must not raise.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]

    def refresh(self) -> None:
        """Reset the streams, so that errors show only the output of their own item."""
        if os.fstat(self._output).st_size:
            os.ftruncate(self._output, 0)
        for fd, source in ((0, self._nowhere), (1, self._output), (2, self._output)):
            try:
                os.fstat(fd)
            except OSError:  # closed by the user's code
                os.dup2(source, fd)


def _limit_process(memory_mb: int) -> None:
    if memory_mb:
        allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = min(memory_mb << 20, sys.maxsize if allowed == resource.RLIM_INFINITY else allowed)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The parent kills a slow worker with SIGABRT, so that this prints its stack.
    faulthandler.enable(file=2, all_threads=False)


def _prepare(spec: RewardSpec) -> tuple[Evaluate | None, Reply]:
    """Build the reward: the function that evaluates an item, and the reply to the parent."""
    try:
        evaluate, extras = _build_evaluate(spec)
    except RetrainError as error:
        return None, Reply("failed", detail=describe_error(error))
    except BaseException as error:
        return None, Reply("failed", detail=_describe(error))
    return evaluate, Reply("ready", extras=extras)


def _build_evaluate(spec: RewardSpec) -> tuple[Evaluate, tuple[str, ...]]:
    if spec.weighted:
        terms = [Term(term.name, term.weight, load_reward(term, spec.search_paths)) for term in spec.terms]
        weighted = WeightedReward(terms)

        def value_terms(response: str, reference: str, extras: Mapping[str, object]) -> Reply:
            values = weighted.score_terms(response, reference, extras)
            return Reply("value", value=weighted.total(values), terms=values) if values else Reply("none")

        return _guard(value_terms), weighted.extras
    (term,) = spec.terms
    reward = load_reward(term, spec.search_paths)

    def value_one(response: str, reference: str, extras: Mapping[str, object]) -> Reply:
        value = call_reward(reward, response, reference, extras)
        return Reply("none") if value is None else Reply("value", value=value)

    return _guard(value_one), extras_of(reward)


def _guard(evaluate: Evaluate) -> Evaluate:
    def guarded(response: str, reference: str, extras: Mapping[str, object]) -> Reply:
        try:
            return evaluate(response, reference, extras)
        except BaseException as error:  # SystemExit and the like fail the item, not the process
            return Reply("error", detail=_describe(error))

    return guarded


def _describe(error: BaseException) -> str:
    """The error with its traceback, and the printed output."""
    printed = read_tail(2).splitlines()[-_KEPT_LINES:]
    return "\n".join([describe_error(error), *(["printed:", *printed] if printed else [])])
