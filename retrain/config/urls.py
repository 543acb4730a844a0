"""Rules for addresses of servers: they are URLs, and hold no key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue
from retrain.isolation.redaction import redact

_HOST = re.compile(r"[\w.-]+(:\d+)?(/[\w./-]*)?", re.ASCII)
_URL = re.compile(r"https?://[^\s/,]+[^\s,]*")


def urls_are_urls(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Server addresses begin with http:// or https://."""
    for where, text in (("[inference] url", config.inference.url), ("[model] base_url", config.model.base_url)):
        key = "INFERENCE_API_KEY" if where == "[inference] url" else "TINKER_API_KEY"
        for url in filter(None, (part.strip() for part in text.split(","))):
            if not _URL.fullmatch(url):
                bare = url if _HOST.fullmatch(url) else "localhost:8000"
                yield ConfigIssue(where, f"has {_shown(url)!r}, which is not a URL.", f"Try: http://{bare}")
            elif not _has_real_port(url):
                yield ConfigIssue(
                    where, f"has {_shown(url)!r}, and there is no such port.", "Try: a port from 1 to 65535"
                )
            else:
                yield from _url_holds_no_secret(where, url, key)


def _url_holds_no_secret(where: str, url: str, variable: str) -> Iterator[ConfigIssue]:
    """A run writes its configuration down; keys come from the environment. The URL itself is not shown."""
    hint = f"Try: put the key into {variable}, in .env"
    if "@" in url.split("//")[-1].split("/")[0]:
        yield ConfigIssue(where, "holds a password.", hint)
    elif "?" in url or "#" in url:
        yield ConfigIssue(where, "holds a query (?...), which an address of a server cannot have.", hint)


def _shown(url: str) -> str:
    """A URL without what may be a key in it."""
    return redact(re.split(r"[?#]", url, maxsplit=1)[0])


def _has_real_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def judge_address_holds_no_password(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A run writes its configuration down; keys come from the environment."""
    url = config.reward.judge_base_url
    if url and not _URL.fullmatch(url):
        yield ConfigIssue("[reward] judge_base_url", f"is {_shown(url)!r}, not a URL.", "Try: http://localhost:8000/v1")
    elif url:
        yield from _url_holds_no_secret("[reward] judge_base_url", url, "OPENAI_API_KEY")
