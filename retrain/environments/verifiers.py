"""`provider = "verifiers"`: an installed verifiers environment, of either generation.

Since 0.4 an environment is a module that exports a `Taskset`; before, it had a `load_environment` function. Which of
the two can run depends on the verifiers package that is installed, and on nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from importlib.metadata import PackageNotFoundError, version

from retrain.config import schema
from retrain.environments import Environment, Say
from retrain.environments.prime import install_environment
from retrain.errors import ConfigError, MissingExtraError, PluginError

OLDEST_CLASSIC = (0, 1, 14)
FIRST_WITHOUT_CLASSIC = (0, 4)
NEEDS_V1 = 'pip install "verifiers>=0.4"'
NEEDS_CLASSIC = 'pip install "verifiers>=0.1.14,<0.4"'
_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?(?P<name>[A-Za-z0-9][\w.-]*)(?:@[\w.+-]+)?")


def load(section: schema.Environment, say: Say) -> Environment:
    """The environment that `[environment] id` names, by way of whichever API is installed."""
    module = module_name(section.id)
    installed = installed_version()
    if importlib.util.find_spec(module) is None and not is_shipped(section.id):
        if not section.auto_install:
            raise ConfigError(_not_installed(section.id, module))
        install_environment(section.id, say)
        importlib.invalidate_caches()
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"the Prime CLI installed {section.id!r}, but there is still no module {module!r}.")
    # What goes wrong in a rollout is recorded with the rollout; thousands of log lines would say it again.
    logging.getLogger("verifiers").setLevel(logging.CRITICAL)
    say(f"verifiers {'.'.join(map(str, installed))}, module {module}")
    if installed >= FIRST_WITHOUT_CLASSIC:
        from retrain.environments.verifiers_v1 import TasksetEnvironment  # noqa: PLC0415  (imports verifiers: 4 s)

        return TasksetEnvironment(section, say)
    if installed >= OLDEST_CLASSIC:
        from retrain.environments.verifiers_classic import ClassicEnvironment  # noqa: PLC0415  (imports verifiers)

        return ClassicEnvironment(section, say)
    raise ConfigError(f"verifiers {version('verifiers')} is too old.  Try: {NEEDS_V1}")


def module_name(id: str) -> str:
    """The module that `owner/name@version` is installed as."""
    match = _ID.fullmatch(id)
    if match is None:
        raise ConfigError(
            f'[environment] id = {id!r} is not an environment id.  Try: id = "owner/name", or "owner/name@version"'
        )
    return match["name"].replace("-", "_").lower()


def import_environment(id: str) -> object:
    """The environment's own module; what goes wrong in it is said with its name."""
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
    """Of the verifiers package, as numbers."""
    try:
        text = version("verifiers")
    except PackageNotFoundError:
        raise MissingExtraError(f'[environment] provider = "verifiers" needs the package.  Try: {NEEDS_V1}') from None
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def is_shipped(id: str) -> bool:
    """Whether verifiers itself brings it."""
    try:
        return importlib.util.find_spec(f"verifiers.v1.tasksets.{module_name(id)}") is not None
    except ModuleNotFoundError:
        return False


def _not_installed(id: str, module: str) -> str:
    # Without an owner the Prime CLI installs from a local folder, and a package index has unrelated packages.
    how = (
        f"prime env install {id}, or auto_install = true"
        if "/" in id
        else f'id = "owner/{id}" with auto_install = true'
    )
    return (
        f"[environment] id = {id!r} is not installed: there is no module {module!r}.  Try: {how}; "
        f"or name the folder of {module}.py in [plugins] search_paths."
    )
