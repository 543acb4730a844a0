"""Fakes for testing plugins and loops without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from retrain.backends import Capabilities
from retrain.environments import ChatOver, Message, Reply, Tool, as_messages
from retrain.environments.tools import read_calls
from retrain.inference_engine import InferenceEngine
from retrain.seeding import derive_seed
from retrain.types import Completion, Datum, IntArray, Sampling, StepMetrics

Script = Callable[[IntArray, int, np.random.Generator], str]
"""Writes a completion, given the prompt's token ids, the completion's index and a generator."""


class ScriptedEngine:
    """An InferenceEngine whose completions are written by a function; one token per character."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """Call the script `sampling.n` times per prompt; the same seed gives the same generators."""
        numbers = range(sampling.n)
        return [[self._answer(prompt, at, n, sampling) for n in numbers] for at, prompt in enumerate(prompts)]

    def _answer(self, prompt: IntArray, at: int, index: int, sampling: Sampling) -> Completion:
        rng = np.random.default_rng(derive_seed(sampling.seed, f"{at}/{index}"))
        text = self.script(prompt, index, rng)
        cut = text[: sampling.max_tokens]
        return Completion(
            token_ids_T=np.array([ord(character) for character in cut], dtype=np.int64),
            logprobs_T=-rng.random(len(cut)).astype(np.float32),
            entropies_T=rng.random(len(cut)).astype(np.float32),
            text=cut,
            finish_reason="stop" if len(cut) == len(text) else "length",
        )

    def sync(self, weights: object) -> None:
        """Does nothing: a script has no weights."""

    def shutdown(self) -> None:
        """Does nothing: there is nothing to release."""


class ScriptedChat:
    """A `retrain.environments.Chat` with given answers; the conversation is over when they run out."""

    def __init__(self, answers: Sequence[str], seed: int = 0) -> None:
        self.answers = list(answers)
        self.seed = seed
        self.transcript: list[Message] = []

    async def ask(self, new: str | Message | Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Take the next answer."""
        self.transcript += as_messages(new)
        if not self.answers:
            raise ChatOver("the script has ended")
        text = self.answers.pop(0)
        self.transcript.append({"role": "assistant", "content": text})
        return Reply(text, read_calls(text))

    async def reply_to(self, history: Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Take the next answer; new messages of the history are added to the transcript."""
        return await self.ask(history[len(self.transcript) :], tools)


class FakeBackend:
    """A Backend that records every datum and trains nothing."""

    def __init__(self, engine: InferenceEngine, context_length: int = 4096) -> None:
        self.engine = engine
        self.capabilities = Capabilities(context_length=context_length, gives_entropies=True)
        self.trained: list[list[Datum]] = []

    def sampler(self, step: int) -> InferenceEngine:
        """The given engine."""
        return self.engine

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """Record the datums; the loss is minus their mean advantage."""
        self.trained.append(list(datums))
        advantages = [float(datum.advantages_T[datum.mask_T].mean()) for datum in datums if datum.mask_T.any()]
        return {"loss": -float(np.mean(advantages)) if advantages else 0.0, "grad_norm": 0.0, "skipped": 0}

    def save(self, path: Path) -> None:
        """Write the number of steps."""
        (path / "adapter").mkdir()
        (path / "adapter" / "adapter_config.json").write_text("{}")
        (path / "adapter" / "steps.txt").write_text(str(len(self.trained)))

    def load(self, path: Path) -> None:
        """Restore the number of steps."""
        self.trained = [[] for _ in range(int((path / "adapter" / "steps.txt").read_text()))]
