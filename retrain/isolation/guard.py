"""Processes for third-party code, each under a guard that kills it with all descendants.

Third-party code may start processes in new sessions, hold the GIL forever or crash: no thread of its process can clean
up after that, and no signal to a process group reaches everything. So the process started here forks. The child runs
the third-party code. The parent, the guard, runs none of it; it waits until the child exits or the training process
closes its end of a pipe, which also happens when that process dies, and then kills all descendants. On Linux the guard
is a subreaper, so nothing escapes it; elsewhere it kills the process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from retrain.runtime.child import signal_on_parent_death

# The parent's import path is inherited; `-P` keeps the working directory from shadowing json before that.
_BOOT = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from retrain.isolation.guard import stand_guard
stand_guard(int(sys.argv[2]))
from {module} import main
main()"""

_ABORT = b"a"
_ABORT_GRACE_S = 0.5
# A process in uninterruptible sleep is not waited for longer than this.
_LIMIT_S = 5.0
_CONTINUE_S = 0.2

_PR_SET_CHILD_SUBREAPER = 36


class GuardedProcess:
    """A Python process that runs `main` of a module and can be killed with all its descendants."""

    def __init__(
        self, module: str, output: int, environment: Mapping[str, str], pass_fds: tuple[int, ...] = (), *arguments: str
    ) -> None:
        self._stopping = threading.Lock()
        read_end, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-u", "-P", "-c", _BOOT.format(module=module), json.dumps(sys.path)),
                    *(str(read_end), *arguments),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                bufsize=0,
                pass_fds=(read_end, *pass_fds),
                start_new_session=True,  # Ctrl-C does not reach it
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)

    @property
    def requests(self) -> IO[bytes]:
        """Its standard input."""
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def replies(self) -> IO[bytes]:
        """Its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout

    def abort(self) -> None:
        """Make the third-party code print its stack and exit."""
        with self._stopping, contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGCONT)
            os.write(self._lifeline, _ABORT)
            self.process.wait(_ABORT_GRACE_S)

    def end(self) -> int:
        """Kill it with all descendants, close the pipes, and return its exit code as Popen does."""
        code = self.stop()
        self.close()
        return code

    def stop(self) -> int:
        """Like `end`, but leaves the pipes open for threads that still read from them. Can be called again."""
        with self._stopping:
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            until = time.monotonic() + _LIMIT_S + 1.0
            while time.monotonic() < until:
                # The third-party code may have stopped its guard, and may do it again.
                self.process.send_signal(signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self.process.wait(_CONTINUE_S)
            self.process.kill()  # the guard is stuck
            return self.process.wait()

    def close(self) -> None:
        """Close the pipes."""
        self.requests.close()
        self.replies.close()


def stand_guard(lifeline: int) -> None:
    """Fork: this returns in the process of the third-party code, never in the guard."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # A guard that was stopped continues when the training process dies, and sees its pipe closed.
        signal_on_parent_death(os.getppid(), signal.SIGCONT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    guard = os.getpid()
    foreign = os.fork()
    if foreign:
        _keep_watch(lifeline, foreign)
    os.close(lifeline)
    os.setsid()  # signals to its own process group must not reach the guard
    if sys.platform == "linux":
        signal_on_parent_death(guard, signal.SIGKILL)


def _keep_watch(lifeline: int, foreign: int) -> None:
    """Wait for the child or the training process to exit, kill all descendants, and exit like the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # readers must see end-of-file when the child exits
        os.dup2(nothing, stream)
    noticed, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    # Catches a child that exited before the handlers were set.
    status, _ = _reap(foreign)
    while status is None:
        ready, _, _ = select.select([lifeline, noticed], [], [])
        if noticed in ready and signal.SIGTERM in os.read(noticed, 4096):
            break
        if lifeline in ready:
            if os.read(lifeline, 1) != _ABORT:
                break
            os.kill(foreign, signal.SIGABRT)
        status, _ = _reap(foreign)
    _exit_like(_end_descendants(foreign, status))


def _reap(foreign: int) -> tuple[int | None, bool]:
    """Reap exited children: the status of the third-party code if it is among them, and whether any are left."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if not pid:
            return status, True
        if pid == foreign:
            status = ended


def _end_descendants(foreign: int, status: int | None) -> int:
    until, are_left = time.monotonic() + _LIMIT_S, True
    # Orphans of killed processes become children of the guard.
    while are_left and time.monotonic() < until:
        for child in _children(foreign):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
        ended, are_left = _reap(foreign)
        status = status if ended is None else ended
    if sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(foreign, signal.SIGKILL)
    return status if status is not None else int(signal.SIGKILL)


def _children(foreign: int) -> list[int]:
    """The children of this process; on Linux they include orphans."""
    if sys.platform != "linux":
        return [foreign]
    guard = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]
    except OSError:  # a kernel without that file
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == guard]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _exit_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
