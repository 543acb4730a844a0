"""The verifiers API of 0.4 and later: a taskset has the rows, an Env runs them, tasks score themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, get_args, get_origin

import verifiers.v1 as vf
from pydantic import ValidationError

from retrain.config import schema
from retrain.environments import Chat, ChatOver, Log, Outcome, evaluation_only
from retrain.environments.args import check_names
from retrain.environments.tools import calls_to_wire
from retrain.environments.verifiers.harness import HARNESS_ID, ChatHarness
from retrain.environments.verifiers.internals import needs_container, register_client, tool_servers, v1
from retrain.environments.verifiers.modules import NEEDS_CLASSIC, import_environment, is_shipped
from retrain.errors import ConfigError, ConfigIssue, PluginError, RolloutError
from retrain.types import Example, JsonObject

MAX_ROWS = 100_000
"""Rows taken from an unlimited taskset."""
SPLIT_FIELDS = ("split", "dataset_split")
_TEST_SPLITS = ("test", "eval", "validation", "val", "dev")
# Never contacted: it is the key under which our client is registered.
_ENDPOINT = v1().TrainClientConfig(base_url="http://policy.invalid/v1")


class TasksetEnvironment:
    """A taskset and its Env, with every agent in this process and the policy as its model."""

    def __init__(self, section: schema.Environment, log: Log) -> None:
        self.section = section
        self.log = log
        self.who = f"environment {section.id!r}"
        self.fields = self._config_type().model_fields
        check_names(section.args, [name for name in self.fields if name != "id"])
        self.split_field = next((name for name in SPLIT_FIELDS if name in self.fields), "")
        self.tasks: dict[str, Any] = {}
        self.env = self._load(self._training_args())
        _require_local(self.env, self.who)
        self.client = PolicyClient()
        self.stack = AsyncExitStack()

    def examples(self, split: str) -> Sequence[Example]:
        """The rows of a split; an environment without splits has only training rows."""
        if split == "train":
            return self._rows(self.env.taskset, "")
        if not self.split_field or split == getattr(self.env.taskset.config, self.split_field):
            return []
        return self._rows(self._load({**self.section.args, self.split_field: split}).taskset, f"{split}/")

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """One episode of a task."""
        traces: list[Any] = []

        def opened(trace: Any) -> None:
            traces.append(trace)
            self.client.sessions[trace.id] = (chat, trace)

        try:
            episode = await self.env.run_episode(
                self.tasks[example.id], v1().ModelContext(model="policy", client=_ENDPOINT), on_trace=opened
            )
        finally:
            for trace in traces:
                self.client.sessions.pop(trace.id, None)
        return _outcome(episode)

    async def open(self) -> None:
        """Start verifiers' server and tools, and register our client for our endpoint."""
        await self.stack.enter_async_context(self.env.serving())
        register_client(self.env, _ENDPOINT, self.client)

    async def close(self) -> None:
        """Stop the server and tools."""
        if ChatHarness.http is not None:
            await ChatHarness.http.close()
        await self.stack.aclose()

    def _config_type(self) -> Any:
        exported = {} if is_shipped(self.section.id) else vars(import_environment(self.section.id))
        try:
            return v1().taskset_config_type(self.section.id)
        except (AttributeError, TypeError, ValueError) as error:
            if callable(exported.get("load_environment")):
                raise ConfigError(
                    f"{self.who} needs verifiers before 0.4, and a later version is installed.  Try: {NEEDS_CLASSIC}"
                ) from error
            raise PluginError(f"{self.who}: {error}") from error

    def _training_args(self) -> dict[str, object]:
        """The arguments, with the training split as default; logs the split."""
        args = dict(self.section.args)
        if not self.split_field:
            self.log("The environment has no splits; training on all rows")
            return args
        field = self.fields[self.split_field]
        default, allowed = field.default, _choices(field.annotation)
        if self.split_field not in args:
            if allowed and "train" not in allowed:
                raise evaluation_only(self.who, f"its {self.split_field} can only be {' or '.join(map(repr, allowed))}")
            args[self.split_field] = "train"
        chosen = args[self.split_field]
        if chosen in _TEST_SPLITS:
            self.log(f"Warning: {self.split_field} = {chosen!r} trains on held-out rows")
        elif default in _TEST_SPLITS:
            self.log(f"Warning: the environment's default split is {default!r}; using {chosen!r}")
        else:
            self.log(f"Training on split {chosen!r}")
        return args

    def _load(self, args: Mapping[str, object]) -> Any:
        """Load the environment with every agent in this process; its defaults would start remote sandboxes."""
        roles = v1().agent_config_fields(v1().env_config_type(self.section.id)())
        settings = {
            "taskset": {**args, "id": self.section.id},
            "interception": {"type": "server"},
            **{name: self._agent(role.max_turns) for name, role in roles.items()},
        }
        try:
            return vf.load_environment(v1().resolve_env_config(settings))
        except ValidationError as error:
            raise ConfigError(f"{self.who} does not take these args:", tuple(_problems(error))) from error
        except Exception as error:
            raise PluginError(f"{self.who} could not be set up: {type(error).__name__}: {error}") from error

    def _agent(self, limit: int | None) -> dict[str, object]:
        agent: dict[str, object] = {"harness": {"id": HARNESS_ID}, "runtime": {"type": "subprocess"}}
        if self.section.max_turns > 0:
            agent["max_turns"] = min(limit or self.section.max_turns, self.section.max_turns)
        return agent

    def _rows(self, taskset: Any, prefix: str) -> list[Example]:
        try:
            tasks = list(islice(taskset, MAX_ROWS))
        except Exception as error:
            raise PluginError(f"{self.who} could not load its rows: {type(error).__name__}: {error}") from error
        if len(tasks) == MAX_ROWS and not taskset.bounded:
            self.log(f"The environment is unlimited; using its first {MAX_ROWS:,} rows")
        examples = [_example(task, f"{prefix}{task.data.idx}", self.who) for task in tasks]
        self.tasks |= {example.id: task for example, task in zip(examples, tasks, strict=True)}
        return examples


