"""Secrets: redaction of text from third-party code, and the environment variables that such code may see."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from io import TextIOWrapper
from typing import TextIO
from urllib.parse import quote

HIDDEN = "***"

PUBLIC_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TEMP", "TMP", "TERM"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_*", "XDG_*", "MALLOC_*"),
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "CUDA_*", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_*", "HF_ENDPOINT", "TRANSFORMERS_*", "TOKENIZERS_*"),
    *("TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NLTK_DATA", "SPACY_DATA"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SLURM_JOB_ID", "SLURM_TMPDIR", "CI", "COVERAGE_*"),
)
"""Variables that programs commonly need; none of them contains a key. Shell patterns."""

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEYS?|KEYS?|TOKENS?|SECRETS?|PASS(?:WORD|WD|PHRASE)?|PWD|CREDENTIALS?|AUTH|COOKIE|DSN|PAT)(?:_|$)"
    # As in PGPASSWORD and MYTOKEN; not TOKENIZERS.
    r"|(?:API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)S?(?:_|$)",
    re.IGNORECASE,
)
_PASSWORD_NAME = re.compile(r"PASS(?:WORD|WD|PHRASE)", re.IGNORECASE)
# Shorter values are words or numbers and would be hidden everywhere.
_SHORTEST_SECRET, _SHORTEST_PASSWORD = 8, 6

# A user name, which may be an e-mail address, and password, or a token instead of the name.
_IN_URL = re.compile(r"(?<=://)(?:[^\s/?#:'\"]*:[^\s/?#'\"]*|[^\s/?#@:'\"]{16,})@")
_IN_QUERY = re.compile(
    r"(?P<name>[?&](?:[\w.-]*(?:key|token|secret|password|signature|sig|auth))=)[^\s&#'\"<>]+", re.IGNORECASE
)
_IN_HEADER = re.compile(r"(?P<name>\bBearer\s+|\bAuthorization\W{1,8}Basic\s+(?=\S*[A-Z0-9=]))[A-Za-z0-9._~+/=-]{8,}")
_KEY_PREFIXES = (
    *("sk-", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "AKIA", "xox", "tml-"),
    "-----BEGIN",
)
_KEY_FORMATS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|tml-[A-Za-z0-9_-]{16,}|glpat-[A-Za-z0-9_-]{16,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)


def redact(text: str) -> str:
    """The text with passwords in URLs, keys of known formats, and every secret of this process's environment hidden."""
    return _hide(text, _find_secrets(tuple(os.environ.items())))


# Deleted, they would close the streams that they write to; and progress bars still do so as the program exits.
_KEPT: list[TextIO] = []


class RedactedText(TextIOWrapper):
    """Text output in which secrets are hidden, whoever prints them: plugins run in the training process."""

    def write(self, text: str) -> int:
        """Write what is left of it."""
        return super().write(redact(text))


@contextmanager
def redacted_output() -> Iterator[None]:
    """Hide secrets in all that Python prints meanwhile."""
    streams = {name: stream for name in ("stdout", "stderr") if isinstance(stream := vars(sys)[name], TextIOWrapper)}
    try:
        for name, stream in streams.items():
            stream.flush()
            # Standard error escapes what it cannot encode; texts of rewards and data may have such characters.
            redacted = RedactedText(stream.buffer, stream.encoding, "backslashreplace")
            redacted.reconfigure(line_buffering=stream.line_buffering, write_through=stream.write_through)
            setattr(sys, name, redacted)
        yield
    finally:
        for name, stream in streams.items():
            redacted = vars(sys)[name]
            with suppress(ValueError, OSError):  # closed, if nobody reads it
                redacted.flush()
                # What is written from now on would be lost if the other stream is closed first as the program exits.
                redacted.reconfigure(line_buffering=True, write_through=True)
            _KEPT.append(redacted)
            setattr(sys, name, stream)


