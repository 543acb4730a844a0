"""A verifiers (0.4 and later) environment that is made for evaluation."""

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf


class OnlyTestConfig(vf.TasksetConfig):
    split: Literal["test", "validation"] = "test"


class OnlyTestTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def points(self, trace: vf.Trace) -> float:
        return 1.0


class OnlyTestTaskset(vf.Taskset[OnlyTestTask, OnlyTestConfig]):
    def load(self) -> Iterator[OnlyTestTask]:
        yield OnlyTestTask(vf.TaskData(prompt="1+1=?"), self.config.task)


__all__ = ["OnlyTestTaskset"]
