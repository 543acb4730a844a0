"""Rules about server URLs and paths, and about secrets: a run saves its configuration, so it must not contain any."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from retrain.config.options import option_issue, paths_where, values_of
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue
from retrain.isolation.redaction import has_secret, redact

_HOST = re.compile(r"[\w.-]+(:\d+)?(/[\w./-]*)?", re.ASCII)
# Not every "token": most are those of a tokenizer.
_SECRET = re.compile(
    r"((api|access|secret|private|auth)[_-]?keys?|passw(or)?d|passphrase|secret|credentials?"
    r"|(^|[._-])(api|access|auth|hf|bearer)[_-]?tokens?)$",
    re.IGNORECASE,
)
# The name of a variable, or text that is not a key, like the special tokens of a tokenizer.
_HARMLESS = re.compile(r"\$?\{?[A-Z][A-Z0-9_]*\}?|.*[\s<>].*", re.DOTALL)
_SHORTEST = 6
_URL = re.compile(r"https?://[^\s/,]+[^\s,]*", re.IGNORECASE)


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
            else:
                yield from _check_address(path, url, variable)


def check_judge_url(config: TrainConfig) -> Iterator[ConfigIssue]:
    """The URL of the judge is one, without a password."""
    url, path = config.reward.judge_base_url, "reward.judge_base_url"
    if url and not _URL.fullmatch(url):
        yield option_issue(path, f"is {_without_query(url)!r}, not a URL.", "Try: http://localhost:8000/v1")
    elif url:
        yield from _check_address(path, url, "OPENAI_API_KEY")


def check_arguments(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Tables of arguments contain no passwords and keys; names of environment variables are fine."""
    for path, value in values_of(config).items():
        for name in _find_secrets(value, ""):
            hint = "Try: an environment variable, which the code that needs it reads"
            yield option_issue(path, f"holds a secret in {name}, and a run saves its configuration.", hint)


def _find_secrets(value: object, name: str) -> Iterator[str]:
    """Where a table of arguments holds secrets. Single options have their own rules."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_secrets(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find_secrets(item, name)
    elif isinstance(value, str) and name:
        is_key = _SECRET.search(name) and len(value) >= _SHORTEST and not _HARMLESS.fullmatch(value)
        if is_key or has_secret(value):
            yield name


def _check_address(path: str, url: str, variable: str) -> Iterator[ConfigIssue]:
    if has_valid_port(url):
        yield from _check_secrets(path, url, variable)
    else:
        text = f"has {_without_query(url)!r}, which has no valid port."
        yield option_issue(path, text, "Try: a port from 1 to 65535")


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


def has_valid_port(url: str) -> bool:
    """Whether the port of a URL is a number that a server can have, if there is one."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def check_paths(config: TrainConfig) -> Iterator[ConfigIssue]:
    """No path contains a NUL character, is a cycle of links, is too long, or is in a folder that cannot be entered."""
    for option, value in values_of(config).items():
        if option in paths_where("path"):
            for path in filter(None, (value,) if isinstance(value, str) else value):
                text = _explain_invalid(path)
                if text:
                    yield option_issue(option, text, "Try: another path")


def _explain_invalid(path: str) -> str:
    if "\0" in path:
        return f"= {path!r} holds a NUL character, which no path can have."
    try:
        found = os.path.expanduser(path)
        if stat.S_ISDIR(os.stat(found).st_mode):
            os.stat(os.path.join(found, "."))  # refused for a folder that cannot be entered
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"= {path!r} is a cycle of symbolic links."
        if error.errno == errno.ENAMETOOLONG:
            return f"= {path[:40] + '...'!r} is longer than a path may be."
        if error.errno == errno.EACCES:
            return f"= {path!r} is in a folder that you have no permission to enter."
    except ValueError:  # text that cannot be encoded; check_toml_values reports it
        return ""
    return ""
