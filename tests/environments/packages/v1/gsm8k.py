"""A verifiers (0.4 and later) environment in the shape of the Hub's gsm8k: rows of a dataset, one turn, one reward."""

import re
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf


class Gsm8kConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "test"
    limit: int = 0


class Gsm8kData(vf.TaskData):
    answer: str


class Gsm8kTask(vf.Task[Gsm8kData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        found = re.findall(r"\\boxed\{(-?\d+)\}", trace.last_reply or "")
        return float(bool(found) and found[-1] == self.data.answer)

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        return float("\\boxed" in (trace.last_reply or ""))


class Gsm8kTaskset(vf.Taskset[Gsm8kTask, Gsm8kConfig]):
    def load(self) -> Iterator[Gsm8kTask]:
        from datasets import load_dataset

        rows = load_dataset("openai/gsm8k", "main", split=self.config.split)
        for row in list(rows)[: self.config.limit or None]:
            answer = row["answer"].rpartition("####")[2].strip()
            yield Gsm8kTask(Gsm8kData(prompt=row["question"], answer=answer), self.config.task)


__all__ = ["Gsm8kTaskset"]
