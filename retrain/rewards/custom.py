"""The `custom` reward: a user-defined function, sync or async.

The function takes `(response, reference)`. If it has parameters `prompt` or `meta` (or `**extras`), it also gets those
of the example.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, SupportsFloat

from retrain.errors import PluginError
from retrain.isolation.redaction import redact

if TYPE_CHECKING:
    import asyncio

    from retrain.rewards import Reward

EXTRAS = ("prompt", "meta")

LARGEST_REWARD = 1e6
"""Larger absolute values are treated as errors: they would dominate the normalized rewards of a group."""


def named_extras(function: Callable[..., object]) -> tuple[str, ...]:
    """Which of `EXTRAS` the function takes; raises if it cannot take a response and a reference."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a signature: assumed to take two arguments
        return ()
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    keywords = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    extras = tuple(name for name in EXTRAS if takes_all or name in keywords)
    if [*signature.parameters][:2] == ["reference", "response"]:
        raise PluginError(
            f"the reward function {_name_of(function)} takes the reference first, and is called with the response "
            "first.  Try: def score(response, reference)"
        )
    if "completions" in keywords:
        raise PluginError(
            f"the reward function {_name_of(function)} takes a list of completions, like TRL's reward functions.  "
            "Try: def score(response, reference), which scores one response; `retrain grpo` accepts TRL's"
        )
    try:
        signature.bind("response", "reference", **dict.fromkeys(extras))
    except TypeError as error:
        raise PluginError(
            f"the reward function {_name_of(function)} cannot be called as score(response, reference): {error}. "
            f"It may also have the parameters {' and '.join(EXTRAS)}."
        ) from None
    return extras


def _name_of(function: Callable[..., object]) -> str:
    return function.__qualname__ if inspect.isroutine(function) else repr(function)


def to_value(result: object) -> float:
    """Convert the result of a reward to a number within bounds."""
    if not isinstance(result, SupportsFloat):
        raise PluginError(f"the reward returned {_shorten(result)}; it must return a number or a bool")
    try:
        value = float(result)
    except (TypeError, ValueError) as error:
        raise PluginError(f"the reward returned {_shorten(result)}; it must return a number: {error}") from error
    return check_bounds(value, "the reward returned")


def check_bounds(value: float, returned: str) -> float:
    """Return the value; raises unless it is finite and within `LARGEST_REWARD`."""
    if not math.isfinite(value):
        raise PluginError(f"{returned} {value}; it must be finite")
    if abs(value) > LARGEST_REWARD:
        raise PluginError(f"{returned} {value}; it must be between {-LARGEST_REWARD:,.0f} and {LARGEST_REWARD:,.0f}")
    return value


def _shorten(result: object) -> str:
    try:
        text = repr(result)
    except Exception as error:
        text = f"<its repr failed: {error!r}>"
    text = redact(text)  # before it is cut: a part of a secret is not recognized
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{text} ({type(result).__name__})"


def resolve(result: object) -> object:
    """Return the result of a reward, awaiting it if necessary."""
    return _event_loop().run_until_complete(_wait_for(result)) if inspect.isawaitable(result) else result


async def _wait_for(result: Awaitable[object]) -> object:
    return await result


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    # One loop per process, so that an HTTP client can be kept between calls.
    import asyncio  # noqa: PLC0415  (slow to import, and most rewards are sync)

    return asyncio.new_event_loop()


class CustomReward:
    """A function as a reward. An async function returns its coroutine, which `resolve` awaits."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self.extras = named_extras(function)

    def score(self, response: str, reference: str, **extras: object) -> Any:  # a number, or an awaitable of one
        """Call the function with the extras it takes."""
        return self._function(response, reference, **extras)


def extras_of(reward: Reward) -> tuple[str, ...]:
    """The extras that a reward takes."""
    return reward.extras if isinstance(reward, CustomReward) else named_extras(reward.score)


def call_reward(reward: Reward, response: str, reference: str, extras: Mapping[str, object]) -> float | None:
    """Score one response with one reward: a number within bounds, or raises.

    None means that the reward does not apply to this response.
    """
    score: Callable[..., object] = reward.score
    result = resolve(score(response, reference, **extras))
    return None if result is None else to_value(result)
