"""The `custom` reward: a function of the user's, plain or async.

The function takes `(response, reference)`. When it also names `prompt` or `meta` (or takes `**extras`), it gets what
the example carries under those names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, SupportsFloat

from retrain.errors import PluginError

if TYPE_CHECKING:
    import asyncio

    from retrain.rewards import Reward

EXTRAS = ("prompt", "meta")

LARGEST_REWARD = 1e6
"""Beyond this, in either direction, a reward is taken for a mistake: centred and scaled, it would drown the others."""


def named_extras(function: Callable[..., object]) -> tuple[str, ...]:
    """Return which of `EXTRAS` the function wants; an error when it cannot take a response and a reference."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a signature: trusted to take two arguments
        return ()
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    keywords = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    extras = tuple(name for name in EXTRAS if takes_all or name in keywords)
    try:
        signature.bind("response", "reference", **dict.fromkeys(extras))
    except TypeError as error:
        raise PluginError(
            f"the reward function {function!r} cannot be called as score(response, reference): {error}. "
            f"Beyond those two it may name {' and '.join(EXTRAS)}."
        ) from error
    return extras


def to_value(result: object) -> float:
    """Turn what a reward returned into a number within bounds, or say why it is none."""
    if not isinstance(result, SupportsFloat):
        raise TypeError(f"the reward returned {_shorten(result)}; it must return a number or a bool")
    return check_bounds(float(result), "the reward returned")


def check_bounds(value: float, returned: str) -> float:
    """Return the value, or raise when it is no finite number of at most `LARGEST_REWARD`."""
    if not math.isfinite(value):
        raise ValueError(f"{returned} {value}; it must be finite")
    if abs(value) > LARGEST_REWARD:
        raise ValueError(f"{returned} {value}; it must lie between {-LARGEST_REWARD:,.0f} and {LARGEST_REWARD:,.0f}")
    return value


def _shorten(result: object) -> str:
    try:
        text = repr(result)
    except Exception as error:
        text = f"<its repr failed: {error!r}>"
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{text} ({type(result).__name__})"


def resolve(result: object) -> object:
    """Return what a reward gave, waiting for it when the reward is async."""
    return _event_loop().run_until_complete(_wait_for(result)) if inspect.isawaitable(result) else result


async def _wait_for(result: Awaitable[object]) -> object:
    return await result


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    # One loop for the life of the process, so that an HTTP client kept between calls stays usable.
    import asyncio  # noqa: PLC0415  (most rewards are plain functions, and their processes start without it)

    return asyncio.new_event_loop()


class CustomReward:
    """A function as a reward. An async function hands back its coroutine, which `resolve` waits for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.extras = named_extras(function)

    def score(self, response: str, reference: str, **extras: object) -> Any:
        """Call the function; `extras` holds the ones it asked for."""
        return self._function(response, reference, **extras)


def extras_of(reward: Reward) -> tuple[str, ...]:
    """Return what a reward wants beyond the response and the reference."""
    return reward.extras if isinstance(reward, CustomReward) else named_extras(reward.score)


def call_reward(reward: Reward, response: str, reference: str, extras: Mapping[str, object]) -> float | None:
    """Score one response with one reward: a number within bounds, or whatever the reward raised.

    None is a reward that does not apply to this response.
    """
    score: Callable[..., object] = reward.score
    result = resolve(score(response, reference, **extras))
    return None if result is None else to_value(result)
