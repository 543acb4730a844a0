"""Tools: their description for chat templates without a tool format, and parsing of tool calls.

Supported are the tags of Qwen, Hermes and most open models, and the bare JSON object of Llama 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from retrain.environments import Message, Tool, ToolCall
from retrain.types import JsonObject

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
# Qwen3-Coder writes parameters as separate tags.
_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?")
_PARAMETER_END = "</parameter>"


def describe_tools(tools: Sequence[Tool]) -> str:
    """A system message for models whose template does not support tools."""
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return "\n".join(
        [
            "You can call these functions:",
            *lines,
            'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call>.',
        ]
    )


def read_calls(text: str, turn: int = 0) -> tuple[ToolCall, ...]:
    """The tool calls of a reply, in order; the text of one that cannot be parsed is kept as `broken`."""
    bodies = [body.strip() for body in _TAGGED.findall(text)]
    if not bodies:
        call = _call(text.strip())
        return (replace(call, id=f"call_{turn}_0"),) if call is not None and not call.broken else ()
    calls = [_tagged_call(body) for body in bodies]
    return tuple(replace(call, id=f"call_{turn}_{index}") for index, call in enumerate(calls))


def calls_to_wire(calls: Sequence[ToolCall]) -> list[JsonObject]:
    """Calls in OpenAI's message format, with arguments as JSON text."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.broken or json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]


def without_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same conversation for a template that supports only system, user and assistant."""
    plain: list[Message] = [
        {"role": "user", "content": message["content"]} if message["role"] == "tool" else message
        for message in messages
    ]
    if not tools:
        return plain
    description = describe_tools(tools)
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{description}"}, *plain[1:]]
    return [{"role": "system", "content": description}, *plain]


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    """Names and values, in one pass: a model may repeat an open tag for ever."""
    at = 0
    while (found := _PARAMETER.search(body, at)) is not None:
        end = body.find(_PARAMETER_END, found.end())
        if end < 0:
            return
        yield found[1], body[found.end() : end].removesuffix("\n")
        at = end


def _tagged_call(body: str) -> ToolCall:
    function = _FUNCTION.search(body)
    if function is not None:
        return ToolCall(function[1], {name: _value(value) for name, value in _parameters(function[2])})
    return _call(body) or ToolCall("", {}, broken=body)


def _call(text: str) -> ToolCall | None:
    """A JSON object with a name and arguments; None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if not isinstance(arguments, Mapping):
        return ToolCall(found["name"], {}, broken=text)
    return ToolCall(found["name"], arguments)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
