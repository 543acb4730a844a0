"""A script's dataset as a run's problems: prompts as text or messages, every other column for the rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.assemble import check_context
from retrain.config import TrainConfig
from retrain.data.rows import ANSWER_FIELDS, BadRow, raise_for_rows, read_answer, read_prompt
from retrain.errors import ConfigError, Problem
from retrain.grpo.rewards import GIVEN, ScriptReward, Term, describe_terms
from retrain.inference_engine import InferenceEngine
from retrain.rollout import Rollouts, SamplesAndScores, Scorer
from retrain.tokens import PromptEncoder
from retrain.tracking.console import Console
from retrain.types import Example, Group, Metric, Sampling

Check = Callable[[], None]
"""Raises when a run is to end before its next step."""


@dataclass(frozen=True)
class ScriptData:
    """What a script trains on: examples, held-out ones, and how they are scored."""

    examples: Sequence[Example]
    held_out: Sequence[Example]
    terms: Sequence[Term]
    state: Any
    """The `trainer_state` of reward functions."""
    template_kwargs: Mapping[str, Any]


def read_dataset(dataset: object, what: str, terms: Sequence[Term], keep_columns: bool) -> list[Example]:
    """Every row as an example; the bad ones come in one error."""
    if dataset is None:
        raise ConfigError(f"{what} is missing.  Try: {what}=datasets.Dataset.from_list([{{'prompt': '...'}}])")
    rows = _rows(dataset, what)
    needs_answer = any(term.function is None for term in terms)
    examples: list[Example] = []
    problems: list[Problem] = []
    for number, row in enumerate(rows):
        try:
            examples.append(_example(row, number, needs_answer, keep_columns))
        except BadRow as bad:
            problems.append(Problem(f"row {number}", str(bad)))
    if problems:
        raise_for_rows(problems, what)
    if not examples:
        raise ConfigError(f"{what} has no rows.")
    return examples


def _rows(dataset: Any, what: str) -> Iterable[Any]:
    if isinstance(dataset, Mapping):
        raise ConfigError(f"{what} is a dict of splits ({', '.join(map(str, dataset))}).  Try: {what}=dataset['train']")
    if isinstance(dataset, str) or not isinstance(dataset, Iterable):
        raise ConfigError(
            f"{what} is {dataset!r}, neither a Dataset nor a list of rows.  Try: datasets.load_dataset({dataset!r})"
        )
    try:
        len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"{what} is a stream ({type(dataset).__name__}); prompts are taken in a seeded order, so all of them "
            f"must be known.  Try: datasets.Dataset.from_list(list({what}.take(10_000)))"
        ) from error
    return dataset


def _example(row: object, number: int, needs_answer: bool, keep_columns: bool) -> Example:
    if not isinstance(row, Mapping):
        raise BadRow(f"is a {type(row).__name__}, not an object with fields")
    if row.get("prompt") is None:
        raise BadRow(f"has no field 'prompt'; it has {', '.join(map(str, row)) or 'none at all'}")
    taken = [name for name in GIVEN if name in row]
    if taken:
        raise BadRow(f"has a column {taken[0]!r}, a name that reward functions get something else under")
    field = next((name for name in ANSWER_FIELDS if row.get(name) is not None), "")
    if needs_answer and not field:
        raise BadRow(f"has no {' or '.join(ANSWER_FIELDS)}, which a reward given by name compares with")
    meta = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
    # Functions read the columns; only what is shown on the screen takes the answer from here then.
    reference = read_answer(row[field], field, named=False) if needs_answer else str(row[field]) if field else ""
    return Example(read_prompt(row["prompt"], "prompt"), reference, str(number), meta if keep_columns else {})


class RowEncoder(PromptEncoder):
    """Messages go through the chat template; a prompt that is text is given to the model as it stands."""

    def ids_of(self, example: Example) -> list[int]:
        """Token ids of a whole prompt."""
        if isinstance(example.prompt, str):
            return list(self.tokenizer(example.prompt)["input_ids"])
        return super().ids_of(example)


class ScriptScorer(Scorer):
    """Scores by functions, and tells the mean of each."""

    def __init__(self, encoder: PromptEncoder, reward: ScriptReward, console: Console, check: Check) -> None:
        super().__init__(encoder, reward, console.say, console.progress)
        self.terms = reward.terms
        self.check = check

    def sample_and_score(self, engine: InferenceEngine, examples: Sequence[Example], sampling: Sampling) -> Rollouts:
        """One group an example, unless somebody wants the run to end: here, no step is under way."""
        self.check()
        return super().sample_and_score(engine, examples, sampling)

    def describe(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """The mean of each reward in this step."""
        scores = [score for group in groups for score in group.scores_G]
        return {**describe_terms(self.terms, scores), **super().describe(groups)}


class ScriptProblems:
    """The examples of a script, scored by its functions."""

    def __init__(self, data: ScriptData, config: TrainConfig, console: Console, check: Check) -> None:
        self.data = data
        self.check = check
        self.config = config
        self.console = console
        self.reward = ScriptReward(data.terms, data.state, console.say)

    def load(self, tokenizer: Any) -> tuple[Sequence[Example], Sequence[Example]]:
        """The problems to train on and those to evaluate on."""
        longest = self.config.training.max_prompt_tokens
        self.encoder = RowEncoder(tokenizer, "", longest, self.console.say, self.data.template_kwargs)
        self.console.say(f"Loaded {len(self.data.examples)} examples")
        return self.data.examples, self.data.held_out

    def scorer(self, context: int) -> SamplesAndScores:
        """What samples and scores them, once it is known how many tokens the model holds."""
        check_context(self.config, self.encoder, [*self.data.examples, *self.data.held_out], context)
        return ScriptScorer(self.encoder, self.reward, self.console, self.check)

    def close(self) -> None:
        """End the rewards' processes."""
        self.reward.close()
