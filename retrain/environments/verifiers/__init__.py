"""`provider = "verifiers"`: an installed verifiers environment, of either generation.

Since 0.4 an environment is a module that exports a `Taskset`; before that, a module with a `load_environment` function.
The installed version of verifiers decides which of the two is supported.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from importlib.metadata import version

from retrain.config import schema
from retrain.environments import Environment, Log
from retrain.environments.verifiers.modules import (
    NEEDS_V1,
    explain_not_installed,
    installed_version,
    is_shipped,
    module_name,
)
from retrain.environments.verifiers.prime import install_environment
from retrain.errors import ConfigError

OLDEST_CLASSIC = (0, 1, 14)
FIRST_WITHOUT_CLASSIC = (0, 4)


def load(section: schema.Environment, log: Log) -> Environment:
    """Load the environment named by `[environment] id` with the installed API."""
    module = module_name(section.id)
    installed = installed_version()
    if importlib.util.find_spec(module) is None and not is_shipped(section.id):
        if not section.auto_install:
            raise ConfigError(str(explain_not_installed(section.id)))
        install_environment(section.id, log)
        importlib.invalidate_caches()
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"the Prime CLI installed {section.id!r}, but there is still no module {module!r}.")
    # Errors are recorded with the rollout; verifiers would log thousands of lines.
    logging.getLogger("verifiers").setLevel(logging.CRITICAL)
    log(f"verifiers {'.'.join(map(str, installed))}, module {module}")
    if installed >= FIRST_WITHOUT_CLASSIC:
        from retrain.environments.verifiers.taskset import TasksetEnvironment  # noqa: PLC0415  (imports verifiers: 4 s)

        return TasksetEnvironment(section, log)
    if installed >= OLDEST_CLASSIC:
        from retrain.environments.verifiers.classic import ClassicEnvironment  # noqa: PLC0415  (imports verifiers)

        return ClassicEnvironment(section, log)
    raise ConfigError(f"verifiers {version('verifiers')} is too old.  Try: {NEEDS_V1}")
