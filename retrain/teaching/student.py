"""The frozen student: its answers alone and to the probe, which are remembered, and its answers with teaching."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from retrain.inference_engine import InferenceEngine
from retrain.rollout import check_completions
from retrain.seeding import derive_seed
from retrain.teaching.templates import Reader, Templates, ask
from retrain.types import Example, Sampling, Score

# An endless source asks new questions for ever; those of long ago are forgotten.
REMEMBERED = 100_000


@dataclass
class Alone:
    """What the student makes of a question before it is taught."""

    answer: str
    probe: str
    score: Score | None = None
    """None until the answer was scored; an error is tried again."""


class Student:
    """Answers questions. A draw depends on the seed and the prompt alone, so a question forgotten changes nothing."""

    def __init__(
        self, engine: InferenceEngine, reader: Reader, templates: Templates, max_probe_tokens: int, seed: int
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.templates = templates
        self.max_probe_tokens = max_probe_tokens
        self.seed = derive_seed(seed, "student")
        self.known: dict[Hashable, Alone] = {}

    def meet(self, examples: Sequence[Example], sampling: Sampling) -> list[Alone]:
        """What the student makes of each question; drawn once for each way of sampling."""
        keys = [_key(example, sampling) for example in examples]
        new = {key: example for key, example in zip(keys, examples, strict=True) if key not in self.known}
        if new:
            own = replace(sampling, n=1, seed=self.seed)
            answers = self._draw([ask(self.templates.baseline, example) for example in new.values()], own)
            own = replace(own, max_tokens=self.max_probe_tokens)
            probes = self._draw([ask(self.templates.diagnostic, example) for example in new.values()], own)
            self.known |= {key: Alone(answer, probe) for key, answer, probe in zip(new, answers, probes, strict=True)}
        met = [self.known[key] for key in keys]
        for oldest in list(self.known)[: max(0, len(self.known) - REMEMBERED)]:
            del self.known[oldest]
        return met

    def answer(self, lessons: Iterable[tuple[Example, str]], sampling: Sampling) -> list[str]:
        """One answer to each question with its teaching."""
        asked = [ask(self.templates.with_teaching, example, teaching=teaching) for example, teaching in lessons]
        return self._draw(asked, replace(sampling, n=1, seed=derive_seed(sampling.seed, "student")))

    def _draw(self, asked: Sequence[Example], sampling: Sampling) -> list[str]:
        prompts = [self.reader.read(example, sampling.max_tokens) for example in asked]
        completions = self.engine.generate(prompts, sampling)
        check_completions(self.engine, completions, len(prompts), 1)
        return [one.text for (one,) in completions]


def _key(example: Example, sampling: Sampling) -> Hashable:
    """All that an answer alone and its score depend on."""
    return repr(example.prompt), example.reference, repr(example.meta), replace(sampling, n=1, seed=0)
