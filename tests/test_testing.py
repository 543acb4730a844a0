"""The stand-ins that plugin authors test with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrain.testing import FakeBackend, ScriptedEngine
from retrain.types import Datum, Sampling

PROMPTS = [np.arange(3), np.arange(5)]


def test_a_scripted_engine_answers_as_scripted() -> None:
    engine = ScriptedEngine(lambda prompt, index, rng: f"{len(prompt)}:{index}")
    groups = engine.generate(PROMPTS, Sampling(max_tokens=2, n=3))
    assert [[c.text for c in group] for group in groups] == [["3:", "3:", "3:"], ["5:", "5:", "5:"]]
    for group in groups:
        for completion in group:
            assert completion.finish_reason == "length"
            assert "".join(map(chr, completion.token_ids_T)) == completion.text
            assert len(completion.logprobs_T) == 2
            assert completion.entropies_T is not None


def test_the_same_seed_gives_the_script_the_same_generator() -> None:
    engine = ScriptedEngine(lambda prompt, index, rng: str(rng.integers(10**9)))

    def texts(seed: int) -> list[str]:
        return [c.text for group in engine.generate(PROMPTS, Sampling(max_tokens=99, n=2, seed=seed)) for c in group]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(set(texts(1))) == 4


def test_a_fake_backend_remembers_what_it_was_given(tmp_path: Path) -> None:
    backend = FakeBackend(ScriptedEngine(lambda *_: "x"))
    datum = Datum(np.arange(2), np.arange(3), np.zeros(3), np.array([1.0, 2.0, 9.0]), np.array([True, True, False]))
    assert backend.train_step([datum], 0) == {"loss": -1.5, "grad_norm": 0.0, "skipped": 0}
    assert backend.train_step([], 1)["loss"] == 0.0
    assert backend.trained == [[datum], []]
    backend.save(tmp_path)
    other = FakeBackend(ScriptedEngine(lambda *_: "x"))
    other.load(tmp_path)
    assert len(other.trained) == 2
