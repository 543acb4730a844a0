"""A verifiers environment from before 0.4 with a tool."""

import verifiers as vf
from datasets import Dataset


async def add(first: int, second: int) -> str:
    """Add two numbers.

    Args:
        first: The one.
        second: The other.
    """
    return f"Observed {first + second}"


def load_environment() -> vf.Environment:
    def right(completion: list[dict[str, str]], answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    rows = Dataset.from_list([{"question": "3 and 4?", "answer": "7"}])
    return vf.ToolEnv(tools=[add], dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=5)
