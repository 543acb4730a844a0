"""Runs retrain in forked children of a process that has everything imported already.

Each line of input is a JSON list: [log file, kill point or null, arguments...]. The answer is a line with the child's
process id, and when the child is gone one with its exit status (negative: the signal that ended it).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any

import peft
import transformers

import retrain.trainer
from retrain.cli import run

# Loaded on first use otherwise, and that use would be in every child.
WARM = (peft.PeftModel, transformers.AutoModelForCausalLM, transformers.Qwen3ForCausalLM, retrain.trainer)


def die_inside(point: str) -> None:
    """Let the nth call of a function be the last thing this process does: "module:function:n"."""
    module, name, count = point.split(":")
    owner: Any = importlib.import_module(module)
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, left = getattr(owner, attribute), int(count)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, attribute, counted)


def child(log: str, point: str | None, arguments: list[str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if point is not None:
        die_inside(point)
    code = 70
    try:
        code = run(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        log, point, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(log, point, arguments)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
