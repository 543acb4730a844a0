"""A script's dataset as a run's problems: prompts as text or messages, every other column for the rewards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrain.assemble import DataTasks
from retrain.backends import Backend
from retrain.config import TrainConfig
from retrain.data.rows import ANSWER_FIELDS, BadRow, raise_for_rows, read_answer, read_prompt
from retrain.errors import CheckpointError, ConfigError, ConfigIssue
from retrain.grpo.rewards import GIVEN, ScriptReward, Term, describe_terms
from retrain.inference_engine import InferenceEngine
from retrain.modeling.tokens import PromptEncoder
from retrain.rollout import Rollouts, RolloutScorer
from retrain.tracking.console import Console
from retrain.types import Example, Group, IntArray, Metric, Sampling, StepMetrics

DIGEST_FILE = "prompts.digest"


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
    problems: list[ConfigIssue] = []
    for number, row in enumerate(rows):
        try:
            examples.append(_example(row, number, needs_answer, keep_columns))
        except BadRow as bad:
            problems.append(ConfigIssue(f"row {number}", str(bad)))
    if problems:
        raise_for_rows(problems, what)
    if not examples:
        raise ConfigError(f"{what} has no rows.")
    # As in a Dataset, a column that a row lacks is None there.
    columns = dict.fromkeys(name for example in examples for name in example.meta)
    return [replace(example, meta={name: example.meta.get(name) for name in columns}) for example in examples]


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


class PromptsKeeper:
    """A Tracker that keeps a digest of a run's prompts beside it: a resume goes on in their order."""

    def __init__(self, examples: Sequence[Example]) -> None:
        prompts = json.dumps([example.prompt for example in examples], default=str)
        self.digest = hashlib.blake2b(prompts.encode(), digest_size=16).hexdigest()

    def check(self, run: Path) -> None:
        """Refuse to go on with a run that had other prompts."""
        kept = run / DIGEST_FILE
        if kept.exists() and kept.read_text(encoding="utf-8") != self.digest:
            raise CheckpointError(f"{run} was trained on other prompts.  Try: the same train_dataset, or another run")

    def start(self, config: TrainConfig) -> None:
        """Write the digest."""
        (Path(config.logging.log_dir) / DIGEST_FILE).write_text(self.digest, encoding="utf-8")

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Nothing: prompts do not change."""

    def finish(self) -> None:
        """Nothing: a resume will want it."""


class RowEncoder(PromptEncoder):
    """Messages go through the chat template; a prompt that is text is given to the model as it stands."""

    def encode_once(self, example: Example) -> IntArray:
        """Token ids of a prompt, cut from the left where max_prompt_tokens says so."""
        if not isinstance(example.prompt, str):
            return super().encode_once(example)
        ids = np.asarray(self.tokenizer(example.prompt)["input_ids"], dtype=np.int64)
        return ids[-self.max_prompt_tokens :] if self.max_prompt_tokens else ids


class NamesRewards:
    """Samples and scores as another does, and tells the mean of each reward of a step."""

    def __init__(self, inner: RolloutScorer, terms: Sequence[Term]) -> None:
        self.inner = inner
        self.terms = terms

    def sample_and_score(self, engine: InferenceEngine, examples: Sequence[Example], sampling: Sampling) -> Rollouts:
        """One group an example, in order; an evaluation is told the rewards by name too."""
        rollouts = self.inner.sample_and_score(engine, examples, sampling)
        scores = rollouts.scores
        mean = sum(score.value for score in scores) / max(1, len(scores))
        told = {"reward": mean, **describe_terms(self.terms, scores)}
        return replace(rollouts, metrics={**rollouts.metrics, **told})

    def group_metrics(self, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """What the other tells of a step's groups, and the mean of each reward."""
        scores = [score for group in groups for score in group.scores_G]
        return {**describe_terms(self.terms, scores), **self.inner.group_metrics(groups)}


class ScriptProblems(DataTasks):
    """The examples of a script, scored by its functions."""

    def __init__(self, data: ScriptData, config: TrainConfig, console: Console) -> None:
        super().__init__(config, console, ScriptReward(data.terms, data.state, console.print))
        self.data = data

    def load(self, tokenizer: Any) -> tuple[Sequence[Example], Sequence[Example]]:
        """The problems to train on and those to evaluate on."""
        longest = self.config.training.max_prompt_tokens
        self.encoder = RowEncoder(tokenizer, "", longest, self.console.print, self.data.template_kwargs)
        self.examples, self.held_out = self.data.examples, self.data.held_out
        self.console.print(f"Loaded {len(self.examples)} examples")
        return self.examples, self.held_out

    def scorer(self, backend: Backend) -> RolloutScorer:
        """What samples and scores them, and names each reward."""
        return NamesRewards(super().scorer(backend), self.data.terms)
