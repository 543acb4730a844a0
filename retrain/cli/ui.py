"""`retrain ui DIR…`: serve the report locally, with live updates."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from retrain.errors import ConfigError

REFRESH_S = 5.0
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


class Handler(BaseHTTPRequestHandler):
    """Serves the page and the data that it polls."""

    def __init__(self, folders: tuple[Path, ...], *arguments: object) -> None:
        self.folders = folders
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Read the folders for every request. Requests for other host names are rejected."""
        if not _LOCAL.fullmatch(self.headers.get("Host", "")):
            # DNS rebinding: a web page may point its own host name to 127.0.0.1 to read what is served.
            self.send_error(403, "Only localhost, 127.0.0.1 and [::1] are served")
            return
        from retrain.report import build_page, collect  # noqa: PLC0415  (slow to import)
        from retrain.report.page import as_json  # noqa: PLC0415

        responses = {"/": (build_page, "text/html"), "/data.json": (as_json, "application/json")}
        if self.path not in responses:
            self.send_error(404)
            return
        write, kind = responses[self.path]
        body = write(collect(self.folders, live=REFRESH_S)).encode("utf-8", "replace")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
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


@click.command("ui", context_settings={"max_content_width": 110})
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option("--port", default=8765, show_default=True, help="Port on 127.0.0.1; 0 picks a free one.")
def command(folders: tuple[Path, ...], port: int) -> int:
    """Serve the report on the runs in DIR locally, with live updates. Press Ctrl-C to quit."""
    from retrain.report import collect  # noqa: PLC0415  (slow to import)

    collect(folders)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, folders))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port {port} on 127.0.0.1 cannot be used: {error}.  Try: --port 0") from error
    with server, contextlib.suppress(KeyboardInterrupt):
        click.echo(f"Serving on http://127.0.0.1:{server.server_address[1]} (press Ctrl-C to quit)")
        server.serve_forever()
    return 0
