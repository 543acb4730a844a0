"""Split mode: one device, or a server, samples step n while another still trains on step n - 1.

The sampler is always exactly one step behind, never by luck of timing, so a run is as repeatable as on one device; the
importance ratio accounts for the lag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from retrain.backends import Capabilities, FrozenModel
from retrain.backends.local.frozen import lend_frozen
from retrain.backends.local.learner import Learner
from retrain.backends.local.sizes import load_sizes, save_sizes
from retrain.config import TrainConfig
from retrain.inference_engine import InferenceEngine, Progress, Remote
from retrain.modeling.policy import Policy
from retrain.types import Datum, StepMetrics


class SplitBackend:
    """Trains on a background thread and copies the adapter over between steps."""

    def __init__(self, learner: Learner, mirror: Policy, engine: InferenceEngine) -> None:
        self.learner = learner
        self.mirror = mirror
        self.engine = engine
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrain-train")
        self.pending: Future[StepMetrics] | None = None
        self.reported: StepMetrics = {"loss": 0.0}
        self.capabilities = Capabilities(
            context_length=learner.policy.context_length,
            gives_entropies=True,
            reports_late=True,
            checks_rows=learner.agreement is not None,
        )
        self.sampled = 0
        self._mirror(0)

    def sampler(self, step: int) -> InferenceEngine:
        """The engine on the other device, one training step behind: step n is sampled after n - 1 updates."""
        if self.mirrored < step - 1:
            self._wait()
            self._mirror(step - 1)
        self.sampled = self.mirrored
        return self.engine

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """Wait for the step before, hand its weights to the sampler, and start this one. Reports the step before."""
        self._wait()
        self._mirror(step)
        staleness = step - self.sampled
        told = self.reported | {"staleness": staleness} | watched(self.engine)
        self.pending = self.thread.submit(self.learner.step, datums, step, staleness)
        return told

    def settle(self) -> StepMetrics:
        """Wait for the step under way and tell of it."""
        self._wait()
        return self.reported

    def save(self, path: Path) -> None:
        """Finish the step under way, then write it and the sampler's older weights."""
        self._wait()
        self.learner.save(path)
        save_sizes(path, self.learner, self.engine)
        told = {"updates": str(self.mirrored), "reported": json.dumps(self.reported)}
        state = {name: tensor.cpu().contiguous() for name, tensor in self.mirror.adapter_state().items()}
        save_file(state, str(path / "sampler.safetensors"), metadata=told)

    def load(self, path: Path) -> None:
        """Restore both sets of weights."""
        self._wait()
        self.learner.load(path)
        load_sizes(path, self.learner, self.engine)
        with safe_open(str(path / "sampler.safetensors"), framework="pt") as held:
            self.mirror.load_adapter_state({name: held.get_tensor(name) for name in held.keys()})  # noqa: SIM118
            told = held.metadata()
        self.mirrored, self.reported = int(told["updates"]), json.loads(told["reported"])
        self.engine.sync(self.mirror)

    def frozen(
        self, config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """A student beside the sampler, on its device: the trainer never waits for it."""
        return lend_frozen(self.mirror, config, tokenizer, say, progress)

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Finish the step under way, whatever comes of it, and let the engine free what it holds."""
        self.thread.shutdown(wait=True)
        self.engine.shutdown()

    def _mirror(self, updates: int) -> None:
        self.mirror.load_adapter_state(self.learner.policy.adapter_state())
        self.mirrored = updates
        self.engine.sync(self.mirror)

    def _wait(self) -> None:
        if self.pending is not None:
            self.reported, self.pending = self.pending.result(), None


def watched(engine: InferenceEngine) -> StepMetrics:
    """What an engine outside this process has to tell about the step."""
    return engine.metrics() if isinstance(engine, Remote) else {}
