"""What `retrain init-plugin` writes: for each kind a plug-in that works as it stands, and a test that passes.

Texts are `string.Template`s; `$name` is the module's name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scaffold:
    """One kind of plug-in: what a TOML names, the lines that use it, and the two files."""

    attribute: str
    """Name inside the module that the dotted path ends in."""
    toml: tuple[str, ...]
    """Table and assignments; the first assignment names the plug-in."""
    module: str
    test: str


_ADVANTAGE = Scaffold(
    "advantage",
    ("[algorithm]", 'advantage_mode = "$name.advantage"', "advantage_params = { epsilon = 1e-6 }"),
    '''"""An episode advantage: one number a completion, from the rewards of its group."""

from retrain.types import FloatArray


def advantage(rewards_G: FloatArray, epsilon: float = 1e-6) -> FloatArray:
    """Centre the rewards on the group and divide by their spread. `epsilon` comes from [algorithm.advantage_params]."""
    scaled: FloatArray = (rewards_G - rewards_G.mean()) / (rewards_G.std() + epsilon)
    return scaled
''',
    """import numpy as np
from retrain.advantages import compute_advantages


def test_right_answers_gain_what_wrong_ones_lose() -> None:
    logprobs_G = [np.full(3, -0.5), np.full(2, -0.5)]
    result = compute_advantages([1.0, 0.0], logprobs_G, advantage_mode="$name.advantage", transform_mode="none")
    right, wrong = result.token_advantages
    assert np.allclose(right, 1.0, atol=1e-4)
    assert np.allclose(wrong, -1.0, atol=1e-4)
""",
)

_TRANSFORM = Scaffold(
    "make_transform_spec",
    ("[algorithm]", 'transform_mode = "$name.make_transform_spec"', "transform_params = { boost = 0.5 }"),
    '''"""A token transform: it changes the uncertainty of tokens, by which GTPO then weighs them."""

import numpy as np
from retrain.advantages import TransformSpec
from retrain.types import BoolArray, FloatArray


def make_transform_spec(boost: float = 0.5) -> TransformSpec:
    """Called once, before training. `boost` comes from [algorithm.transform_params]."""

    def raise_planning(entropies: FloatArray, planning_mask: BoolArray, sepa_lambda: float) -> FloatArray:
        """New uncertainties of one completion; same length, finite."""
        return np.where(planning_mask, entropies * (1.0 + boost), entropies)

    return TransformSpec("$name", use_gtpo=True, needs_planning=True, entropy_transform=raise_planning)
''',
    """import numpy as np
from retrain.advantages import compute_advantages


def test_planning_tokens_get_a_larger_share() -> None:
    logprobs_G = [np.full(2, -1.0), np.full(2, -1.0)]
    masks_G = [np.array([True, False]), np.array([False, False])]
    result = compute_advantages([1.0, 0.0], logprobs_G, masks_G, transform_mode="$name.make_transform_spec")
    planning, execution = result.token_advantages[0]
    assert planning > execution > 0
""",
)

_ALGORITHM = Scaffold(
    "assign_credit",
    ("[algorithm]", 'algorithm_mode = "$name.assign_credit"', "transform_params = { strength = 1.0 }"),
    '''"""A whole algorithm: from the rewards of a group straight to one advantage a token."""

import numpy as np
from retrain.advantages import AlgorithmContext
from retrain.types import FloatArray


def assign_credit(context: AlgorithmContext, strength: float = 1.0) -> list[FloatArray]:
    """One array a completion, one number a token. `strength` comes from [algorithm.transform_params]."""
    centred = context.rewards_G - context.rewards_G.mean()
    return [
        np.full(len(logprobs_T), strength * advantage / np.sqrt(max(len(logprobs_T), 1)))
        for advantage, logprobs_T in zip(centred, context.logprobs_G, strict=True)
    ]
''',
    """import numpy as np
from retrain.advantages import compute_advantages


def test_each_token_gets_its_share_of_the_completions_advantage() -> None:
    logprobs_G = [np.full(4, -0.5), np.full(1, -0.5)]
    result = compute_advantages([1.0, 0.0], logprobs_G, algorithm_mode="$name.assign_credit")
    assert np.allclose(result.token_advantages[0], [0.25] * 4)
    assert np.allclose(result.token_advantages[1], [-0.5])
