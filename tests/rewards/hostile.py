"""Reward functions that misbehave on command: the response says how."""

import asyncio
import contextlib
import ctypes
import os
import struct
import subprocess
import sys
import threading
import time


def score(response, reference):
    if response == "hang":
        while True:
            time.sleep(0.05)
    if response == "hang in C":
        ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the GIL: nothing in Python can interrupt it
    if response == "work":
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
    if response == "nap":
        time.sleep(0.01)
    if response == "raise":
        raise ValueError("this response is cursed")
    if response == "print then raise":
        print("the last thing I saw")
        raise RuntimeError("printed")
    if response == "nan":
        return float("nan")
    if response == "inf":
        return float("inf")
    if response == "none":
        return None
    if response == "text":
        return "1.0"
    if response == "true":
        return True
    if response == "int":
        return 1
    if response == "lambda":
        return lambda: 1.0
    if response == "vector":
        import numpy

        return numpy.ones(2)
    if response == "huge":
        return 10**400
    return _misbehave_more(response, reference)


def _misbehave_more(response, reference):
    if response == "print":
        print("x" * 200_000)
        print("half a pair \ud800", file=sys.stderr)
        os.write(1, b"\0\0\0\1raw bytes\n")
        return 1.0
    if response == "os._exit":
        print("goodbye")
        os._exit(3)
    if response == "sys.exit":
        sys.exit(4)
    if response == "keyboard":
        raise KeyboardInterrupt
    if response == "recursion":
        return _misbehave_more(response, reference)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "input":
        return float(len(input()))
    if response == "close streams":
        os.close(1)
        os.close(2)
        return 1.0
    if response == "memory":
        return float(len(bytearray(8 << 30)))
    if response == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
        return 1.0
    if response.startswith("fork"):
        return _fork(response)
    if response.startswith("stray"):
        _write_everywhere(reference.encode())
        return 1.0
    if response == "late":
        threading.Timer(0.2, _write_everywhere, [reference.encode()]).start()
        return 1.0
    if response == "child":
        subprocess.run(["sleep", reference])
    if response.startswith("daemon"):
        # A session of its own, and an orphan: no process group reaches it.
        subprocess.run(["sh", "-c", f"setsid sleep {reference} >/dev/null 2>&1 &"])
    if response == "daemon and hang":
        ctypes.PyDLL(None).sleep(60)
    if response == "daemon and die":
        os._exit(3)
    return 0.25


def _fork(response):
    child = os.fork()
    if child == 0:
        if response == "fork and raise":
            raise RuntimeError("in the child")
        return 0.0
    os.waitpid(child, 0)
    return 1.0


def _write_everywhere(body):
    for fd in range(3, 32):
        with contextlib.suppress(OSError):
            os.write(fd, struct.pack(">I", len(body)) + body)


async def score_async(response, reference):
    await asyncio.sleep(0.001)
    if response == "hang":
        await asyncio.sleep(600)
    if response == "raise":
        raise ValueError("async and cursed")
    return float(response == reference)


def score_with_extras(response, reference, *, meta, prompt=""):
    return float(meta["bonus"]) if prompt == "What is 1+1?" else 0.0


def score_with_any(response, reference, **extras):
    return float(len(extras))


def needs_three(response, reference, something):
    return 1.0


def loop_of_its_own(response, reference):
    async def one():
        return 1.0

    return asyncio.run(one())


class Length:
    def score(self, response, reference):
        return len(response) / 10


LENGTH = Length()
NOT_A_REWARD = 3


def number(response, reference):
    return float(response)


def slow_square(response, reference):
    time.sleep(0.01 * (int(response) % 3))
    return float(int(response) ** 2)


def modules(response, reference):
    return float(not {"torch", "transformers", "datasets", "sympy"} & set(sys.modules))


def leak(response, reference):
    if response == "print":
        print(dict(os.environ))
        raise RuntimeError("could not reach https://user:hunter2@host.example/v1")
    return float(len(os.environ[response]))
