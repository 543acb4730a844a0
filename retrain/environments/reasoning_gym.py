"""Tasks of the reasoning-gym package, generated on demand and scored by its own scorers.

The scorers are wrapped: an exception counts as a wrong answer, the minimal score that several give to any answer
counts as 0, and tasks that reward nonsense are reported before training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from pydantic import Field

from retrain.config import schema
from retrain.data import Lazy
from retrain.environments import Chat, Log, Message, Outcome
from retrain.environments.args import Args, read_args
from retrain.errors import ConfigError
from retrain.runtime.packages import missing
from retrain.types import Example, JsonObject

Entry = JsonObject
"""A task of reasoning-gym: question, answer and metadata."""
MIX = "composite"
MINIMAL_SCORE = 0.05
"""Score that several scorers give to any text; it counts as 0."""
_NONSENSE = "zzz"
_TRIED = 3
_KEPT = 4096


class MixedTask(Args):
    """One task of a mix."""

    weight: float = Field(1.0, gt=0)
    config: JsonObject = Field(default_factory=dict)


class GymArgs(Args):
    """The `[environment] args`."""

    config: JsonObject = Field(default_factory=dict)
    """Settings of the task, as named by reasoning-gym."""
    tasks: dict[str, MixedTask] = Field(default_factory=dict)
    """The tasks of a mix, by name; for id = "composite" only."""
    size: int = Field(10_000, ge=1, le=10**9)
    """Number of training tasks."""
    held_out: int = Field(500, ge=1, le=10**9)
    """Number of evaluation tasks, which follow the training tasks."""
    seed: int = Field(0, ge=0, le=2**31)
    prompt: str = "default"
    """Name of a reasoning-gym system prompt; empty for none. Answers are in <answer> tags."""
    partial: bool = True
    """Whether partially correct answers get partial rewards; otherwise 0."""


class ReasoningGym:
    """A reasoning-gym task, or a weighted mix of several; single-turn."""

    def __init__(self, section: schema.Environment, log: Log) -> None:
        self.args = read_args(GymArgs, section)
        self._package = _import_package()
        self._system = _system_prompt(self._package, self.args.prompt)
        self._dataset = _make_dataset(self._package, section.id, self.args)
        self.entry = lru_cache(maxsize=_KEPT)(self._make_entry)
        for line in self._scorer_warnings(section.id):
            log(line)

    def examples(self, split: str) -> Lazy:
        """The first `size` tasks for training, the following ones for any other split."""
        size = self.args.size
        return Lazy(self.example, range(size) if split == "train" else range(size, size + self.args.held_out))

    def example(self, place: int) -> Example:
        """Task number `place`. Five kinds have no reference: their scorers execute the answer."""
        entry = self.entry(place)
        system: tuple[Message, ...] = ({"role": "system", "content": self._system},) if self._system else ()
        task = str(entry["metadata"].get("source_dataset", ""))
        return Example(
            prompt=(*system, {"role": "user", "content": entry["question"]}),
            reference="" if entry["answer"] is None else str(entry["answer"]),
            id=f"{task}:{place}",
            meta={"place": place, "task": task},
        )

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Ask once and score the text in the answer tags."""
        place = example.meta["place"]
        assert isinstance(place, int) and not isinstance(example.prompt, str)
        reply = await chat.ask(example.prompt)
        answer = self._package.utils.extract_answer(reply.text)
        # Some scorers are slow; other rollouts continue meanwhile.
        value = await asyncio.to_thread(self._score, answer, self.entry(place))
        metrics = {"answered": float(answer is not None), "scorer_raised": float(value is None)}
        return Outcome(self._reward(value or 0.0), metrics)

    def _make_entry(self, place: int) -> Entry:
        entry: Entry = self._dataset[place]
        return entry

    def _score(self, answer: str | None, entry: Entry) -> float | None:
        """The score; None when the scorer raised, as it does on answers it cannot parse."""
        if answer is None:
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, entry))
        except Exception:
            return None

    def _reward(self, value: float) -> float:
        if not self.args.partial:
            return float(value >= 1.0)
        return value if value > MINIMAL_SCORE else 0.0

    def _scorer_warnings(self, task: str) -> list[str]:
        """Warnings about scorers, checked on the first tasks."""
        lines = {}
        for place in range(min(_TRIED, self.args.size)):
            entry = self.entry(place)
            name = entry["metadata"].get("source_dataset", task)
            if (self._score(_NONSENSE, entry) or 0.0) > MINIMAL_SCORE:
                lines[name, "nonsense"] = f"Warning: the reasoning-gym task {name} rewards nonsense."
            if entry["answer"] is not None and self._score(str(entry["answer"]), entry) != 1.0:
                lines[name, "answer"] = f"Warning: the reasoning-gym task {name} does not accept its own answer."
        return list(lines.values())


def load(section: schema.Environment, log: Log) -> ReasoningGym:
    """The provider `reasoning_gym`."""
    return ReasoningGym(section, log)


def _import_package() -> Any:
    try:
        import reasoning_gym  # noqa: PLC0415  (an optional extra that takes seconds to import)
        import reasoning_gym.utils  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise missing("reasoning-gym", '[environment] provider = "reasoning_gym"') from error
    return reasoning_gym


def _system_prompt(package: Any, name: str) -> str:
    known: Mapping[str, str] = package.utils.SYSTEM_PROMPTS
    if name and name not in known:
        raise ConfigError(f"[environment] args.prompt = {name!r} is unknown.  Known: {', '.join(known)}, or empty.")
    return known[name] if name else ""


def _make_dataset(package: Any, task: str, args: GymArgs) -> Any:
    """The dataset of a task, long enough for both splits."""
    known = sorted(package.factory.DATASETS)
    size = args.size + args.held_out
    _check_tasks(task, args, known)
    try:
        if task != MIX:
            return package.create_dataset(task, size=size, seed=args.seed, **args.config)
        spec = package.composite.DatasetSpec
        parts = [spec(name=name, weight=part.weight, config=part.config) for name, part in args.tasks.items()]
        return package.create_dataset(MIX, size=size, seed=args.seed, datasets=parts)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym rejected the settings of {task!r}: {error}") from error


def _check_tasks(task: str, args: GymArgs, known: Sequence[str]) -> None:
    if task == MIX and (not args.tasks or args.config):
        raise ConfigError(
            f'[environment] id = "{MIX}" needs args.tasks with settings per task.  '
            "Try: args = { tasks = { chain_sum = { weight = 2.0 }, leg_counting = {} } }"
        )
    if task != MIX and args.tasks:
        raise ConfigError(f'[environment] args.tasks is set, but id is "{task}".  Try: id = "{MIX}"')
    for where, name in (("id", task), *(("args.tasks", name) for name in args.tasks)):
        if name not in known or (name == MIX and where != "id"):
            close = get_close_matches(name, known, n=3)
            hint = f"Did you mean {' or '.join(close)}?" if close else f"It has {len(known)}, for example chain_sum."
            raise ConfigError(f"[environment] {where} names {name!r}, which reasoning-gym does not have.  {hint}")