""",
)

_REWARD = Scaffold(
    "score",
    ("[reward]", 'type = "$name.score"'),
    '''"""A reward: how good a response is, given the reference. It runs in a process of its own, with a time limit."""

import re


def score(response: str, reference: str) -> float:
    """1.0 when the last number of the response is the reference. May be `async def`; 1.0 and above counts as right.

    Name a third parameter `prompt` or `meta` to be given what the example carries.
    """
    numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", response)
    return float(bool(numbers) and numbers[-1] == reference.strip())
''',
    """from retrain.plugins import REGISTRIES


def test_the_last_number_counts() -> None:
    score = REGISTRIES["reward"].load("$name.score")
    assert callable(score)
    assert score("It is 3, no, 4.", "4") == 1.0
    assert score("It is 4, no, 3.", "4") == 0.0
    assert score("no idea", "4") == 0.0
""",
)

_DATA = Scaffold(
    "Source",
    ("[data]", 'source = "$name.Source"'),
    '''"""A data source: the problems to train on, or to evaluate on."""

from retrain.config.schema import Data
from retrain.types import Example


class Source:
    """Products of two numbers. Another [data] split gives other problems."""

    def __init__(self, data: Data) -> None:
        """`data` is the [data] table: split, path, id, prompt_field and so on."""
        self.split = data.split

    def load(self) -> list[Example]:
        """Every example, always in the same order."""
        factors = range(2, 12) if self.split == "train" else range(12, 15)
        return [
            Example(f"What is {a} times {b}? Put the answer into \\\\boxed{{}}.", str(a * b), id=f"{a}x{b}")
            for a in factors
            for b in factors
        ]
''',
    """from retrain.config.schema import Data
from retrain.data import load_examples


def test_train_and_test_problems_are_known_and_differ() -> None:
    train = load_examples(Data(source="$name.Source", split="train"))
    test = load_examples(Data(source="$name.Source", split="test"))
    assert train[0].reference == "4"
    assert not {example.id for example in train} & {example.id for example in test}
""",
)

_PLANNING = Scaffold(
    "Detector",
    ("[planning]", 'detector = "$name.Detector"'),
    '''"""A planning detector: which tokens of a completion steer the solution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from retrain.config.schema import Planning
from retrain.types import BoolArray


class Detector:
    """Marks the tokens of every sentence that ends in a question mark."""

    @classmethod
    def from_config(cls, planning: Planning, strategic_grams: str) -> Detector:
        """Built from the [planning] table and [logging] strategic_grams; take from them what you need."""
        return cls()

    def detect(self, token_texts: Sequence[str]) -> BoolArray:
        """One True or False a token."""
        mask = np.zeros(len(token_texts), dtype=bool)
        start = 0
        for index, text in enumerate(token_texts):
            if "?" in text:
                mask[start : index + 1] = True
            if any(sign in text for sign in ".!?"):
                start = index + 1
        return mask
''',
    """from retrain.config.schema import Planning
from retrain.planning import build_detector


def test_questions_are_planning() -> None:
    detector = build_detector(Planning(detector="$name.Detector"))
    mask = detector.detect(["It", " is", " 4", ".", " Is", " it", "?", " Yes"])
    assert mask.tolist() == [False, False, False, False, True, True, True, False]
""",
)

_ENGINE = Scaffold(
    "Engine",
    ("[inference]", 'engine = "$name.Engine"'),
    '''"""An inference engine: token ids in, completions out with the log-prob of every sampled token.

As it stands it draws every token with the same probability. Put your sampler into `_draw`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from retrain.config.schema import Inference
from retrain.inference_engine import Progress
from retrain.types import Completion, FloatArray, IntArray, Sampling


class Engine:
    """Draws completions. Log-probs must be of the distribution that was sampled from."""

    def __init__(self, policy: object, inference: Inference, tokenizer: Any, progress: Progress) -> None:
        """`policy` is what the backend trains; `inference` is the [inference] table."""
        self.tokenizer = tokenizer
        self.progress = progress

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """`sampling.n` completions a prompt, in the order of the prompts; the same seed draws the same ones."""
        rng = np.random.default_rng(sampling.seed)
        answers = []
        for done, prompt_ids in enumerate(prompts, start=1):
            answers.append([self._complete(prompt_ids, sampling, rng) for _ in range(sampling.n)])
            self.progress("sampling", done, len(prompts))
        return answers

    def sync(self, weights: object) -> None:
        """Called before each step with the newest weights; a server would be sent the adapter here."""

    def shutdown(self) -> None:
        """Free what the engine holds."""

    def _complete(self, prompt_ids: IntArray, sampling: Sampling, rng: np.random.Generator) -> Completion:
        token_ids_T, logprobs_T = self._draw(prompt_ids, sampling, rng)
        stopped = bool(len(token_ids_T)) and token_ids_T[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(token_ids_T.tolist())
        return Completion(token_ids_T, logprobs_T, text, "stop" if stopped else "length")

    def _draw(self, prompt_ids: IntArray, sampling: Sampling, rng: np.random.Generator) -> tuple[IntArray, FloatArray]:
        vocabulary = len(self.tokenizer)
        token_ids_T = rng.integers(vocabulary, size=sampling.max_tokens)
        ends = np.flatnonzero(token_ids_T == self.tokenizer.eos_token_id)
        length = int(ends[0]) + 1 if len(ends) else sampling.max_tokens
        return token_ids_T[:length], np.full(length, -np.log(vocabulary))
''',
    '''import numpy as np
from retrain.config.schema import Inference
from retrain.plugins import REGISTRIES
from retrain.types import Sampling


class Letters:
    """A tokenizer of ten letters; the first one ends a text."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 10

    def decode(self, token_ids: list[int]) -> str:
        return "".join("abcdefghij"[token_id] for token_id in token_ids)


