"""Headless Chromium, driven through its DevTools protocol; every console error and exception is kept."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest


def find_chromium() -> str:
    """The browser's path; a test that needs one fails without it, and says how to get it."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("no Chromium here.  Try: apt-get install chromium")
    return found


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.numbers = itertools.count(1)
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.loaded = asyncio.Event()
        self.complaints: list[str] = []

    async def listen(self) -> None:
        async for message in self.socket:
            event = json.loads(message.data)
            if "id" in event:
                self.waiting.pop(event["id"]).set_result(event)
            elif event["method"] == "Page.loadEventFired":
                self.loaded.set()
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.complaints.append(event["params"]["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"):
                self.complaints.append(json.dumps(event["params"]["args"])[:500])

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self.numbers)
        self.waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self.waiting[number], 60)
        assert "error" not in answer, answer
        return answer["result"]

    async def open(self, url: str) -> None:
        self.loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self.loaded.wait(), 60)

    async def do(self, script: str) -> Any:
        """Run a script and return its value."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def photograph(self, path: Path) -> None:
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))


@asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    """A tab of a browser of its own, closed at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={home}", "--window-size=1400,1000", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(home) / "DevToolsActivePort"
            for _ in range(600):
                if port_file.exists() and port_file.read_text().count("\n"):
                    break
                await asyncio.sleep(0.1)
            port = port_file.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    listening = asyncio.create_task(tab.listen())
                    for domain in ("Page", "Runtime", "Log"):
                        await tab.call(f"{domain}.enable")
                    yield tab
                    listening.cancel()
        finally:
            process.kill()
            process.wait()
