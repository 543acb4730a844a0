"""An environment that misbehaves on command: the example's id and `args` say when and how."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
import subprocess
import sys
import time
from typing import Any

from retrain.environments import Chat, Outcome
from retrain.types import Example

# Exponential in the length of what it reads, and the GIL is held all the while.
CATASTROPHIC = re.compile(r"(a+)+$")


def hang() -> None:
    print("about to hang", flush=True)
    CATASTROPHIC.match("a" * 60 + "b")


class Cases:
    """Two turns and 1.0, unless it is example 0 and `when` names something else to do between the turns."""

    def __init__(self, section: Any, log: Any) -> None:
        self.args = section.args
        log(f"loading with {section.args}")
        if self.args.get("when") == "build":
            hang()

    def examples(self, split: str) -> Any:
        if self.args.get("when") == "example":
            return Slow(4)
        return [Example(f"{n}+1=?", str(n + 1), id=str(n), meta={"kept": object()}) for n in range(4)]

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        assert "kept" in example.meta or self.args.get("when") == "example"
        question = str(example.prompt) if self.args.get("when") != "whim" else f"{random.random()}?"
        await chat.ask(question)
        if example.id == "0":
            await self._misbehave(chat)
        reply = await chat.ask("again")
        if example.id == "0" and str(self.args.get("when")).startswith("late"):
            time.sleep(600) if self.args["when"] == "late sleep" else os._exit(5)
        return Outcome(1.0, {"length": len(reply.text)})

    async def _misbehave(self, chat: Chat) -> None:
        when = self.args.get("when")
        if when in ("regex", "whim"):
            hang()
        elif when == "regex in a thread":
            await asyncio.to_thread(hang)
        elif when == "work":
            until = time.process_time() + 0.5
            while time.process_time() < until:
                await asyncio.sleep(0)
        elif when == "sleep":
            time.sleep(600)
        elif when == "die":
            os._exit(5)
        elif when == "segfault":
            ctypes.string_at(0)
        elif when == "exit":
            sys.exit(3)
        elif when == "never":
            await asyncio.sleep(600)
        elif when == "object":
            await chat.ask("look", [{"type": "function", "function": object()}])
        elif when == "leak":
            print("the key is", os.environ["ACME_API_KEY"])
            raise RuntimeError("could not reach https://me:hunter2@host.example")
        elif when == "daemon":
            subprocess.run(["sh", "-c", "setsid sleep 605 >/dev/null 2>&1 &"])


class Broken(Cases):
    """Cannot be built."""

    def __init__(self, section: Any, log: Any) -> None:
        super().__init__({}["path"], log)


class Slow(list[Example]):
    """Examples of which all but the first few take for ever."""

    def __init__(self, count: int) -> None:
        super().__init__(Example(f"{n}+1=?", str(n + 1), id=str(n)) for n in range(count + 20))

    def __getitem__(self, index: Any) -> Any:
        if index == 20:
            hang()
        return super().__getitem__(index)
