"""Environment ids, their modules, and the installed version of verifiers."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from retrain.config import schema
from retrain.errors import ConfigError, ConfigIssue, MissingExtraError, PluginError
from retrain.isolation.sources import find_spec, is_findable

NEEDS_V1 = 'pip install "verifiers>=0.4"'
NEEDS_CLASSIC = 'pip install "verifiers>=0.1.14,<0.4"'
_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?(?P<name>[A-Za-z0-9][\w.-]*)(?:@[\w.+-]+)?")


def module_name(id: str) -> str:
    """The module name of `owner/name@version`."""
    match = _ID.fullmatch(id)
    if match is None:
        raise ConfigError(
            f'[environment] id = {id!r} is not an environment id.  Try: id = "owner/name", or "owner/name@version"'
        )
    return match["name"].replace("-", "_").lower()


def import_environment(id: str) -> object:
    """Import the module of an environment; errors name it."""
    module = module_name(id)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise PluginError(
            f"environment {id!r}: its module {module!r} needs {error.name!r}, which is not installed."
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"environment {id!r}: importing its module {module!r} failed: {error!r}") from error


def installed_version() -> tuple[int, ...]:
    """The version of the verifiers package as numbers."""
    try:
        text = version("verifiers")
    except PackageNotFoundError:
        raise MissingExtraError(f'[environment] provider = "verifiers" needs the package.  Try: {NEEDS_V1}') from None
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def is_shipped(id: str) -> bool:
    """Whether the environment is part of verifiers."""
    try:
        return importlib.util.find_spec(f"verifiers.v1.tasksets.{module_name(id)}") is not None
    except ModuleNotFoundError:
        return False


def explain_missing(section: schema.Environment, search_paths: Sequence[str] = ()) -> ConfigIssue | None:
    """An issue if the environment is not installed and will not be."""
    module = module_name(section.id)
    is_there = is_findable(module, search_paths) or find_spec(f"verifiers.v1.tasksets.{module}", ()) is not None
    return None if is_there or section.auto_install else explain_not_installed(section.id)


def explain_not_installed(id: str) -> ConfigIssue:
    """Why an environment without a module cannot be loaded, and what to do."""
    module = module_name(id)
    # Without an owner the Prime CLI installs from a local folder, and a package index has unrelated packages.
    how = (
        f"prime env install {id}, or auto_install = true"
        if "/" in id
        else f'id = "owner/{id}" with auto_install = true'
    )
    return ConfigIssue(
        "[environment] id",
        f"= {id!r} is not installed: there is no module {module!r}.",
        f"Try: {how}; or add the folder of {module}.py to [plugins] search_paths.",
    )
