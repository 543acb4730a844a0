"""The tasks of a run with an environment."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.backends import Backend
from retrain.checks.vocabulary import check_template
from retrain.config import TrainConfig
from retrain.data import Endless, sample_held_out
from retrain.environments.chat import Limits
from retrain.environments.remote import RemoteEnvironment
from retrain.environments.runner import EnvironmentRunner, Rules
from retrain.environments.template import ChatTemplate
from retrain.modeling.tokens import Tokenizer
from retrain.rollout import RolloutScorer
from retrain.runtime.text import plural
from retrain.tracking.console import Console
from retrain.types import Example

SPLIT_CHECKED = 8
"""Problems of each split that are compared."""


class EnvironmentTasks:
    """A `TaskSource` for `[environment]`. Built before the model is loaded, so that errors show early."""

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self.section = config.environment
        self.runner: EnvironmentRunner | None = None
        console.print(f"Loading environment {self.section.id or self.section.provider} ...")
        self.environment = RemoteEnvironment(self.section, config.plugins.search_paths, console.print)
        try:
            self.examples: Sequence[Example] = self.environment.examples("train")
            is_endless = isinstance(self.examples, Endless)
            many = "an unlimited number of examples" if is_endless else plural(len(self.examples), "example", form="d")
            console.print(f"Loaded {many}")
            self.held_out: Sequence[Example] = []
            self.has_one_split = False
            if config.eval.every:
                held_out = self.environment.examples(config.eval.split)
                self.has_one_split = _begin_alike(self.examples, held_out)
                self.held_out = sample_held_out(held_out, config.eval.max_examples, console.print)
        except BaseException:
            self.environment.end()
            raise

    def load(self, tokenizer: Tokenizer) -> tuple[Sequence[Example], Sequence[Example]]:
        """The tasks for training and for evaluation."""
        self.template = ChatTemplate(tokenizer)
        if tokenizer.chat_template is None:
            self.console.print(
                "Warning: the tokenizer has no chat template; conversations are formatted as plain text."
            )
        check_template(self.config, tokenizer)
        if self.has_one_split:
            self.console.print(
                "Note: the environment has the same problems for training and for evaluation, so held-out results are "
                "those of problems that are trained on."
            )
        return self.examples, self.held_out

    def scorer(self, backend: Backend) -> RolloutScorer:
        """The runner, which needs the model's context length."""
        training = self.config.training
        limits = Limits(
            training.max_tokens, backend.capabilities.context_length, self.section.max_turns, training.max_prompt_tokens
        )
        in_rounds = self.config.training.deterministic is True
        rules = Rules(limits, self.section.timeout_s, self.config.reward.correct_from, in_rounds)
        self.runner = EnvironmentRunner(
            self.environment, self.template, rules, self.console.print, self.console.progress
        )
        return self.runner

    def close(self) -> None:
        """Stop the event loop of the rollouts and the environment's process."""
        if self.runner is not None:
            self.runner.close()
        self.environment.end()


def _begin_alike(examples: Sequence[Example], held_out: Sequence[Example]) -> bool:
    """Whether the first problems of both splits are equal; all of them would take long to fetch."""
    if isinstance(examples, Endless) or isinstance(held_out, Endless):
        return False
    first = [(example.prompt, example.reference, example.id) for example in held_out[:SPLIT_CHECKED]]
    return bool(first) and first == [(one.prompt, one.reference, one.id) for one in examples[: len(first)]]
