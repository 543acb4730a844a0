"""A verifiers environment from before 0.4 in the shape of wordle: a few tries, each answered with a hint."""

import random
import re

import verifiers as vf
from datasets import Dataset


def solved(messages: list[dict[str, str]], answer: str) -> bool:
    found = re.findall(r"\\boxed\{(-?\d+)\}", messages[-1]["content"])
    return bool(found) and found[-1] == answer


class Wordle(vf.MultiTurnEnv):
    @vf.stop
    async def is_solved(self, state: vf.State) -> bool:
        turns = state["trajectory"]
        return bool(turns) and solved(turns[-1]["completion"], state["answer"])

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: object) -> vf.Messages:
        return [{"role": "user", "content": state["info"]["question"]}]


def load_environment(rows: int = 40, seed: int = 0) -> vf.Environment:
    rng = random.Random(seed)
    made = []
    for _ in range(rows):
        first, second, third = rng.randint(4, 9), rng.randint(1, 3), rng.randint(1, 3)
        question = f"{first}-{second}+{third}=?"
        made.append({"question": question, "answer": str(first - second + third), "info": {"question": question}})

    def won(completion: list[dict[str, str]], answer: str) -> float:
        return float(solved(completion, answer))

    return Wordle(dataset=Dataset.from_list(made), rubric=vf.Rubric(funcs=[won]), max_turns=12)
