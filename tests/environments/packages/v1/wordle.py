"""A verifiers (0.4 and later) environment in the shape of wordle: a few tries, each answered with a hint."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf


class WordleConfig(vf.TasksetConfig):
    rows: int = 40
    seed: int = 0


class WordleData(vf.TaskData):
    answer: str


class WordleTask(vf.Task[WordleData, vf.State, vf.TaskConfig]):
    @vf.metric
    async def turns_taken(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class WordleTaskset(vf.Taskset[WordleTask, WordleConfig]):
    def load(self) -> Iterator[WordleTask]:
        rng = random.Random(self.config.seed)
        for _ in range(self.config.rows):
            first, second, third = rng.randint(4, 9), rng.randint(1, 3), rng.randint(1, 3)
            data = WordleData(prompt=f"{first}-{second}+{third}=?", answer=str(first - second + third))
            yield WordleTask(data, self.config.task)


class WordleEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=12)


class WordleEnv(vf.Env[WordleEnvConfig]):
    async def run(self, task: WordleTask, agents: vf.Agents) -> None:
        won = 0.0
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            while not segment.terminated:
                found = re.findall(r"\\boxed\{(-?\d+)\}", segment.last_reply or "")
                if found and found[-1] == task.data.answer:
                    won = 1.0
                    break
                segment = await game.turn(task.data.prompt)
        game.trace.record_reward("won", won, 1.0)


__all__ = ["WordleEnv", "WordleTaskset"]
