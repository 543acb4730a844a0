"""A verifiers environment from before 0.4 that fails where its arguments ask for it."""

import verifiers as vf
from datasets import Dataset


class Troubled(vf.SingleTurnEnv):
    when = ""

    async def setup_state(self, state: vf.State) -> vf.State:
        if self.when == "setup":
            raise ValueError("no board")
        return state


def load_environment(when: str = "") -> vf.Environment:
    if when == "load":
        raise OSError("disk gone")

    def points(completion: list[dict[str, str]]) -> float:
        if when == "scoring":
            raise ValueError("no rule")
        return float("nan") if when == "nan" else 1.0

    def together(states: list[vf.State]) -> list[float]:
        return [1.0 for _ in states]

    rows = Dataset.from_list([{"question": "1+1=?", "answer": "2"}])
    data = {"eval_dataset": rows} if when == "evaluation only" else {"dataset": rows}
    environment = Troubled(rubric=vf.Rubric(funcs=[together if when == "group" else points]), **data)
    environment.when = when
    return environment
