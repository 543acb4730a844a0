"""Large arithmetic problems with a calculator tool: a minimal tool-use environment."""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable

from pydantic import Field

from retrain.config import schema
from retrain.data import Endless
from retrain.environments import Chat, Log, Outcome, Tool, ToolCall
from retrain.environments.args import Args, read_args
from retrain.rewards.match import MatchReward
from retrain.types import Example

CALCULATE: Tool = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Value of an expression of whole numbers with + - * and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 12*(3+4)."}},
            "required": ["expression"],
        },
    },
}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_LONGEST_EXPRESSION = 200


class CalculatorArgs(Args):
    """The `[environment] args`."""

    largest: int = Field(999, ge=9, le=10**9)
    """The largest number in a question."""
    calls: int = Field(4, ge=1, le=100)
    """Maximum number of turns with tool calls."""


class Calculator:
    r"""`What is 348*27-190?`, with a `calculate` tool; the reward is 1 for the correct number in `\boxed{}`."""

    def __init__(self, section: schema.Environment, log: Log) -> None:
        self.args = read_args(CalculatorArgs, section)
        self._reward = MatchReward()

    def examples(self, split: str) -> Endless:
        """An unlimited number of questions: even first numbers for training, odd ones for evaluation."""

        def draw(rng: random.Random) -> Example:
            half = self.args.largest // 2
            first = 2 * rng.randint(1, half) - (split != "train")
            second, third = (rng.randint(2, self.args.largest) for _ in range(2))
            expression = f"{first}*{second}{rng.choice('+-')}{third}"
            question = f"What is {expression}? Give the number as \\boxed{{number}}."
            return Example(question, str(calculate(expression)), id=expression)

        return Endless(draw)

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Run tool calls until there are none, then score the answer."""
        assert isinstance(example.prompt, str)
        reply = await chat.ask(example.prompt, tools=[CALCULATE])
        calls = failed = 0
        for _ in range(self.args.calls):
            if not reply.tool_calls:
                break
            results = [_run(call) for call in reply.tool_calls]
            calls += len(results)
            failed += sum(text.startswith("error") for text in results)
            messages = [
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
                for call, text in zip(reply.tool_calls, results, strict=True)
            ]
            reply = await chat.ask(messages, tools=[CALCULATE])
        right = float(self._reward.score(reply.text, example.reference))
        return Outcome(right, {"calls": calls, "failed_calls": failed})


def calculate(expression: str) -> int:
    """Evaluate integers with + - * and parentheses; anything else is a ValueError."""
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"longer than {_LONGEST_EXPRESSION} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not an expression of whole numbers with + - * and parentheses") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("not an expression of whole numbers with + - * and parentheses")


def _run(call: ToolCall) -> str:
    """The tool's reply; invalid calls get an error message for the model."""
    expression = call.arguments.get("expression")
    if call.broken or call.name != "calculate" or not isinstance(expression, str):
        return 'error: call calculate with {"expression": "..."}'
    try:
        return str(calculate(expression))
    except ValueError as error:
        return f"error: {error}"
