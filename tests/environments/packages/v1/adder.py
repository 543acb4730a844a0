"""A verifiers (0.4 and later) environment with a tool: sums that are to be computed by calling `add`."""

from collections.abc import Iterator

import verifiers.v1 as vf


class AdderTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, first: int, second: int) -> str:
        """Add two numbers."""
        return str(first + second)


class AdderConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class AdderData(vf.TaskData):
    answer: str


class AdderTask(vf.Task[AdderData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    def load(self) -> Iterator[AdderTask]:
        for first in range(3, 7):
            yield AdderTask(AdderData(prompt=f"{first} and 4?", answer=str(first + 4)), self.config.task)

    @classmethod
    def toolsets(cls, config: AdderConfig) -> list[vf.Toolset]:
        return [AdderTools(config.tools)]


__all__ = ["AdderTaskset"]

if __name__ == "__main__":
    AdderTools.run()
