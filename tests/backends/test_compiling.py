"""How often layers are compiled: start-up is mostly that. Traced graphs are counted, and no kernels generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.tiny import PlainTokenizer, config_for, learner_for, policy_for
from inference_engine import plain_kernels
from torch import nn

from retrain.config.schema import Inference
from retrain.inference_engine.pytorch import PyTorchEngine, choice
from retrain.inference_engine.pytorch.graphs import GraphDecoder
from retrain.modeling.compiling import compile_layers
from retrain.types import Datum, Sampling

Graphs = list[int]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """The number of nodes of every graph that kernels would be generated for."""
    found: Graphs = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        found.append(len(graph.graph.nodes))
        return graph.forward

    compile_module = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compile_module(self, **({"backend": backend} | options))
    )
    return found


def rows(length: int, count: int) -> list[Datum]:
    ids = np.arange(length) % 7
    return [
        Datum(np.arange(5), ids, np.full(length, -2.0, np.float32), np.ones(length), np.ones(length, bool), 0, number)
        for number in range(count)
    ]


@pytest.mark.slow
def test_prompts_and_tokens_of_any_number_run_through_one_graph_per_layer(
    tiny: Path, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "runs_triton", lambda device: True)
    monkeypatch.setattr(choice, "load_kernels", lambda: plain_kernels)
    engine = PyTorchEngine(policy_for(config_for(tiny)), Inference(), PlainTokenizer(), lambda *_: None)
    assert engine.model is not None
    expected = engine.generate([np.arange(9), np.arange(4)], Sampling(max_tokens=6, n=3, seed=1))
    compile_layers(engine.model.causal_lm)
    assert isinstance(engine.decoder, GraphDecoder)
    engine.decoder.warm_up()
    assert len(graphs) == 1
    sampled = engine.generate([np.arange(9), np.arange(4)], Sampling(max_tokens=6, n=3, seed=1))
    assert len(graphs) == 1
    for group, same in zip(sampled, expected, strict=True):
        assert [c.token_ids_T.tolist() for c in group] == [c.token_ids_T.tolist() for c in same]


@pytest.mark.slow
def test_a_layer_is_compiled_once_for_training_batches_of_any_size(tiny: Path, graphs: Graphs) -> None:
    config = config_for(tiny)
    learner = learner_for(policy_for(config), config)
    compile_layers(learner.policy.causal_lm)
    learner.is_compiled = True
    learner.step(rows(8, 4))
    # Interrupted by attention: the first norm, queries and keys, the output projection, and the rest.
    assert len(graphs) == 4
    learner.step(rows(11, 3))
    assert len(graphs) == 4
