"""Private and unstable APIs of verifiers, tested with 0.1.14 (classic) to 0.4 (v1).

An API that has moved raises an error that names the tested versions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from retrain.errors import PluginError

TESTED = ">=0.1.14,<0.5"
# Name -> the module of verifiers.v1 that defines it; none of them is part of its documented API.
_V1 = {
    "ModelContext": "clients",
    "TrainClientConfig": "configs.client",
    "agent_config_fields": "configs.agent",
    "call_mcp": "harnesses.utils.mcp",
    "connect_mcp": "harnesses.utils.mcp",
    "env_config_type": "utils.loaders",
    "message_to_wire": "dialects.chat",
    "resolve_env_config": "utils.loaders",
    "serialize_completion": "clients.train",
    "taskset_config_type": "utils.loaders",
    "tool_to_wire": "clients.train",
}


@cache
def v1() -> Any:
    """The functions and classes of verifiers.v1 that are not part of its documented API."""
    try:
        return SimpleNamespace(
            **{name: vars(importlib.import_module(f"verifiers.v1.{module}"))[name] for name, module in _V1.items()}
        )
    except (ImportError, KeyError) as error:
        raise _changed(error) from error


def register_client(env: Any, endpoint: Any, client: object) -> None:
    """Let the running server of an environment use `client` for model calls to `endpoint`."""
    try:
        env._interception.clients[endpoint.model_dump_json()] = client
    except (AttributeError, TypeError) as error:
        raise _changed(error) from error


def needs_container(env: Any) -> bool:
    """Whether the tasks of an environment need a container."""
    try:
        return bool(env._task_cls.NEEDS_CONTAINER)
    except AttributeError as error:
        raise _changed(error) from error


def tool_servers(env: Any) -> list[Any]:
    """The tool servers of an environment and of its tasks."""
    config = env.taskset.config
    return [*env.taskset.toolsets(config), *env._task_cls.toolsets(config.task)]


def has_group_rewards(rubric: Any) -> bool:
    """Whether a classic rubric scores the rollouts of a group together."""
    try:
        return any(rubric._is_group_func(reward) for reward in rubric.funcs)
    except AttributeError as error:
        raise _changed(error) from error


def list_rubrics(rubric: Any) -> Iterator[Any]:
    """A classic rubric, or the members of a rubric group."""
    members = vars(rubric).get("rubrics")
    if members is None:
        yield rubric
    for member in members or ():
        yield from list_rubrics(member)


def has_evaluation_rows(env: Any) -> bool:
    """Whether a classic environment has evaluation rows; `get_eval_dataset` would fall back to training rows."""
    return env.eval_dataset is not None or bool(vars(env).get("eval_dataset_source"))


def _changed(error: Exception) -> PluginError:
    return PluginError(
        f"verifiers {version('verifiers')} changed an API that retrain uses: {error}.  "
        f'Try: pip install "verifiers{TESTED}"'
    )