def test_every_prompt_gets_its_completions_and_a_seed_repeats_them() -> None:
    make = REGISTRIES["engine"].load("$name.Engine")
    assert callable(make)
    engine = make(None, Inference(), Letters(), lambda phase, done, total: None)
    prompts = [np.array([1, 2]), np.array([3])]
    sampling = Sampling(max_tokens=8, n=3, seed=7)
    first, second = engine.generate(prompts, sampling), engine.generate(prompts, sampling)
    assert [len(group) for group in first] == [3, 3]
    for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert a.text == b.text
        assert len(a.token_ids_T) == len(a.logprobs_T) <= 8
        assert (a.finish_reason == "stop") == (a.token_ids_T[-1] == 0)
''',
)

_BACKEND = Scaffold(
    "build",
    ("[backend]", 'backend = "$name.build"'),
    '''"""A backend: where weights live and learn.

As it stands the policy is one score for each token of the vocabulary, whatever the prompt: too simple to be of use, and
complete. Put your model in its place.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from retrain.backends import Capabilities
from retrain.config import TrainConfig
from retrain.inference_engine import Progress
from retrain.types import Completion, Datum, FloatArray, IntArray, Sampling, StepMetrics


def build(config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress) -> "Backend":
    """Called once, before training. `say` prints a line at start-up."""
    say(f"A policy of {len(tokenizer)} numbers.")
    return Backend(tokenizer, config.training.lr, config.training.max_tokens)


class Backend:
    """Trains, and lends an engine that samples; here one object is both."""

    def __init__(self, tokenizer: Any, lr: float, longest: int) -> None:
        self.tokenizer = tokenizer
        self.lr = lr
        self.scores = np.zeros(len(tokenizer))
        self.capabilities = Capabilities(context_length=2 * longest, gives_entropies=False)

    def sampler(self, step: int) -> "Backend":
        """An engine that holds the weights which this step is sampled from."""
        return self

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """One step up the gradient of sum(advantage * log p); returns at least the loss and the gradient's norm."""
        gradient = np.zeros_like(self.scores)
        loss, tokens = 0.0, max(sum(int(datum.mask_T.sum()) for datum in datums), 1)
        for datum in datums:
            ids, weights = datum.completion_ids_T[datum.mask_T], datum.advantages_T[datum.mask_T]
            np.add.at(gradient, ids, weights)
            gradient -= weights.sum() * np.exp(self._logprobs())
            loss -= float(weights @ self._logprobs()[ids])
        self.scores += self.lr * gradient / tokens
        return {"loss": loss / tokens, "grad_norm": float(np.linalg.norm(gradient / tokens))}

    def save(self, path: Path) -> None:
        """Write everything that a resume needs into the empty folder `path`."""
        np.save(path / "scores.npy", self.scores)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote."""
        self.scores = np.load(path / "scores.npy")

    def generate(self, prompts: Sequence[IntArray], sampling: Sampling) -> list[list[Completion]]:
        """`sampling.n` completions a prompt, in the order of the prompts."""
        rng = np.random.default_rng(sampling.seed)
        return [[self._complete(sampling, rng) for _ in range(sampling.n)] for _ in prompts]

    def sync(self, weights: object) -> None:
        """The weights are shared: nothing to do."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def _logprobs(self) -> FloatArray:
        shifted = self.scores - self.scores.max()
        logprobs: FloatArray = shifted - np.log(np.exp(shifted).sum())
        return logprobs

    def _complete(self, sampling: Sampling, rng: np.random.Generator) -> Completion:
        logprobs = self._logprobs()
        ids = rng.choice(len(logprobs), size=sampling.max_tokens, p=np.exp(logprobs))
        ends = np.flatnonzero(ids == self.tokenizer.eos_token_id)
        ids = ids[: ends[0] + 1] if len(ends) else ids
        return Completion(ids, logprobs[ids], self.tokenizer.decode(ids.tolist()), "stop" if len(ends) else "length")
