"""The environment of a run, from its table to what plays it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrain.backends import Backend
from retrain.config import TrainConfig
from retrain.data import Endless
from retrain.environments.chat import Limits
from retrain.environments.remote import RemoteEnvironment
from retrain.environments.rollouts import Player, Rules
from retrain.environments.template import ChatTemplate
from retrain.rollout import SamplesAndScores
from retrain.tracking.console import Console
from retrain.types import Example


class EnvironmentProblems:
    """Examples and scoring of `[environment]`. Made before the model is loaded, so that a bad one fails early."""

    def __init__(self, config: TrainConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self.section = config.environment
        self.player: Player | None = None
        console.say(f"Loading environment {self.section.id or self.section.provider} ...")
        self.environment = RemoteEnvironment(self.section, config.plugins.search_paths, console.say)
        try:
            self.examples: Sequence[Example] = self.environment.examples("train")
            many = "endless" if isinstance(self.examples, Endless) else str(len(self.examples))
            console.say(f"Loaded {many} examples")
            self.held_out = self._held_out() if config.eval.every else []
        except BaseException:
            self.environment.end()
            raise

    def load(self, tokenizer: Any) -> tuple[Sequence[Example], Sequence[Example]]:
        """The problems to train on and those to evaluate on."""
        self.template = ChatTemplate(tokenizer)
        if tokenizer.chat_template is None:
            self.console.say(
                "Warning: the tokenizer has no chat template; conversations are given to the model as plain text."
            )
        return self.examples, self.held_out

    def scorer(self, backend: Backend) -> SamplesAndScores:
        """What plays them, once it is known how many tokens the model holds."""
        training = self.config.training
        limits = Limits(
            training.max_tokens, backend.capabilities.context_length, self.section.max_turns, training.max_prompt_tokens
        )
        in_rounds = self.config.training.deterministic is True
        rules = Rules(limits, self.section.timeout_s, self.config.reward.correct_from, in_rounds)
        self.player = Player(self.environment, self.template, rules, self.console.say, self.console.progress)
        return self.player

    def close(self) -> None:
        """End the event loop of the rollouts and the environment's process."""
        if self.player is not None:
            self.player.close()
        self.environment.end()

    def _held_out(self) -> Sequence[Example]:
        examples = self.environment.examples(self.config.eval.split)
        if isinstance(examples, Endless):
            # The same problems for every run, whatever its seed, so that runs can be compared on them.
            examples = examples.reseed(0)
        return examples[: self.config.eval.max_examples]
