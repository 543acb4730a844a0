"""A verifiers (0.4 and later) environment that fails where its arguments ask for it."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf


class TroubledConfig(vf.TasksetConfig):
    when: str = ""
    rows: int = 2


class TroubledData(vf.TaskData):
    when: str


class TroubledTask(vf.Task[TroubledData, vf.State, vf.TaskConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.when == "setup":
            raise ValueError("no board")
        if self.data.when == "never ends":
            await asyncio.sleep(3600)

    @vf.reward(weight=1.0)
    async def points(self, trace: vf.Trace) -> float:
        if self.data.when == "scoring":
            raise ValueError("no rule")
        return float("nan") if self.data.when == "nan" else 1.0


class TroubledTaskset(vf.Taskset[TroubledTask, TroubledConfig]):
    def load(self) -> Iterator[TroubledTask]:
        if self.config.when == "load":
            raise OSError("disk gone")
        image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        for number in range(self.config.rows):
            prompt: object = f"{number}+1=?"
            if self.config.when == "empty prompt" and number == 1:
                prompt = " "
            if self.config.when == "image":
                prompt = [vf.UserMessage(content=image)]
            yield TroubledTask(TroubledData(prompt=prompt, when=self.config.when), self.config.task)


__all__ = ["TroubledTaskset"]
