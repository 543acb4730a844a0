"""`retrain ui DIR…`: serve the report locally, with live updates."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import threading
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import click

from retrain.errors import ConfigError, RetrainError

if TYPE_CHECKING:
    from retrain.report.live import LiveReport
    from retrain.types import JsonObject

POLL_S = 2.0
"""The page asks again this long after an answer."""
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_GZIP_BYTES = 2000


class Handler(BaseHTTPRequestHandler):
    """Serves the page, what changed since its last request, and completions."""

    def __init__(self, report: LiveReport, *arguments: object) -> None:
        self.report = report
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer from what was read of the folders. Requests for other host names are rejected."""
        if not _LOCAL.fullmatch(self.headers.get("Host", "")):
            # DNS rebinding: a web page may point its own host name to 127.0.0.1 to read what is served.
            self.send_error(403, "Only localhost, 127.0.0.1 and [::1] are served")
            return
        from retrain.report.page import as_json, build_page  # noqa: PLC0415  (slow to import)

        try:
            url = urlsplit(self.path)
            if url.path == "/":
                self._send(build_page({"live": POLL_S, "runs": [], **self.report.head}), "text/html")
            else:
                self._send(as_json(answer(self.report, url.path, dict(parse_qsl(url.query)))), "application/json")
        except ConnectionError:
            # The page was closed.
            self.close_connection = True
        except (KeyError, ValueError, StopIteration, RetrainError, OSError):
            # Of what does not exist, or no longer, or is damaged.
            self.send_error(404)

    def _send(self, text: str, kind: str) -> None:
        body = text.encode("utf-8", "replace")
        is_zipped = len(body) > _GZIP_BYTES and "gzip" in self.headers.get("Accept-Encoding", "")
        if is_zipped:
            body = gzip.compress(body, 1)
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if is_zipped:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Add security headers: completions on the page are untrusted and must not run."""
        from retrain.report.page import script_source  # noqa: PLC0415  (slow to import)

        policy = (
            f"default-src 'none'; script-src {script_source()}; style-src 'unsafe-inline'; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the page polls every few seconds."""


def answer(report: LiveReport, path: str, query: Mapping[str, str]) -> JsonObject:
    """The answer to a request for data; raises KeyError or ValueError if there is none."""
    from retrain.report.live import Known  # noqa: PLC0415  (slow to import)

    if path == "/data.json":
        known = {}
        for entry in filter(None, query.get("known", "").split(",")):
            name, version, epoch, size, rows = entry.split(":")
            known[name] = Known(version, int(epoch), int(size), int(rows))
        return report.poll(known, query.get("head", ""))
    if path == "/window.json":
        return report.window(query["run"], int(query["first"]), int(query["last"]))
    if path == "/groups.json":
        return report.groups(query)
    if path == "/tokens.json":
        return {"groups": report.tokens(query["run"], int(query["step"]))}
    raise KeyError(path)


@click.command("ui", context_settings={"max_content_width": 110})
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="Port on 127.0.0.1; 0 picks a free one.",
)
def command(folders: tuple[Path, ...], port: int) -> int:
    """Serve the report on the runs in DIR (default: ./logs) locally, with live updates. Press Ctrl-C to quit."""
    # What is named may be about to be created; ./logs is only assumed.
    awaited = [folder for folder in folders if _is_awaited(folder)]
    folders = folders or (Path("logs"),)
    missing = [folder for folder in folders if folder not in awaited and not folder.expanduser().is_dir()]
    if missing:
        raise ConfigError(f"there is no folder {missing[0]}.")
    from retrain.report.live import LiveReport  # noqa: PLC0415  (slow to import)

    report = LiveReport(folders)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, report))
    except OSError as error:
        raise ConfigError(f"port {port} on 127.0.0.1 cannot be used: {error}.  Try: --port 0") from error
    server.daemon_threads = True
    with server, contextlib.suppress(KeyboardInterrupt):
        threading.Thread(target=report.follow, daemon=True, name="read logs").start()
        click.echo(f"Serving on http://127.0.0.1:{server.server_address[1]} (press Ctrl-C to quit)")
        for folder in awaited:
            click.echo(f"waiting for {folder}")
        server.serve_forever()
    return 0


def _is_awaited(folder: Path) -> bool:
    """Whether a folder does not exist yet, but the one that it is to be in does."""
    path = folder.expanduser()
    # A link to nothing, or to itself, is there already.
    return not os.path.lexists(path) and path.parent.is_dir()