''',
    '''from pathlib import Path

import numpy as np
from retrain.config import TrainConfig
from retrain.plugins import REGISTRIES
from retrain.types import Datum, Sampling


class Letters:
    """A tokenizer of ten letters; the first one ends a text."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 10

    def decode(self, token_ids: list[int]) -> str:
        return "".join("abcdefghij"[token_id] for token_id in token_ids)


def test_what_was_praised_becomes_likelier_and_survives_a_resume(tmp_path: Path) -> None:
    build = REGISTRIES["backend"].load("$name.build")
    assert callable(build)
    parts = (TrainConfig(), Letters(), lambda line: None, lambda phase, done, total: None)
    backend = build(*parts)
    ids = np.array([3, 3])
    praised = Datum(np.array([1]), ids, np.full(2, -np.log(10)), np.ones(2), np.ones(2, dtype=bool))
    before = backend.train_step([praised], step=0)["loss"]
    assert backend.train_step([praised], step=1)["loss"] < before
    backend.save(tmp_path)
    resumed = build(*parts)
    resumed.load(tmp_path)
    sampling = Sampling(max_tokens=8, n=2, seed=7)
    prompts = [np.array([1])]
    texts = [[one.text for one in each.sampler(2).generate(prompts, sampling)[0]] for each in (backend, resumed)]
    assert texts[0] == texts[1]
''',
)

_ENVIRONMENT = Scaffold(
    "Environment",
    ("[environment]", 'provider = "$name.Environment"', "args = { tries = 3 }"),
    '''"""An environment: a word is to be guessed from its letters in the wrong order, within a few tries."""

from retrain.config.schema import Environment as Section
from retrain.environments import Chat, Outcome, Say
from retrain.types import Example

WORDS = {"train": ("cat", "tree", "water", "bread"), "test": ("dog", "stone")}


class Environment:
    """Made once a run; many rollouts are then played at once, so nothing of one rollout is kept on `self`."""

    def __init__(self, section: Section, say: Say) -> None:
        self.tries = int(section.args.get("tries", 3))

    def examples(self, split: str) -> list[Example]:
        """The problems to train on, and under another name those to evaluate on."""
        words = WORDS.get(split, ())
        return [Example("Unscramble: " + "".join(sorted(word)), reference=word, id=word) for word in words]

    async def rollout(self, example: Example, chat: Chat) -> Outcome:
        """Play one problem once. When no turn is left, `chat.ask` raises ChatOver: a reward of 0."""
        assert isinstance(example.prompt, str)
        message = example.prompt
        for tries in range(1, self.tries + 1):
            reply = await chat.ask(message)
            if example.reference in reply.text.lower().split():
                return Outcome(1.0, {"tries": tries})
            message = "No. It begins with " + example.reference[:tries] + "."
        return Outcome(0.0, {"tries": self.tries})
''',
    """import asyncio

from retrain.config.schema import Environment as Section
from retrain.environments import build_environment, load_split
from retrain.testing import ScriptedChat

SECTION = Section(provider="$name.Environment", args={"tries": 2})


def test_a_second_try_is_given_a_hint() -> None:
    environment = build_environment(SECTION, (), print)
    example = load_split(environment, SECTION, "train")[0]
    chat = ScriptedChat(["act", "it is cat"])
    outcome = asyncio.run(environment.rollout(example, chat))
    assert (outcome.reward, outcome.metrics) == (1.0, {"tries": 2})
    asked = [message["content"] for message in chat.transcript if message["role"] == "user"]
    assert asked == ["Unscramble: act", "No. It begins with c."]


def test_no_try_is_left_in_the_end() -> None:
    environment = build_environment(SECTION, (), print)
    example = load_split(environment, SECTION, "test")[0]
    assert asyncio.run(environment.rollout(example, ScriptedChat(["god", "gdo", "dog"]))).reward == 0.0
""",
)

SCAFFOLDS: dict[str, Scaffold] = {
    "advantage": _ADVANTAGE,
    "transform": _TRANSFORM,
    "algorithm": _ALGORITHM,
    "reward": _REWARD,
    "data": _DATA,
    "environment": _ENVIRONMENT,
    "planning": _PLANNING,
    "engine": _ENGINE,
    "backend": _BACKEND,
}