def has_secret(text: str) -> bool:
    """Whether the text contains a password in a URL or a key of a known format."""
    return _hide(text, None) != text


def redact_all(row: Mapping[str, object]) -> dict[str, object]:
    """The same for every text in a row of a log."""
    secrets = _find_secrets(tuple(os.environ.items()))
    return {key: _hide_all(value, secrets) for key, value in row.items()}


def _hide_all(value: object, secrets: re.Pattern[str] | None) -> object:
    if isinstance(value, str):
        return _hide(value, secrets)
    if isinstance(value, Mapping):
        return {key: _hide_all(item, secrets) for key, item in value.items()}
    return [_hide_all(item, secrets) for item in value] if isinstance(value, list | tuple) else value


def _hide(text: str, secrets: re.Pattern[str] | None) -> str:
    if secrets is not None:
        text = secrets.sub(HIDDEN, text)
    # Whole completions go through here: a search for fixed text is ten times as fast as a pattern.
    if "://" in text and "@" in text:
        text = _IN_URL.sub(f"{HIDDEN}@", text)
    if "=" in text and ("?" in text or "&" in text):
        text = _IN_QUERY.sub(rf"\g<name>{HIDDEN}", text)
    if "Bearer" in text or "Basic" in text:
        text = _IN_HEADER.sub(rf"\g<name>{HIDDEN}", text)
    return _KEY_FORMATS.sub(HIDDEN, text) if any(prefix in text for prefix in _KEY_PREFIXES) else text


def public_environment(passed: Sequence[str] = ()) -> dict[str, str]:
    """The variables that third-party code may see: those that hold no key, and those that the user passes on."""
    given = {name: value for name, value in os.environ.items() if _is_named(name, PUBLIC_VARIABLES)}
    harmless = {name: value for name, value in given.items() if not _IN_URL.search(value)}
    return harmless | {name: value for name, value in os.environ.items() if _is_named(name, passed)}


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@lru_cache(maxsize=4)
def _find_secrets(environment: tuple[tuple[str, str], ...]) -> re.Pattern[str] | None:
    """A pattern of every value that is a secret by the name of its variable."""
    values = set[str]()
    for name, value in environment:
        if _SECRET_NAME.search(name) and not _is_named(name, PUBLIC_VARIABLES) and not _is_path(value):
            shortest = _SHORTEST_PASSWORD if _PASSWORD_NAME.search(name) else _SHORTEST_SECRET
            values |= {form for form in _forms(value.strip()) if len(form) >= shortest}
        for found in _IN_URL.finditer(value):
            # A password of a URL may turn up without the URL.
            user = found[0].removesuffix("@")
            values |= {form for form in _forms(user.partition(":")[2] or user) if len(form) >= _SHORTEST_SECRET}
    known = sorted(values, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known))) if known else None


def _is_path(value: str) -> bool:
    """Whether it is the path of a file that is there, or could be: keys may begin with a slash, too."""
    parent = os.path.dirname(value)
    return os.path.isabs(value) and (os.path.exists(value) or (bool(parent.strip("/")) and os.path.isdir(parent)))


def _forms(value: str) -> set[str]:
    """A secret as it is, line by line, and escaped as `repr` and JSON print it and as URLs quote it."""
    parts = {value, *(line.strip() for line in value.splitlines())}
    dump_unicode = partial(json.dumps, ensure_ascii=False)
    quoted = {write(part)[1:-1] for part in parts for write in (repr, json.dumps, dump_unicode)}
    # Of bytes, as other programs pass them on; without their b and quotes.
    quoted |= {repr(part.encode(errors="surrogateescape"))[2:-1] for part in parts} | {ascii(p)[1:-1] for p in parts}
    # repr escapes one kind of quote only where both occur.
    quoted |= {quote(part, safe=safe, errors="surrogateescape") for part in parts for safe in ("", "/")}
    return parts | quoted | {part.replace("\\", "\\\\").replace("'", "\\'") for part in parts}
