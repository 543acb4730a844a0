"""The pool of worker processes that rewards run in.

Each item has a wall-clock limit. A worker that exceeds it, crashes or exits is replaced, and only its current item
fails, with outcome `error` or `timeout` instead of `wrong`. Results are in the order of the items and do not depend on
the number of workers.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from retrain.errors import PluginError
from retrain.isolation.redaction import public_environment, redact
from retrain.isolation.sources import read_all_sources
from retrain.rewards.batch import BatchReward, outcome_of
from retrain.rewards.cache import ScoreCache
from retrain.rewards.process import WorkerProcess
from retrain.rewards.weighted import WeightedScore
from retrain.rewards.wire import Item, Reply, RewardSpec, Start
from retrain.runtime.clock import awake_s
from retrain.types import Outcome, Score, StepMetrics

# Importing the user's module may load a model.
START_LIMIT_S = 300.0
# A run that waits longer for it says so.
NOTE_AFTER_S = 10.0
_LONGEST_WAIT_S = 1.0
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9_]+\b")


def count_cores() -> int:
    """The number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class RewardPool(BatchReward):
    """Scores completions in worker processes; usable from any thread, one call at a time.

    `workers = 0` starts one per core. `memory_mb` limits the address space of a worker; 0 is unlimited. `pass_env`
    lists environment variables that workers see in addition to the public ones.
    """

    def __init__(
        self,
        spec: RewardSpec,
        timeout_s: float = 5.0,
        workers: int = 0,
        memory_mb: int = 0,
        pass_env: tuple[str, ...] = (),
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.first_error = ""
        """Message and traceback of the first failed item, or ""."""
        self._timeout_s = timeout_s
        modules = {term.module for term in spec.terms} - {""}
        self._start = Start(spec, timeout_s, memory_mb, pass_env, read_all_sources(modules, spec.search_paths))
        self._size = workers or count_cores()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._closed = False
        self._cache = ScoreCache.of(spec)
        try:
            self._top_up()
            # One worker shows that the reward loads; others join when they are ready.
            note_at = time.monotonic() + NOTE_AFTER_S
            while not any(worker.ready for worker in self._workers):
                self._exchange(_Batch([]))
                if time.monotonic() > note_at:
                    note_at = float("inf")
                    names = ", ".join(term.name for term in spec.terms)
                    log(f"Still importing the reward {names}; the run gives up after {START_LIMIT_S:.0f} s.")
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[Item | tuple[str, str]]) -> list[Score]:
        """Score every item, in order. Failures of single items do not raise."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            rows = [Item(*item) for item in items]
            return self._score_all(rows) if self._cache is None else self._cache.score(rows, self._score_all)

    def close(self) -> None:
        """Kill all workers. A second call does nothing."""
        with self._lock:
            self._closed = True
            for worker in list(self._workers):
                self._discard(worker)
            self._selector.close()

    def metrics(self) -> StepMetrics:
        """Always empty: cache hits are not logged, because they differ after a resume."""
        return {}

    def _score_all(self, items: list[Item]) -> list[Score]:
        batch = _Batch(items)
        try:
            while batch.unfinished:
                self._top_up()
                self._hand_out(batch)
                self._exchange(batch)
        except BaseException:
            # Interrupted: discard busy workers, whose replies would be out of place.
            for worker in [worker for worker in self._workers if worker.assigned]:
                self._discard(worker)
            raise
        return batch.scores()

    def _top_up(self) -> None:
        # The death of an idle worker is not the fault of the next item.
        for worker in [each for each in self._workers if each.ready and not each.assigned and each.has_exited()]:
            self._discard(worker)
        while len(self._workers) < self._size:
            worker = WorkerProcess(self._start)
            self._workers.append(worker)
            self._selector.register(worker.replies_fd, selectors.EVENT_READ, worker)
            self._flush(worker)  # its first message, with the user's code, may be larger than a pipe

    def _discard(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.replies_fd)
        if worker.requests_fd in self._selector.get_map():
            self._selector.unregister(worker.requests_fd)
        worker.kill()

    def _hand_out(self, batch: _Batch) -> None:
        for worker in self._workers:
            # An idle worker with readable output is about to exit.
            idle = worker.ready and not worker.assigned and not worker.has_replied()
            if idle and batch.waiting:
                fair_share = -(-len(batch.waiting) // len(self._workers))
                count = min(worker.chunk, fair_share)
                indices = [batch.waiting.popleft() for _ in range(count)]
                worker.assign(indices, [batch.items[index] for index in indices])
                self._flush(worker)

    def _flush(self, worker: WorkerProcess) -> None:
        unsent, watched = worker.flush(), worker.requests_fd in self._selector.get_map()
        if unsent and not watched:
            self._selector.register(worker.requests_fd, selectors.EVENT_WRITE, worker)
        elif watched and not unsent:
            self._selector.unregister(worker.requests_fd)

    def _exchange(self, batch: _Batch) -> None:
        """Wait for the next event: replies, room to write, an exit, or a deadline."""
        deadline = min(self._deadline(worker) for worker in self._workers)
        wait_s = min(max(0.0, deadline - awake_s()), _LONGEST_WAIT_S)
        for key, mask in self._selector.select(wait_s):
            worker: WorkerProcess = key.data
            if worker not in self._workers:
                continue
            if mask & selectors.EVENT_WRITE:
                self._flush(worker)
            if mask & selectors.EVENT_READ:
                self._receive(worker, batch)
        now = awake_s()
        for worker in list(self._workers):
            worker.trim_output()
            # A reply that arrived while the parent was busy is not a timeout.
            if self._deadline(worker) <= now and not worker.has_replied():
                self._end_overdue(worker, batch)

    def _deadline(self, worker: WorkerProcess) -> float:
        if not worker.ready:
            return worker.since + START_LIMIT_S
        return worker.since + self._timeout_s if worker.assigned else float("inf")

    def _receive(self, worker: WorkerProcess, batch: _Batch) -> None:
        replies = worker.receive()
        if replies is None:
            self._on_exit(worker, batch)
            return
        for reply in replies:
            if not worker.ready:
                self._begin(worker, reply)
            elif worker.expects(reply):
                self._record(batch, worker.finish_item(), _to_score(reply, self._start.spec.correct_from))
            else:
                # Replies of this worker can no longer be matched to items.
                self._discard(worker)
                self._fail_current(worker, batch, "the reward process sent an unexpected reply and was replaced")
                return

    def _begin(self, worker: WorkerProcess, reply: Reply) -> None:
        if reply.kind == "ready":
            worker.begin(reply.extras)
            return
        self._discard(worker)
        detail = redact(reply.detail)
        raise PluginError(f"the reward could not be loaded: {detail}{self._hint_at_variable(detail)}")

    def _on_exit(self, worker: WorkerProcess, batch: _Batch) -> None:
        """A worker exited: its current item fails, the rest goes to other workers."""
        self._discard(worker)
        if not worker.ready:
            raise PluginError(f"the reward process exited during start-up ({worker.describe_end()})")
        self._fail_current(worker, batch, worker.describe_end())

    def _fail_current(self, worker: WorkerProcess, batch: _Batch, detail: str, outcome: Outcome = "error") -> None:
        """Fail the current item of a discarded worker and requeue the others."""
        if worker.assigned:
            index, *rest = worker.assigned
            self._record(batch, index, Score(0.0, outcome, detail))
            batch.waiting.extendleft(reversed(rest))

    def _end_overdue(self, worker: WorkerProcess, batch: _Batch) -> None:
        worker.abort()
        self._discard(worker)
        if not worker.ready:
            raise PluginError(f"the reward did not load within {START_LIMIT_S:g} s\n{worker.last_output()}".rstrip())
        detail = f"no result after {self._timeout_s:g} s\n{worker.last_output()}".rstrip()
        self._fail_current(worker, batch, detail, "timeout")

    def _record(self, batch: _Batch, index: int, score: Score) -> None:
        if score.detail:
            detail = redact(score.detail)
            score = replace(score, detail=detail + self._hint_at_variable(detail))
        batch.results[index] = score
        if score.outcome == "error" and not self.first_error:
            self.first_error = score.detail

    def _hint_at_variable(self, detail: str) -> str:
        """A hint for errors that name an environment variable which workers do not see."""
        named = [name for name in _VARIABLE.findall(detail) if name in os.environ]
        hidden = [name for name in named if name not in public_environment(self._start.pass_env)] if named else []
        if not hidden:
            return ""
        names = json.dumps([*self._start.pass_env, hidden[0]])
        return f"\nRewards do not see {hidden[0]}.  Try: [reward] pass_env = {names}"


class _Batch:
    """The items of one call, unassigned items, and scores."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.waiting = deque(range(len(items)))
        self.results: dict[int, Score] = {}

    @property
    def unfinished(self) -> bool:
        return len(self.results) < len(self.items)

    def scores(self) -> list[Score]:
        return [self.results[index] for index in range(len(self.items))]


def _to_score(reply: Reply, correct_from: float) -> Score:
    if reply.kind == "error":
        return Score(0.0, "error", reply.detail)
    if reply.kind == "none":
        return Score(0.0, "none", "the reward returned None")
    outcome = outcome_of(reply.value, correct_from)
    return WeightedScore(reply.value, outcome, terms=reply.terms) if reply.terms else Score(reply.value, outcome)