class PolicyClient(vf.Client):  # type: ignore[misc]  # verifiers is not analysed
    """Serves verifiers' model calls with the chat of the rollout they belong to."""

    def __init__(self) -> None:
        self.sessions: dict[str, tuple[Chat, Any]] = {}

    async def get_response(
        self,
        dialect: object,
        body: JsonObject,
        sampling: object,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One turn."""
        chat, trace = self.sessions[session_id or ""]
        history = [v1().message_to_wire(message) for message in turn.prompt]
        try:
            reply = await chat.reply_to(history, [v1().tool_to_wire(tool) for tool in turn.tools or ()])
        except ChatOver:
            # A stopped rollout ignores the response.
            trace.stop("max_total_tokens")
            return _response("", [], cut=True)
        except RolloutError as error:
            raise vf.ProviderError(str(error), status_code=400) from error
        return _response(reply.text, calls_to_wire(reply.tool_calls), reply.cut)


def _response(text: str, calls: Sequence[Mapping[str, Any]], cut: bool) -> Any:
    tool_calls = [vf.ToolCall(id=call["id"], **call["function"]) for call in calls]
    response = vf.Response(
        id="policy",
        created=int(time.time()),
        model="policy",
        message=vf.AssistantMessage(content=text, tool_calls=tool_calls or None),
        finish_reason="length" if cut else "tool_calls" if tool_calls else "stop",
    )
    response.raw = v1().serialize_completion(response, "policy")
    return response


def _outcome(episode: Any) -> Outcome:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RolloutError(f"{errors[0].type}: {errors[0].message}" if errors else "the episode failed.")
    if len(episode.traces) != 1:
        raise RolloutError(f"the environment ran {len(episode.traces)} agents in one episode; retrain supports one.")
    (trace,) = episode.traces
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise RolloutError(f"the reward {unscored[0]!r} was not computed.")
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Outcome(trace.reward, {**metrics, **rewards}, truncated=trace.is_truncated)


def _example(task: Any, id: str, who: str) -> Example:
    """The example of a task, with all of its data, by which an edit is noticed."""
    return replace(_ask(task.data, id, who), meta=task.data.model_dump(mode="json"))


def _ask(data: Any, id: str, who: str) -> Example:
    if data.prompt is None:
        # The environment starts the conversation itself.
        return Example(data.description or data.name or f"task {id}", _reference(data), id)
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        if not data.prompt.strip():
            raise PluginError(f"{who} has an empty prompt at row {id}.")
        return Example(
            (*system, {"role": "user", "content": data.prompt}) if system else data.prompt, _reference(data), id
        )
    messages = [v1().message_to_wire(message) for message in data.prompt]
    for message in messages:
        if not isinstance(message.get("content") or "", str):
            raise PluginError(f"{who} has more than text in its prompt at row {id}; retrain trains on text only.")
    plain = [{"role": str(message["role"]), "content": str(message.get("content") or "")} for message in messages]
    return Example((*system, *plain), _reference(data), id)


def _reference(data: Any) -> str:
    return str(data.model_dump().get("answer", ""))


def _require_local(env: Any, who: str) -> None:
    """Raise for environments that need containers or remote runtimes."""
    if needs_container(env):
        raise ConfigError(f"{who} needs a container; retrain runs environments only in a local process.")
    servers = tool_servers(env)
    for server in servers:
        if server.config.url is None and server.config.runtime.type != "subprocess":
            raise ConfigError(
                f"{who} runs its tools in a {server.config.runtime.type!r} runtime; retrain supports only subprocess.  "
                "Try: set its runtime in args."
            )


def _problems(error: ValidationError) -> list[ConfigIssue]:
    """The validation error of each argument."""
    found = []
    for each in error.errors():
        place = ".".join(str(part) for part in each["loc"] if part != "taskset")
        found.append(ConfigIssue(f"[environment] args.{place}", f"is {each['input']!r}: {each['msg']}."))
    return found


def _choices(annotation: object) -> tuple[object, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()
