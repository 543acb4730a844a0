"""The connection to a Tinker service: the key, waiting that notices a dead service, and errors in plain sentences."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import httpx
import tinker
from tinker.lib.base_url import resolve_base_url
from tinker.lib.credentials import JsonCredentialStore, default_credentials_path

from retrain.checks.preflight import problem_with_tinker_key
from retrain.errors import BackendError, ConfigError, RetrainError

T = TypeVar("T")

# A service that answers nothing for so long is gone. One that answers may take as long as it likes: steps queue there.
PATIENCE_S = 300.0
# At start-up the address is more likely wrong than the service down.
START_PATIENCE_S = 30.0
LAST_PATIENCE_S = 10.0
# A call that takes longer than this makes us ask whether the service is still there.
ASK_EVERY_S = 15.0
_KEY = "TINKER_API_KEY"


class Service:
    """A Tinker service that was seen to answer."""

    def __init__(self, base_url: str, say: Callable[[str], None]) -> None:
        check_key()
        self.url = resolve_base_url(base_url or None)
        self.say = say
        self.patience_s = PATIENCE_S
        self.ask_every_s = ASK_EVERY_S
        self._await_answer()
        self.client = tinker.ServiceClient(base_url=self.url)

    def call(self, function: Callable[[], T], doing: str) -> T:
        """Run a blocking call of the SDK; its errors become ours. `doing` completes "while …"."""
        try:
            return function()
        except RetrainError:
            raise
        except Exception as error:
            raise self.explain(error, doing) from error

    def wait(self, future: Future[T] | Any, doing: str) -> T:
        """The result of an SDK future, however long it takes, as long as the service answers at all."""
        inner: Future[T] = future if isinstance(future, Future) else future.future()
        last_seen = time.monotonic()
        while True:
            try:
                return inner.result(timeout=self.ask_every_s)
            except Exception as error:
                if inner.done():
                    raise self.explain(error, doing) from error
            if self.answers():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > self.patience_s:
                silent_s = time.monotonic() - last_seen
                # What is left to do, a last checkpoint perhaps, is not worth waiting as long for.
                self.patience_s = min(self.patience_s, LAST_PATIENCE_S)
                raise BackendError(
                    f"the Tinker service at {self.url} has not answered for {silent_s:.0f} s (while {doing}).  "
                    "Try: go on from the last checkpoint when it is back"
                )

    def answers(self) -> bool:
        """Whether anything at all answers at the address."""
        try:
            httpx.get(f"{self.url}/api/v1/healthz", timeout=10.0)
        except httpx.HTTPError:
            return False
        return True

    def close(self, status: Literal["success", "errored", "interrupted"]) -> None:
        """End the session. Not every service knows how; it then ends by itself when the heartbeats stop."""
        with contextlib.suppress(Exception):
            self.client.close(status).result(timeout=LAST_PATIENCE_S)

    def _await_answer(self) -> None:
        began = time.monotonic()
        told = False
        while not self.answers():
            if time.monotonic() - began > START_PATIENCE_S:
                raise BackendError(
                    f"no Tinker service answers at {self.url}.  "
                    "Try: check [model] base_url (or TINKER_BASE_URL), and that the service is up"
                )
            if not told:
                told = True
                self.say(f"Nothing answers at {self.url} yet; trying for {START_PATIENCE_S:.0f} s...")
            time.sleep(min(1.0, START_PATIENCE_S / 10))

    def explain(self, error: Exception, doing: str) -> RetrainError:
        """An error of the SDK as one of ours, without the key whatever the service echoed."""
        if isinstance(error, RetrainError):
            return error
        text = redact(str(error) or type(error).__name__)
        where = f"the Tinker service at {self.url}"
        status = error.status_code if isinstance(error, tinker.APIStatusError) else None
        if isinstance(error, tinker.APIStatusError) and status in (401, 403):
            return ConfigError(
                f"{where} refused the key (status {status}, while {doing}): {text}  "
                f"Try: a valid {_KEY}, in the environment or in .env"
            )
        if status == 402:
            return BackendError(f"{where} wants its bill settled (while {doing}): {text}")
        if isinstance(error, tinker.APIConnectionError):
            return BackendError(f"the connection to {where} failed (while {doing}): {text}")
        if isinstance(error, tinker.RequestFailedError):
            return BackendError(f"{where} could not do it (while {doing}): {text}")
        if isinstance(error, AssertionError):
            return BackendError(
                f"{where} and the Tinker SDK {tinker.__version__} do not understand each other (while {doing}): {text}"
            )
        return BackendError(f"{where} failed (while {doing}): {type(error).__name__}: {text}")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Run a blocking call of the SDK on a thread of its own, which does not keep the program from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="retrain-tinker").start()
    return future


def check_key() -> None:
    """Refuse a key that cannot be one before anything is sent."""
    problem = problem_with_tinker_key()
    has_own = os.environ.get(_KEY) or os.environ.get("TINKER_CREDENTIAL_CMD")
    if not problem and not has_own and JsonCredentialStore(default_credentials_path()).get_default_key() is None:
        problem = "needs a key, and none of those that are stored is the default."
    if problem:
        raise ConfigError(f'[backend] backend = "tinker" {problem}  Try: put {_KEY}=tml-... into .env')


def redact(text: str) -> str:
    """Text without the key."""
    key = os.environ.get(_KEY, "")
    return text.replace(key, "***") if key else text
