"""A verifiers environment from before 0.4 in the shape of the Hub's gsm8k: rows of a dataset, one turn, one rubric."""

import re

import verifiers as vf
from datasets import load_dataset


def load_environment(num_train_examples: int = -1, num_eval_examples: int = -1) -> vf.Environment:
    def rows(split: str, count: int) -> object:
        found = load_dataset("openai/gsm8k", "main", split=split)
        found = found.map(lambda row: {"answer": row["answer"].rpartition("####")[2].strip()})
        return found.select(range(count)) if count > 0 else found

    def correct(completion: list[dict[str, str]], answer: str) -> float:
        found = re.findall(r"\\boxed\{(-?\d+)\}", completion[-1]["content"])
        return float(bool(found) and found[-1] == answer)

    return vf.SingleTurnEnv(
        dataset=rows("train", num_train_examples),
        eval_dataset=rows("test", num_eval_examples),
        rubric=vf.Rubric(funcs=[correct], weights=[1.0]),
    )
