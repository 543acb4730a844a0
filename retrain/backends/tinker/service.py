"""The connection to a Tinker service: key, timeouts and errors."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import httpx
import tinker
from tinker import types
from tinker.lib.base_url import resolve_base_url
from tinker.lib.credentials import JsonCredentialStore, default_credentials_path

from retrain.checks.connections import TINKER_HEALTH, check_not_refused
from retrain.checks.keys import explain_invalid_tinker_key
from retrain.errors import BackendError, ConfigError, RetrainError
from retrain.runtime.clock import awake_s

T = TypeVar("T")

# A service that does not respond for this long is down. One that responds may take any time: steps are queued there.
PATIENCE_S = 300.0
# At start-up a wrong URL is more likely than a service that is down.
START_PATIENCE_S = 30.0
LAST_PATIENCE_S = 10.0
# Interval of health checks during a call.
HEALTH_CHECK_S = 15.0
_KEY = "TINKER_API_KEY"


class Service:
    """A Tinker service that responds."""

    def __init__(self, base_url: str, log: Callable[[str], None]) -> None:
        check_key()
        self.url = resolve_base_url(base_url or None)
        self.log = log
        self.patience_s = PATIENCE_S
        self.health_check_s = HEALTH_CHECK_S
        self._await_answer()
        self.client = tinker.ServiceClient(base_url=self.url)

    def call(self, function: Callable[[], T], doing: str) -> T:
        """Run a blocking call of the SDK and translate its errors. `doing` completes "while …"."""
        try:
            return function()
        except RetrainError:
            raise
        except Exception as error:
            raise self.explain(error, doing) from error

    def wait(self, future: Future[T] | Any, doing: str) -> T:
        """The result of an SDK future; waits as long as the service responds."""
        inner: Future[T] = future if isinstance(future, Future) else future.future()
        last_seen = awake_s()
        while True:
            try:
                return inner.result(timeout=self.health_check_s)
            except Exception as error:
                if inner.done():
                    raise self.explain(error, doing) from error
            if self.answers():
                last_seen = awake_s()
            elif (silent_s := awake_s() - last_seen) > self.patience_s:
                # Remaining calls, such as a last checkpoint, wait less.
                self.patience_s = min(self.patience_s, LAST_PATIENCE_S)
                raise BackendError(
                    f"the Tinker service at {self.url} has not answered for {silent_s:.0f} s (while {doing}).  "
                    "Try: resume from the last checkpoint when it is back"
                )

    def find_model(self, name: str, where: str = "[model] model") -> types.SupportedModel | None:
        """What the service says about a model, None if it lists none; raises if it has only others.

        `where` is the option that names the model.
        """
        offered = self.call(self.client.get_server_capabilities, "asking what it offers").supported_models
        models = {one.model_name: one for one in offered if one.model_name}
        if models and name not in models:
            shown = ", ".join([*models][:8]) + (", ..." if len(models) > 8 else "")
            (closest,) = get_close_matches(name, models, n=1, cutoff=0.0)
            raise ConfigError(
                f"{where} = {name!r} is not offered by {self.url}. It has: {shown}.  "
                f"Try: {where.split()[-1]} = {json.dumps(closest)}"
            )
        return models.get(name)

    def answers(self) -> bool:
        """Whether the service responds."""
        try:
            httpx.get(self.url + TINKER_HEALTH, timeout=10.0)
        except httpx.HTTPError:
            return False
        return True

    def close(self, status: Literal["success", "errored", "interrupted"]) -> None:
        """End the session. Not every service supports it; the session then ends when heartbeats stop."""
        with contextlib.suppress(Exception):
            self.client.close(status).result(timeout=LAST_PATIENCE_S)

    def _await_answer(self) -> None:
        began = time.monotonic()
        notified = False
        while not self.answers():
            check_not_refused(self.url)
            if not notified:
                notified = True
                self.log(f"Nothing answers at {self.url} yet; trying for {START_PATIENCE_S:.0f} s...")
            if time.monotonic() - began > START_PATIENCE_S:
                raise BackendError(
                    f"no Tinker service answers at {self.url}.  "
                    "Try: check [model] base_url (or TINKER_BASE_URL), and that the service is up"
                )
            time.sleep(min(1.0, START_PATIENCE_S / 10))

    def explain(self, error: Exception, doing: str) -> RetrainError:
        """Translate an error of the SDK, without the key."""
        if isinstance(error, RetrainError):
            return error
        text = redact(str(error) or type(error).__name__)
        where = f"the Tinker service at {self.url}"
        status = error.status_code if isinstance(error, tinker.APIStatusError) else None
        if isinstance(error, tinker.APIStatusError) and status in (401, 403):
            return ConfigError(
                f"{where} rejected the API key (status {status}, while {doing}): {text}  "
                f"Try: a valid {_KEY}, in the environment or in .env"
            )
        if status == 402:
            return BackendError(f"{where} requires payment (while {doing}): {text}")
        if isinstance(error, tinker.APIConnectionError):
            return BackendError(f"the connection to {where} failed (while {doing}): {text}")
        if isinstance(error, tinker.RequestFailedError):
            return BackendError(f"{where} could not complete the request (while {doing}): {text}")
        if isinstance(error, AssertionError):
            return BackendError(
                f"{where} and the Tinker SDK {tinker.__version__} use incompatible protocols (while {doing}): {text}"
            )
        return BackendError(f"{where} failed (while {doing}): {type(error).__name__}: {text}")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Run a blocking call of the SDK on a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="retrain-tinker").start()
    return future


def check_key() -> None:
    """Raise if the key is missing or invalid, before anything is sent."""
    problem = explain_invalid_tinker_key()
    has_own = os.environ.get(_KEY) or os.environ.get("TINKER_CREDENTIAL_CMD")
    if not problem and not has_own and JsonCredentialStore(default_credentials_path()).get_default_key() is None:
        problem = "needs a key, and none of those that are stored is the default."
    if problem:
        raise ConfigError(f'[backend] backend = "tinker" {problem}  Try: put {_KEY}=tml-... into .env')


def redact(text: str) -> str:
    """Text without the key."""
    key = os.environ.get(_KEY, "")
    return text.replace(key, "***") if key else text
