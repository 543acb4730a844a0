"""The frozen student: its cached baseline and probe answers, and its answers with teaching."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from retrain.inference_engine import InferenceEngine
from retrain.rollout import check_completions
from retrain.seeding import derive_seed
from retrain.teaching.templates import Reader, Templates, ask
from retrain.types import Example, Sampling, Score

# Limit of the cache, for unlimited data sources.
MAX_CACHED = 100_000


@dataclass
class Baseline:
    """The student's answers to a question without teaching."""

    answer: str
    probe: str
    score: Score | None = None
    """None until the answer was scored; errors are scored again."""


class Student:
    """Answers questions. Samples depend only on seed and prompt, so a cache miss changes nothing."""

    def __init__(
        self, engine: InferenceEngine, reader: Reader, templates: Templates, max_probe_tokens: int, seed: int
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.templates = templates
        self.max_probe_tokens = max_probe_tokens
        self.seed = derive_seed(seed, "student")
        self.cache: dict[Hashable, Baseline] = {}

    def baseline(self, examples: Sequence[Example], sampling: Sampling) -> list[Baseline]:
        """The baseline of each question, sampled once per sampling configuration."""
        keys = [_key(example, sampling) for example in examples]
        new = {key: example for key, example in zip(keys, examples, strict=True) if key not in self.cache}
        if new:
            single = replace(sampling, n=1, seed=self.seed)
            answers = self._sample([ask(self.templates.baseline, example) for example in new.values()], single)
            single = replace(single, max_tokens=self.max_probe_tokens)
            probes = self._sample([ask(self.templates.diagnostic, example) for example in new.values()], single)
            self.cache |= {
                key: Baseline(answer, probe) for key, answer, probe in zip(new, answers, probes, strict=True)
            }
        baselines = [self.cache[key] for key in keys]
        for oldest in list(self.cache)[: max(0, len(self.cache) - MAX_CACHED)]:
            del self.cache[oldest]
        return baselines

    def answer(self, lessons: Iterable[tuple[Example, str]], sampling: Sampling) -> list[str]:
        """One answer per question and teaching."""
        asked = [ask(self.templates.with_teaching, example, teaching=teaching) for example, teaching in lessons]
        return self._sample(asked, replace(sampling, n=1, seed=derive_seed(sampling.seed, "student")))

    def _sample(self, asked: Sequence[Example], sampling: Sampling) -> list[str]:
        prompts = [self.reader.read(example, sampling.max_tokens) for example in asked]
        completions = self.engine.generate(prompts, sampling)
        check_completions(self.engine, completions, len(prompts), 1)
        return [one.text for (one,) in completions]


def _key(example: Example, sampling: Sampling) -> Hashable:
    """Everything that a baseline and its score depend on."""
    return repr(example.prompt), example.reference, repr(example.meta), replace(sampling, n=1, seed=0)
