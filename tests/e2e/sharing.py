"""A step whose sampling and training share one device, in turn or overlapped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from retrain.backends.local import LocalBackend
from retrain.inference_engine.pytorch import StreamingPyTorchEngine, build
from retrain.types import Completion, Datum, Sampling, StepMetrics

from .tiny import PlainTokenizer, config_for, datums_of, learner_for, policy_for, random_prompts


@dataclass
class Outcome:
    """What came of the steps."""

    tokens: list[list[int]]
    metrics: list[StepMetrics]
    gradients: list[Tensor]
    """Those of the first step."""
    adapter: dict[str, Tensor]
    early: int
    """Parts that were computed while the sampler was busy."""


def take_steps(
    model: Path, is_overlapped: bool, sampling: Sampling, prompts: int = 8, steps: int = 2, **options: Any
) -> Outcome:
    """Sample and train; the advantages are random, but the same for the same tokens.

    One in `stop_every` tokens ends a completion, so that prompts are done at different times.
    """
    device, stop_every = options.pop("device", "cpu"), options.pop("stop_every")
    config = config_for(model, **options)
    policy = policy_for(config, device=device)
    policy.stop_ids = tuple(range(0, policy.vocabulary, stop_every))
    engine = build(policy, config.inference, PlainTokenizer(), lambda *_: None)
    assert isinstance(engine, StreamingPyTorchEngine)
    learner = learner_for(policy, config)
    backend = LocalBackend(learner, engine)
    out = Outcome([], [], [], {}, 0)
    update, compute = learner.optimizer.step, learner.compute_part

    def watch_update(lr: float) -> float | None:
        out.gradients = out.gradients or [m.grad.clone() for m in learner.optimizer.masters if m.grad is not None]
        return update(lr)

    def watch_part(datums: Any) -> Any:
        out.early += engine.decoder.is_busy  # type: ignore[attr-defined]
        return compute(datums)

    learner.optimizer.step = watch_update  # type: ignore[method-assign]
    learner.compute_part = watch_part  # type: ignore[method-assign]
    questions = random_prompts([3 + at for at in range(prompts)])
    for step in range(steps):
        rows: dict[int, list[Datum]] = {}

        def deliver(at: int, completions: list[Completion], rows: dict[int, list[Datum]] = rows) -> None:
            rows[at] = datums_of([questions[at]], [completions], seed=at)
            if is_overlapped:
                backend.accumulate(at, rows[at])

        backend.sampler(step)
        groups = engine.generate_each(questions, replace(sampling, seed=step), deliver)
        out.tokens += [completion.token_ids_T.tolist() for group in groups for completion in group]
        out.metrics.append(backend.train_step([row for at in sorted(rows) for row in rows[at]], step))
    out.adapter = {name: tensor.clone() for name, tensor in policy.adapter_state().items()}
    backend.close(None)
    return out
