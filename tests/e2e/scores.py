"""Rewards that obey a response, in a file that loads fast: every run of a test starts a process with it."""

from __future__ import annotations

import time


def score(response: str, reference: str) -> float:
    """Do what the response says."""
    if "raise" in response:
        raise ValueError("this response is cursed")
    if "hang" in response:
        time.sleep(60)
    if "nan" in response:
        return float("nan")
    if "half" in response:
        return 0.5
    return float("right" in response)


def score_some(response: str, reference: str) -> float | None:
    """Nothing of what it was not written for."""
    return None if "skip" in response else float("right" in response)


def score_sign(response: str, reference: str) -> float:
    """1 for a right answer and -1 for a wrong one."""
    return 1.0 if "right" in response else -1.0


def score_length(response: str, reference: str) -> float:
    """For models that write gibberish: something that differs from one answer to the next."""
    return float(sum(map(ord, response)) % 2)


def score_box(response: str, reference: str) -> float:
    """Something that the built-in model does now and then by itself."""
    return float("\\boxed{" in response)
