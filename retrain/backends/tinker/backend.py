"""The Tinker backend: a LoRA training client, a sampling client per step, and saved states on the service."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from transformers import AutoConfig, GenerationConfig

from retrain.backends import Backend, Capabilities, FrozenModel
from retrain.backends.tinker.engine import MAX_SEED, FrozenTinkerEngine, TinkerEngine
from retrain.backends.tinker.losses import cancel, completion_logprobs, denominator, step_metrics, to_service
from retrain.backends.tinker.service import Service, in_background
from retrain.backends.tinker.throttle import Throttle
from retrain.builtin import resolve_model
from retrain.checks.agreement import HALF, Agreement, AgreementReport, LogprobGaps, compared
from retrain.checks.unsupported import check_supported
from retrain.config import TrainConfig
from retrain.errors import BackendError, CheckpointError, ConfigError
from retrain.inference_engine import InferenceEngine, Progress
from retrain.losses import TinkerLoss, build_loss
from retrain.modeling.tokens import Tokenizer
from retrain.schedules.learning_rate import learning_rate
from retrain.storage.checkpoint import NOTES
from retrain.types import Datum, FloatArray, StepMetrics

# No limit if neither the service nor the model's configuration has one.
_UNKNOWN_CONTEXT = 1 << 30
# The gradient of excluded rows is subtracted with this loss.
IMPORTANCE_SAMPLING = TinkerLoss("importance_sampling")


def connect_backend(
    config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
) -> Backend:
    """Connect, check that the service has the model, and create the training client unless the run is resumed."""
    check_supported(config)
    backend_loss = build_loss(config.loss, config.plugins.search_paths).on_tinker()
    if config.loss.ratio_cap and backend_loss is not None and not backend_loss.caps_ratios:
        log(
            f"Ignored with Tinker: [loss] ratio_cap = {config.loss.ratio_cap:g}; its {config.loss.type} clips by "
            "clip_low and clip_high alone."
        )
    throttle = Throttle(config.backend.throttle_dir, config.backend.max_concurrent, log)
    log("Connecting to Tinker...")
    service = Service(config.model.base_url, log)
    context = find_context_length(service, config.model.model)
    engine = TinkerEngine(service, throttle, tokenizer, find_stop_ids(config.model.model, tokenizer), progress)
    backend = TinkerBackend(config, service, engine, context, log)
    if not config.resume.from_:
        backend.create()
    return backend


@dataclass(frozen=True)
class _Step:
    """A training step that was submitted to the service."""

    datums: Sequence[Datum]
    checked: Sequence[Datum]
    divisor: float
    staleness: int
    gradient: Any
    checked_output: Any
    """Log-probs of rows that are only checked."""


@dataclass(frozen=True)
class _Applied:
    """The result of a step."""

    metrics: StepMetrics
    sampler: Future[tinker.SamplingClient]


class TinkerBackend:
    """A Backend whose weights, optimizer and sampler are on the service.

    With `[training] async_steps` = 1, `train_step` only submits a step and returns the metrics of the previous one; the
    next step is sampled from the weights before the update. `settle` waits for the last step.
    """

    def __init__(
        self, config: TrainConfig, service: Service, engine: TinkerEngine, context: int, log: Callable[[str], None]
    ) -> None:
        self.config = config
        self.loss = build_loss(config.loss, config.plugins.search_paths)
        self.service = service
        self.engine = engine
        self.throttle = engine.throttle
        self.log = log
        self.lag = config.training.async_steps
        training = config.training
        self.capabilities = Capabilities(
            context_length=context,
            gives_entropies=False,
            reports_late=self.lag > 0,
            checks_rows=True,
            # The service reports log-probs before temperature and truncation.
            sampled_logprobs=(training.temperature, training.top_p, training.top_k) == (1.0, 1.0, 0),
        )
        self.agreement = Agreement(HALF, log)
        self.training: tinker.TrainingClient | None = None
        self.submitted: Future[_Applied] | None = None
        self.next_sampler: Future[tinker.SamplingClient] | None = None
        self.sampled_after = -1
        """Training steps of the engine's weights; -1 before there are any weights."""
        self.reported: StepMetrics = {"loss": 0.0}
        self.lost = False
        """Whether a submitted step failed, so that the state on the service is inconsistent."""
        self.saved: list[str] = []

    def create(self) -> None:
        """Create an adapter on the service."""
        model, rank = self.config.model.model, self.config.model.lora_rank
        self.log(f"Creating LoRA training client (model={model}, rank={rank})...")
        with self.throttle.slot():
            self.training = self.service.call(
                lambda: self.service.client.create_lora_training_client(
                    base_model=model,
                    rank=rank,
                    seed=self.config.training.seed % MAX_SEED,
                    # PEFT's "all-linear" also excludes the output layer.
                    train_unembed=False,
                ),
                "creating the training client",
            )
        self.log("Training client ready.")

    def sampler(self, step: int) -> InferenceEngine:
        """The engine with the weights that `step` is sampled from, at most `async_steps` behind the newest."""
        if self.sampled_after < max(0, step - self.lag):
            with self.throttle.slot():
                if self.submitted is not None:
                    self.reported = self._finish_step()
                self._take_sampler(step)
        return self.engine

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """Submit the gradient and, once its rows agree, the update; wait for it unless `async_steps` is set."""
        with self.throttle.slot():
            # Staleness of the weights that sampled these rows, before newer ones replace them.
            staleness = max(0, step - self.sampled_after)
            if self.submitted is not None:
                self.reported = self._finish_step()
                self._take_sampler(step)
            usable = [datum for datum in datums if datum.mask_T.any()]
            reported = self.reported
            if usable:
                checked = [datum for datum in datums if datum.check_T is not None]
                self.submitted = self._submit(usable, checked, step, staleness)
            else:
                self.reported = {
                    "loss": 0.0,
                    # Of no row; in place of those of the step before, which `train_step` may have returned.
                    **dict.fromkeys(("ratio_mean", "ratio_max", "kl_sample_train")),
                    **{"grad_norm": 0.0, "skipped": 0, "lr": learning_rate(self.config, step)},
                }
                # Without an update, the current sampler is also that of the next step.
                self.sampled_after = step + 1
            if self.submitted is not None and not self.lag:
                self.reported = self._finish_step()
            return (reported if self.lag else self.reported) | {"staleness": staleness}

    def settle(self) -> StepMetrics:
        """Wait for the submitted step and return its metrics."""
        if self.submitted is not None:
            with self.throttle.slot():
                self.reported = self._finish_step()
        return self.reported

    def save(self, path: Path) -> None:
        """Save weights and optimizer state on the service, and write their path."""
        if self.lost:
            raise BackendError("the last training step failed on the service, so there is no consistent state to save.")
        with self.throttle.slot():
            if self.submitted is not None:
                self.reported = self._finish_step()
            # The service rejects a name that exists, and the SDK would retry forever.
            name = f"{path.name.rpartition('.writing_')[2]}-{secrets.token_hex(4)}"
            state_path = self.service.wait(self._client.save_state(name), "saving").path
            notes = {"adapter": state_path, "base_model": self.config.model.model, "rank": self.config.model.lora_rank}
            (path / NOTES).write_text(json.dumps(notes, indent=1), encoding="utf-8")
            self.saved.append(state_path)
            self._forget_old_states()

    def load(self, path: Path) -> None:
        """Restore weights and optimizer from a state of the service."""
        try:
            state_path = str(json.loads((path / NOTES).read_text(encoding="utf-8"))["adapter"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} was not saved by the tinker backend, so it cannot be resumed there."
            ) from error
        model, rank = self.config.model.model, self.config.model.lora_rank
        self.log(f"Creating LoRA training client (model={model}, rank={rank}) from {state_path}...")
        with self.throttle.slot():
            self._check_state(state_path)
            self.training = self.service.call(
                lambda: self.service.client.create_training_client_from_state_with_optimizer(state_path),
                f"loading {state_path}",
            )
        self.log("Training client ready.")
        self.saved = [state_path]
        self.submitted, self.next_sampler, self.sampled_after, self.lost = None, None, -1, False

    def frozen(
        self, config: TrainConfig, tokenizer: Tokenizer, log: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """A base model of the service: that of the policy, or another."""
        name = config.teaching.student_model or config.model.model
        context = find_context_length(self.service, name, "[teaching] student_model")
        engine = FrozenTinkerEngine(self.service, self.throttle, tokenizer, find_stop_ids(name, tokenizer), progress)
        with self.throttle.slot():
            client = self.service.call(
                lambda: self.service.client.create_sampling_client(base_model=name), "preparing the student"
            )
        engine.sync(client)
        log(f"Student: {name}, on the service.")
        return FrozenModel(engine, context)

    def close(self, ended_by: type[BaseException] | None) -> None:
        """End the session. Saved states are kept."""
        if ended_by is None:
            self.service.close("success")
        else:
            self.service.close("errored" if issubclass(ended_by, Exception) else "interrupted")

    @property
    def _tinker_loss(self) -> TinkerLoss:
        loss = self.loss.on_tinker()
        assert loss is not None, "check_supported comes first"
        return loss

    @property
    def _client(self) -> tinker.TrainingClient:
        assert self.training is not None, "create or load comes first"
        return self.training

    def _submit(self, datums: Sequence[Datum], checked: Sequence[Datum], step: int, staleness: int) -> Future[_Applied]:
        """Submit the gradient; a thread compares its rows and then submits the update."""
        loss = self._tinker_loss
        divisor = denominator(self.loss, datums, self.config.training.max_tokens)
        self.lost = True  # until the step has succeeded
        # Before the gradient: the service processes requests in order.
        zeros = [replace(datum, mask_T=compared(datum)) for datum in checked]
        checked_output = self._client.forward(*_request(zeros, 1.0, loss)) if zeros else None
        gradient = self._client.forward_backward(*_request(datums, divisor, loss))
        submitted = _Step(datums, checked, divisor, staleness, gradient, checked_output)
        return in_background(lambda: self._apply(submitted, step))

    def _apply(self, step: _Step, number: int) -> _Applied:
        """Apply a gradient after comparing its log-probs with those of sampling."""
        output = self.service.wait(step.gradient, "training")
        logprobs, reported = completion_logprobs(step.datums, output), output.metrics.get("loss:sum")
        datums, report = step.datums, self._compare(step, logprobs)
        if report is not None and logprobs is not None and report.excluded:
            off = report.excluded_rows
            # Subtract these rows from the gradient on the service.
            loss = self._tinker_loss
            back = [cancel(loss, d, current) for d, current, out in zip(datums, logprobs, off, strict=True) if out]
            self._client.forward_backward(*_request(back, step.divisor, IMPORTANCE_SAMPLING))
            datums = [datum for datum, out in zip(datums, off, strict=True) if not out]
            logprobs = [current for current, out in zip(logprobs, off, strict=True) if not out]
            reported = None
        update = self._client.optim_step(self._adam(number))
        sampler = in_background(self._client.save_weights_and_get_sampling_client)
        update_metrics = self.service.wait(update, "training").metrics or {}
        norm = next(
            (value for key, value in update_metrics.items() if key.rpartition("/")[2].startswith("grad_norm")), None
        )
        metrics = step_metrics(self._tinker_loss, datums, logprobs, reported, step.divisor)
        rows = report.metrics() if report is not None else {}
        own = {"grad_norm": norm, "skipped": 0, "lr": learning_rate(self.config, number)}
        return _Applied({**metrics, **rows, **own}, sampler)

    def _compare(self, step: _Step, logprobs: Sequence[FloatArray] | None) -> AgreementReport | None:
        """Compare the log-probs of training and sampling; raises if too many rows disagree."""
        if logprobs is None:
            return None
        checked = None
        if step.checked_output is not None:
            seen = completion_logprobs(step.checked, self.service.wait(step.checked_output, "training"))
            checked = LogprobGaps.between(step.checked, seen) if seen is not None else None
        report = self.agreement.check(LogprobGaps.between(step.datums, logprobs), checked, step.staleness)
        if report.rejected:
            # The gradient remains on the service, so its state is not that before the step.
            raise report.error(state_intact=False)
        return report

    def _adam(self, step: int) -> types.AdamParams:
        return types.AdamParams(
            learning_rate=learning_rate(self.config, step),
            beta1=self.config.optimizer.beta1,
            beta2=self.config.optimizer.beta2,
            eps=self.config.optimizer.eps,
            weight_decay=self.config.training.weight_decay,
            grad_clip_norm=self.config.loss.grad_clip,
        )

    def _finish_step(self) -> StepMetrics:
        """Wait for the submitted step; its sampler becomes the next one."""
        assert self.submitted is not None
        step, self.submitted = self.submitted, None
        applied: _Applied = self.service.wait(step, "training")
        self.lost = False
        self.next_sampler = applied.sampler
        return applied.metrics

    def _take_sampler(self, after: int) -> None:
        """Sample from the newest weights."""
        waiting = self.next_sampler or in_background(self._client.save_weights_and_get_sampling_client)
        self.engine.sync(self.service.wait(waiting, "preparing the sampler"))
        self.next_sampler, self.sampled_after = None, after

    def _check_state(self, state_path: str) -> None:
        """Raise if a state is of another model or rank."""
        rest = tinker.RestClient(base_url=self.service.url)
        doing = f"looking up {state_path}"
        try:
            info = self.service.call(lambda: rest.get_weights_info_by_tinker_path(state_path).result(), doing)
        except BackendError as error:
            if not isinstance(error.__cause__, tinker.NotFoundError | tinker.BadRequestError | ValueError):
                raise
            raise CheckpointError(f"the state {state_path} no longer exists: {error}") from error
        model, rank = self.config.model.model, self.config.model.lora_rank
        if (info.base_model, info.lora_rank) != (model, rank):
            raise CheckpointError(
                f"{state_path} belongs to another run: it has model {info.base_model!r} and rank {info.lora_rank}, "
                f"this configuration {model!r} and {rank}."
            )

    def _forget_old_states(self) -> None:
        """Delete states beyond `[training] keep`; one more is kept until the new checkpoint is complete."""
        while len(self.saved) > self.config.training.keep + 1:
            old = self.saved.pop(0)
            rest = tinker.RestClient(base_url=self.service.url)
            try:
                self.service.wait(rest.delete_checkpoint_from_tinker_path(old), f"deleting {old}")
            except (BackendError, ConfigError) as error:
                self.log(f"Warning: {old} could not be deleted: {error}")


def _request(datums: Sequence[Datum], divisor: float, loss: TinkerLoss) -> tuple[list[object], str, object]:
    """Rows, the name of the loss and its settings, as the service takes them."""
    return [to_service(datum, divisor, loss) for datum in datums], loss.name, loss.settings


def find_context_length(service: Service, model: str, where: str = "[model] model") -> int:
    """Context length of a model on the service; raises if it has no such model. `where` is the option."""
    offered = service.find_model(model, where)
    if offered is not None and offered.max_context_length:
        return int(offered.max_context_length)
    try:
        return int(AutoConfig.from_pretrained(resolve_model(model)).get_text_config().max_position_embeddings)
    except (OSError, ValueError, AttributeError):
        return _UNKNOWN_CONTEXT


def find_stop_ids(model: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids that end a completion: not every service sets them by itself."""
    ids: list[int] | int | None = None
    # Without a generation configuration, use the end-of-sequence token of the tokenizer.
    with contextlib.suppress(OSError, ValueError):
        ids = GenerationConfig.from_pretrained(resolve_model(model)).eos_token_id
    found = list(ids) if isinstance(ids, list) else [] if ids is None else [ids]
    return found or ([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])
