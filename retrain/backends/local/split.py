"""Split mode: one device, or a server, samples step n while another trains on step n - 1.

The sampler is always exactly one step behind, independent of timing, so runs are reproducible; the importance ratio
accounts for the lag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from retrain.backends import Capabilities, FrozenModel
from retrain.backends.local.frozen import build_frozen
from retrain.backends.local.learner import Learner
from retrain.backends.local.sizes import load_sizes, save_sizes
from retrain.config import TrainConfig
from retrain.inference_engine import InferenceEngine, Progress, Remote
from retrain.modeling.policy import Policy
from retrain.modeling.tokens import Tokenizer
from retrain.types import Datum, StepMetrics


class SplitBackend:
    """Trains on a background thread and copies the adapter to the sampler between steps.

    `kernels` are the settings for both threads, undone at the end.
    """

    def __init__(
        self, learner: Learner, mirror: Policy, engine: InferenceEngine, kernels: ExitStack | None = None
    ) -> None:
        self.learner = learner
        self.mirror = mirror
        self.engine = engine
        self.kernels = kernels or ExitStack()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retrain-train")
        self.pending: Future[StepMetrics] | None = None
        self.reported: StepMetrics = {"loss": 0.0}
        self.has_compiled = False
        self.capabilities = Capabilities(
            context_length=learner.policy.context_length,
            gives_entropies=True,
            reports_late=True,
            checks_rows=learner.agreement is not None,
        )
        self._mirror(0)

    def sampler(self, step: int) -> InferenceEngine:
        """The engine on the other device, one training step behind: step n is sampled after n - 1 steps."""
        if self.mirrored < step - 1:
            self._wait()
            self._mirror(step - 1)
        return self.engine

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """Wait for the previous step, hand its weights to the sampler, start this step. Reports the previous step."""
        self._wait()
        staleness = self.staleness
        self._mirror(step)
        metrics = self.reported | {"staleness": staleness} | engine_metrics(self.engine)
        self.pending = self.thread.submit(self.learner.step, datums, step, staleness)
        if self.learner.is_compiled and not self.has_compiled:
            # The first step compiles the layers, and compiled layers of a sampler fail while another thread does that.
            self.has_compiled = True
            self.pending.exception()
        return metrics

    def settle(self) -> StepMetrics:
        """Wait for the running step; returns its metrics."""
        self._wait()
        return self.reported

    def save(self, path: Path) -> None:
        """Wait for the running step, then write its result and the sampler's older weights."""
        self._wait()
        self.learner.save(path)
        save_sizes(path, self.learner, self.engine)
        metadata = {
            "updates": str(self.mirrored),
            "staleness": str(self.staleness),
            "reported": json.dumps(self.reported),
        }
        state = {name: tensor.cpu().contiguous() for name, tensor in self.mirror.adapter_state().items()}
        save_file(state, str(path / "sampler.safetensors"), metadata=metadata)

    def load(self, path: Path) -> None:
        """Restore both sets of weights."""
        self._wait()
        self.learner.load(path)
        load_sizes(path, self.learner, self.engine)
        with safe_open(str(path / "sampler.safetensors"), framework="pt") as held:
            self.mirror.load_adapter_state({name: held.get_tensor(name) for name in held.keys()})  # noqa: SIM118
            metadata = held.metadata()
        self.mirrored, self.reported = int(metadata["updates"]), json.loads(metadata["reported"])
        # Checkpoints without it are of steps that each count as an update.
        self.mirrored_updates = self.learner.updates - int(metadata.get("staleness", 1))
        self.engine.sync(self.mirror)

    def frozen(
        self, config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """The student, on the sampler's device: the trainer never waits for it."""
        return build_frozen(self.mirror, config, tokenizer, log, progress)

    def close(self, ended_by: type[BaseException] | None) -> None:
        """Wait for the running step, ignoring its result, and shut the engine down."""
        self.thread.shutdown(wait=True)
        self.engine.shutdown()
        self.kernels.close()

    @property
    def staleness(self) -> int:
        """Updates of the learner that the sampler's weights lack."""
        return self.learner.updates - self.mirrored_updates

    def _mirror(self, steps: int) -> None:
        self.mirror.load_adapter_state(self.learner.policy.adapter_state())
        # Not every step is an update: one without data leaves the weights as they are.
        self.mirrored, self.mirrored_updates = steps, self.learner.updates
        self.engine.sync(self.mirror)

    def _wait(self) -> None:
        if self.pending is not None:
            self.reported, self.pending = self.pending.result(), None


def engine_metrics(engine: InferenceEngine) -> StepMetrics:
    """Metrics that a remote engine reports for the step."""
    return engine.metrics() if isinstance(engine, Remote) else {}
