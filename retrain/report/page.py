"""The report page: template, style, script and data in one HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files

SCRIPTS = ("core", "curves", "chart", "charts", "verdict", "lab", "app")


def build_page(data: Mapping[str, object]) -> str:
    """The complete HTML page."""
    source = files("retrain.report")
    page = source.joinpath("page.html").read_text(encoding="utf-8")
    # Data last: a completion may contain a placeholder.
    for place, text in (
        ("STYLE", source.joinpath("page.css").read_text(encoding="utf-8")),
        ("SCRIPT", read_script()),
        ("DATA", as_json(data)),
    ):
        page = page.replace(f"/*{place}*/", text, 1)
    return page


def read_script() -> str:
    """The script of the page, from its parts."""
    folder = files("retrain.report").joinpath("script")
    return "\n".join(folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)


def script_source() -> str:
    """The hash of the page's script for a Content-Security-Policy."""
    # Exactly as between the tags of page.html.
    script = f"\n{read_script()}\n"
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def as_json(data: Mapping[str, object]) -> str:
    """JSON that is safe inside a script element: no text in it can close the element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
