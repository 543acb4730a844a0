"""Rules about server URLs: they are valid, and contain no secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from retrain.config.options import option_issue
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue
from retrain.isolation.redaction import redact

_HOST = re.compile(r"[\w.-]+(:\d+)?(/[\w./-]*)?", re.ASCII)
_URL = re.compile(r"https?://[^\s/,]+[^\s,]*")


def check_urls(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Server URLs begin with http:// or https://."""
    for path, text, variable in (
        ("inference.url", config.inference.url, "INFERENCE_API_KEY"),
        ("model.base_url", config.model.base_url, "TINKER_API_KEY"),
    ):
        for url in filter(None, (part.strip() for part in text.split(","))):
            if not _URL.fullmatch(url):
                bare = url if _HOST.fullmatch(url) else "localhost:8000"
                yield option_issue(path, f"has {_without_query(url)!r}, which is not a URL.", f"Try: http://{bare}")
            elif not _has_valid_port(url):
                text = f"has {_without_query(url)!r}, which has no valid port."
                yield option_issue(path, text, "Try: a port from 1 to 65535")
            else:
                yield from _check_secrets(path, url, variable)


def check_judge_url(config: TrainConfig) -> Iterator[ConfigIssue]:
    """The URL of the judge is one, without a password."""
    url, path = config.reward.judge_base_url, "reward.judge_base_url"
    if url and not _URL.fullmatch(url):
        yield option_issue(path, f"is {_without_query(url)!r}, not a URL.", "Try: http://localhost:8000/v1")
    elif url:
        yield from _check_secrets(path, url, "OPENAI_API_KEY")


def _check_secrets(path: str, url: str, variable: str) -> Iterator[ConfigIssue]:
    """A run stores its configuration; keys come from the environment. The message does not show the URL."""
    hint = f"Try: put the key into {variable}, in .env"
    if "@" in url.split("//")[-1].split("/")[0]:
        yield option_issue(path, "holds a password.", hint)
    elif "?" in url or "#" in url:
        yield option_issue(path, "holds a query (?...), which a server URL cannot have.", hint)


def _without_query(url: str) -> str:
    """A URL without the parts that may hold a key."""
    return redact(re.split(r"[?#]", url, maxsplit=1)[0])


def _has_valid_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


RULES = (check_urls, check_judge_url)
