"""A verifiers harness that runs inside this process: call the model, run its tool calls, repeat.

verifiers would start a script or a remote sandbox for each turn. As it requires, every model call goes through its
loopback server.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1 import Harness, HarnessConfig, ProgramResult

from retrain.environments.verifiers.internals import v1
from retrain.types import JsonObject

__all__ = ["HARNESS_ID", "ChatHarness", "ChatHarnessConfig"]

HARNESS_ID = "retrain_chat_harness"
# verifiers looks harnesses up by the name of a top-level module.
sys.modules[HARNESS_ID] = sys.modules[__name__]


class ChatHarnessConfig(HarnessConfig):  # type: ignore[misc]  # verifiers is not analysed
    """No settings."""


class ChatHarness(Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """A chat loop with the task's tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    http: aiohttp.ClientSession | None = None

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        """Continue the task's prompt or conversation until a reply has no tool calls."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [v1().message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, dispatch, connections = await v1().connect_mcp(servers, stack)
            while True:
                reply = await self._ask(endpoint, secret, {"model": ctx.model, "messages": messages, "tools": tools})
                if isinstance(reply, str):
                    return ProgramResult(exit_code=1, stdout="", stderr=reply)
                messages.append(reply)
                if not reply.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in reply["tool_calls"]:
                    content = await _call(connections, dispatch, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    async def _ask(self, endpoint: str, secret: str, body: JsonObject) -> JsonObject | str:
        """The assistant's message, or an error text: a limit was reached, or the model call failed."""
        if not body["tools"]:
            del body["tools"]
        if ChatHarness.http is None or ChatHarness.http.closed:
            # One session for all rollouts; creating one takes tens of milliseconds.
            ChatHarness.http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        headers = {"Authorization": f"Bearer {secret}"}
        async with ChatHarness.http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                return await response.text()
            message: JsonObject = (await response.json())["choices"][0]["message"]
            return message


async def _call(connections: Any, dispatch: Mapping[str, Any], function: Mapping[str, str]) -> Any:
    """The result of a tool call; invalid calls return an error message for the model."""
    name = function["name"]
    if name not in dispatch:
        return f"There is no tool {name!r}. Tools: {', '.join(dispatch)}."
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        return f"The arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return "The arguments must be a JSON object."
    return await v1().call_mcp(connections, dispatch, name, arguments)


logging.getLogger("httpx2").setLevel(logging.WARNING)
