"""Whether a server can be reached. Uses the standard library alone: it is asked before anything slow is imported."""

from __future__ import annotations

import http.client
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

from retrain.builtin import resolve_model
from retrain.config import TrainConfig
from retrain.errors import BackendError
from retrain.inference_engine.http.spec import ServerSpec
from retrain.plugins import REGISTRIES, SERVER_ENGINES

RESPONSE_S = 3.0
TINKER_HEALTH = "/api/v1/healthz"
# The key is missing or not valid, or a proxy answers for a server that does not. A key that may chat but not list
# models gets 403.
_NO_JUDGE = (401, 502, 503, 504)


def explain_no_response(url: str, opener: urllib.request.OpenerDirector | None = None) -> str:
    """Why there is no response, or ""; client errors count as a response."""
    error = _request(url, opener)
    if isinstance(error, urllib.error.HTTPError):
        return f"it returned {error.code}." if error.code >= 500 else ""
    return f"{_reason(error)}." if error is not None else ""


def explain_no_judge(url: str, key: str) -> str:
    """Why no judge that takes this key responds, or ""; it need not list its models, so other errors are a response."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    error = _request(urllib.request.Request(url, headers=headers), urllib.request.build_opener(_NoRedirects))
    if isinstance(error, urllib.error.HTTPError):
        if moved := explain_redirect(url, error.headers.get("Location", "")):
            return f"{moved}."
        return f"it returned {error.code}." if error.code in _NO_JUDGE else ""
    return f"{_reason(error)}." if error is not None else ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, as a run with a judge does not: the key is for this server."""

    def redirect_request(self, *_: object) -> None:
        return None


def explain_redirect(url: str, location: str) -> str:
    """Where a server sends its clients, if that is another one; a path of its own may be that of a single request."""
    try:
        own, target = urlsplit(url), urlsplit(urljoin(url, location))
        place = f"{target.scheme}://{target.hostname}{f':{target.port}' if target.port else ''}"
    except ValueError:
        return "it redirects to what is no URL"
    is_other = location and (own.scheme, own.hostname, own.port) != (target.scheme, target.hostname, target.port)
    return f"it redirects to {place}, which is not followed" if is_other else ""


def server_kind(config: TrainConfig) -> ServerSpec:
    """The kind of server that `[inference] engine` names."""
    kind = REGISTRIES["engine"].load(config.inference.engine)
    assert isinstance(kind, ServerSpec)
    return kind


def find_absent_server(config: TrainConfig) -> tuple[str, str]:
    """Which server of `[inference] url` does not respond and why, and the command that starts it; empty if all do."""
    kind = server_kind(config)
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in kind.urls(config.inference.url):
        problem = explain_no_response(f"{url}{kind.health}", without_proxy)
        if problem:
            start = kind.start_command(str(resolve_model(config.model.model)), url, config.model.lora_rank)
            return f"no {kind.name} server responds at {url}: {problem}", start
    return "", ""


def announce_wait(config: TrainConfig, log: Callable[[str], None]) -> None:
    """Say that a server will be waited for. The wait begins once the model is loaded, which may take minutes."""
    inference = config.inference
    if config.backend.backend != "local" or inference.engine not in SERVER_ENGINES or inference.starts_server:
        return
    problem, start = find_absent_server(config)
    if problem:
        wait = f"The run will wait up to {inference.wait_s:g} s for it (--inference-wait-s)."
        log(f"{problem[0].upper()}{problem[1:]} {wait} To start one: {start}")


def check_not_refused(url: str) -> None:
    """Raise if a Tinker service refuses the connection or its host is unknown. One that is only slow may still come.

    Behind a proxy, only the SDK knows which connection it will make.
    """
    if urllib.request.getproxies().keys() - {"no"}:
        return
    parts = urlsplit(url)
    without_user = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    reason = _reason(_request(without_user + TINKER_HEALTH))
    if isinstance(reason, (ConnectionRefusedError, socket.gaierror, http.client.InvalidURL)):
        raise BackendError(
            f"no Tinker service answers at {without_user}: {reason}.  "
            "Try: check [model] base_url (or TINKER_BASE_URL), and that the service is up"
        )


def check_tinker_address(config: TrainConfig) -> None:
    """The same for the service of a configuration. The default address is in the SDK, which takes seconds to import."""
    url = config.model.base_url or os.environ.get("TINKER_BASE_URL")
    if config.backend.backend == "tinker" and url:
        check_not_refused(url.rstrip("/"))


def _request(
    url: str | urllib.request.Request, opener: urllib.request.OpenerDirector | None = None
) -> Exception | None:
    try:
        (opener or urllib.request.build_opener()).open(url, timeout=RESPONSE_S).close()
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        return error
    except (OSError, ValueError, http.client.HTTPException) as error:
        return error
    return None


def _reason(error: Exception | None) -> object:
    if isinstance(error, http.client.HTTPException) and not isinstance(error, http.client.InvalidURL):
        return "what listens there does not speak HTTP"
    return error.reason if isinstance(error, urllib.error.URLError) else error
