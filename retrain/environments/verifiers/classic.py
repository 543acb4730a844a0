"""The verifiers API of 0.1.14 to 0.3: `load_environment` returns an Environment with datasets, a loop and a rubric."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

from retrain.config import schema
from retrain.environments import Chat, ChatOver, Log, Outcome, evaluation_only
from retrain.environments.args import check_names
from retrain.environments.chat import text_of
from retrain.environments.tools import calls_to_wire
from retrain.environments.verifiers.internals import has_evaluation_rows, has_group_rewards, list_rubrics
from retrain.environments.verifiers.modules import NEEDS_V1, import_environment
from retrain.errors import ConfigError, PluginError, RolloutError
from retrain.types import Example, JsonObject

_failures: ContextVar[list[str]] = ContextVar("failures")
"""Errors of the reward functions in the current rollout, which a rubric would score as 0."""


class ClassicEnvironment:
    """A classic environment, its loop and its rubric, with the policy as its model."""

    def __init__(self, section: schema.Environment, log: Log) -> None:
        self.section = section
        self.log = log
        self.who = f"environment {section.id!r}"
        self.rows: dict[str, Mapping[str, Any]] = {}
        self.env = self._load()
        if section.max_turns > 0 and isinstance(self.env, vf.MultiTurnEnv):
            limit = self.env.max_turns
            self.env.max_turns = min(limit, section.max_turns) if limit > 0 else section.max_turns
        for rubric in list_rubrics(self.env.rubric):
            if has_group_rewards(rubric):
                raise ConfigError(
                    f"{self.who} scores the rollouts of a group together, which retrain does not support."
                )
            rubric.funcs = [_recording_errors(reward) for reward in rubric.funcs]

    def examples(self, split: str) -> Sequence[Example]:
        """The training rows, or for any other split the evaluation rows."""
        if split == "train":
            try:
                rows = self.env.get_dataset()
            except ValueError as error:
                raise evaluation_only(self.who, str(error)) from error
            self.log("Training on the environment's training rows")
            return self._examples(rows, "")
        if not has_evaluation_rows(self.env):
            # verifiers would fall back to the training rows.
            return []
        return self._examples(self.env.get_eval_dataset(), f"{split}/")

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """One rollout with the environment's own loop, scored by its rubric."""
        failures: list[str] = []
        _failures.set(failures)
        state = await self.env.rollout(dict(self.rows[example.id]), PolicyClient(chat), "policy", {})
        if state.get("error") is not None:
            raise RolloutError(_reason(state["error"]))
        await self.env.rubric.score_rollout(state)
        if failures:
            raise RolloutError(failures[0])
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        capped = state.get("stop_condition") == "max_turns_reached" and self.env.max_turns > 1
        return Outcome(float(state["reward"]), metrics, truncated=bool(state.get("is_truncated")) or capped)

    def _load(self) -> Any:
        load = vars(import_environment(self.section.id)).get("load_environment")
        if not callable(load):
            raise ConfigError(
                f"{self.who} has no load_environment: it needs verifiers 0.4 or later, "
                f"and an earlier one is installed.  Try: {NEEDS_V1}"
            )
        args = _checked_args(self.section.args, inspect.signature(load))
        try:
            env = load(**args)
        except TypeError as error:
            raise ConfigError(f"{self.who} does not take these args: {error}") from error
        except Exception as error:
            raise PluginError(f"{self.who} could not be set up: {type(error).__name__}: {error}") from error
        if not isinstance(env, vf.Environment):
            raise PluginError(f"{self.who}: load_environment returned {type(env).__name__}, not an Environment.")
        return env

    def _examples(self, rows: Any, prefix: str) -> list[Example]:
        examples = []
        for index, row in enumerate(rows):
            row["example_id"] = row.get("example_id", index)
            prompt = row["prompt"]
            if not isinstance(prompt, str):
                prompt = tuple(self._message(message, index) for message in prompt)
            # All of the row, by which an edit is noticed.
            example = Example(prompt, str(row.get("answer") or ""), f"{prefix}{index}", dict(row))
            self.rows[example.id] = row
            examples.append(example)
        return examples

    def _message(self, message: Mapping[str, object], index: int) -> dict[str, str]:
        try:
            return {"role": str(message["role"]), "content": text_of(message.get("content"))}
        except RolloutError as error:
            raise PluginError(f"{self.who}, row {index}: {error}") from error


class PolicyClient(Client):  # type: ignore[misc]  # verifiers is not analysed
    """The model client of one rollout, backed by its chat."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self.chat = chat

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Sequence[Any] | None = None, **_: Any
    ) -> Any:
        """One turn."""
        history = [_to_wire(message) for message in prompt]
        offered = [
            {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}
            for tool in tools or ()
        ]
        try:
            reply = await self.chat.reply_to(history, offered)
        except ChatOver as over:
            raise vf.OverlongPromptError(str(over)) from over
        except RolloutError as error:
            raise vf.ModelError(str(error)) from error
        calls = [ToolCall(id=call["id"], **call["function"]) for call in calls_to_wire(reply.tool_calls)]
        message = ResponseMessage(
            content=reply.text,
            tool_calls=calls or None,
            finish_reason="length" if reply.cut else "tool_calls" if calls else "stop",
            is_truncated=reply.cut,
        )
        return Response(id="policy", created=int(time.time()), model=model, message=message)

    def setup_client(self, config: object) -> Chat:
        """The chat itself; verifiers' clients are not used."""
        return self.chat

    async def to_native_tool(self, tool: object) -> object:
        """Unchanged."""
        return tool

    async def to_native_prompt(self, messages: object) -> tuple[object, dict[str, object]]:
        """Unchanged."""
        return messages, {}

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        """The same as `get_response`."""
        return await self.get_response(*args, **kwargs)

    async def raise_from_native_response(self, response: object) -> None:
        """Responses are always valid."""

    async def from_native_response(self, response: object) -> object:
        """Unchanged."""
        return response

    async def close(self) -> None:
        """Does nothing: there is nothing to close."""


def _to_wire(message: Any) -> JsonObject:
    plain = dict(message) if isinstance(message, Mapping) else message.model_dump()
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [part if isinstance(part, dict) else part.model_dump() for part in content]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call_to_wire(call) for call in plain["tool_calls"]]
    return plain


def _call_to_wire(call: Mapping[str, object]) -> Mapping[str, object]:
    if "function" in call:
        return call
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": call["arguments"]},
    }


def _checked_args(args: Mapping[str, object], signature: inspect.Signature) -> dict[str, object]:
    """The arguments, validated against the signature."""
    parameters = signature.parameters
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(args)
    # A classic environment has no split argument: it trains on its training rows.
    wanted = {name: value for name, value in args.items() if (name, value) != ("split", "train") or name in parameters}
    check_names(wanted, list(parameters))
    return wanted


def _recording_errors(reward: Callable[..., Any]) -> Callable[..., Any]:
    """The same reward function, which records its error before the rubric turns it into 0."""

    @functools.wraps(reward)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            result = reward(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            _failures.get().append(f"its reward {reward.__name__} raised {type(error).__name__}: {error}")
            raise

    return wrapped


def _reason(error: object) -> str:
    cause = error.__cause__ if isinstance(error, BaseException) else None
    return f"{type(error).__name__}: {error}" + (
        f" ({cause})" if cause is not None and str(cause) != str(error) else ""
    )
