"""The remote side of a run: one LoRA training client, a sampling client for each step, and the states it keeps."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from transformers import AutoConfig, GenerationConfig

from retrain.backends import Backend, Capabilities, FrozenModel
from retrain.backends.tinker.engine import MAX_SEED, FrozenTinkerEngine, TinkerEngine
from retrain.backends.tinker.limits import describe_uncapped, refuse_unsupported
from retrain.backends.tinker.losses import denominator, step_metrics, to_service
from retrain.backends.tinker.service import Service, in_background
from retrain.backends.tinker.service_loss import service_loss
from retrain.backends.tinker.throttle import Throttle
from retrain.builtin import resolve_model
from retrain.checkpoint import NOTES
from retrain.config import TrainConfig
from retrain.errors import BackendError, CheckpointError, ConfigError
from retrain.inference_engine import InferenceEngine, Progress
from retrain.schedule import learning_rate
from retrain.types import Datum, StepMetrics

# Where neither the service nor the model's configuration tells, nothing is refused for its length.
_UNKNOWN_CONTEXT = 1 << 30


def connect_backend(config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress) -> Backend:
    """Connect, check that the service has the model, and make the training client, unless a resume will."""
    refuse_unsupported(config)
    uncapped = describe_uncapped(config)
    if uncapped:
        say(uncapped)
    throttle = Throttle(config.backend.throttle_dir, config.backend.max_concurrent, say)
    say("Connecting to Tinker...")
    service = Service(config.model.base_url, say)
    context = find_context_length(service, config.model.model)
    engine = TinkerEngine(service, throttle, tokenizer, find_stop_ids(config.model.model, tokenizer), progress)
    backend = TinkerBackend(config, service, engine, context, say)
    if not config.resume.from_:
        backend.create()
    return backend


@dataclass(frozen=True)
class _Step:
    """A training step under way on the service."""

    number: int
    datums: Sequence[Datum]
    divisor: float
    gradient: Any
    update: Any
    sampler: Future[tinker.SamplingClient]


class TinkerBackend:
    """A Backend whose weights, optimiser and sampler are the service's.

    With `[training] async_steps` = 1, a step is only submitted: the next one is sampled from the weights before it,
    and what `train_step` reports is of the step before, until `settle` is asked.
    """

    def __init__(
        self, config: TrainConfig, service: Service, engine: TinkerEngine, context: int, say: Callable[[str], None]
    ) -> None:
        self.config = config
        self.service = service
        self.engine = engine
        self.throttle = engine.throttle
        self.say = say
        self.lag = config.training.async_steps
        self.capabilities = Capabilities(context_length=context, gives_entropies=False, reports_late=self.lag > 0)
        self.training: tinker.TrainingClient | None = None
        self.under_way: _Step | None = None
        self.next_sampler: Future[tinker.SamplingClient] | None = None
        self.sampled_after = -1
        """Training steps that the engine's weights have behind them; -1 before there are any weights."""
        self.reported: StepMetrics = {"loss": 0.0}
        self.lost = False
        """Whether a submitted step failed: what the service holds is then no step's result."""
        self.saved: list[str] = []

    def create(self) -> None:
        """A fresh adapter on the service."""
        model, rank = self.config.model.model, self.config.model.lora_rank
        self.say(f"Creating LoRA training client (model={model}, rank={rank})...")
        with self.throttle.slot():
            self.training = self.service.call(
                lambda: self.service.client.create_lora_training_client(
                    base_model=model,
                    rank=rank,
                    seed=self.config.training.seed % MAX_SEED,
                    # PEFT's "all-linear" leaves the output layer out as well.
                    train_unembed=False,
                ),
                "creating the training client",
            )
        self.say("Training client ready.")

    def sampler(self, step: int) -> InferenceEngine:
        """The engine with the weights that `step` is sampled from, `async_steps` behind the newest."""
        if self.sampled_after < max(0, step - self.lag):
            with self.throttle.slot():
                if self.under_way is not None:
                    self.reported = self._finish_step()
                self._take_sampler(step)
        return self.engine

    def train_step(self, datums: Sequence[Datum], step: int) -> StepMetrics:
        """Submit gradient, update and the next sampler's weights together, then wait for the first two."""
        with self.throttle.slot():
            if self.under_way is not None:
                self.reported = self._finish_step()
                self._take_sampler(step)
            usable = [datum for datum in datums if datum.mask_T.any()]
            reported = self.reported
            if usable:
                self.under_way = self._submit(usable, step)
            else:
                self.reported = {"loss": 0.0, "grad_norm": 0.0, "skipped": 0}
                # Nothing moves, so what is sampled from now is what comes after this step too.
                self.sampled_after = step + 1
            if self.lag:
                return reported
            if self.under_way is not None:
                self.reported = self._finish_step()
            return self.reported

    def settle(self) -> StepMetrics:
        """Wait for the step that was submitted and tell of it."""
        if self.under_way is not None:
            with self.throttle.slot():
                self.reported = self._finish_step()
        return self.reported

    def save(self, path: Path) -> None:
        """Have the service keep weights and optimiser, and note where."""
        if self.lost:
            raise BackendError("the last training step failed on the service, so there is nothing whole to save.")
        with self.throttle.slot():
            if self.under_way is not None:
                self.reported = self._finish_step()
            # A name that exists already is refused by the service, and the SDK would try it again for ever.
            name = f"{path.name.rpartition('.writing_')[2]}-{secrets.token_hex(4)}"
            kept = self.service.wait(self._client.save_state(name), "saving").path
            notes = {"adapter": kept, "base_model": self.config.model.model, "rank": self.config.model.lora_rank}
            (path / NOTES).write_text(json.dumps(notes, indent=1), encoding="utf-8")
            self.saved.append(kept)
            self._forget_old_states()

    def load(self, path: Path) -> None:
        """Go on from a state of the service, with its optimiser."""
        try:
            kept = str(json.loads((path / NOTES).read_text(encoding="utf-8"))["adapter"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} was not saved by the tinker backend, so it cannot go on there.") from error
        model, rank = self.config.model.model, self.config.model.lora_rank
        self.say(f"Creating LoRA training client (model={model}, rank={rank}) from {kept}...")
        with self.throttle.slot():
            self._check_state(kept)
            self.training = self.service.call(
                lambda: self.service.client.create_training_client_from_state_with_optimizer(kept), f"loading {kept}"
            )
        self.say("Training client ready.")
        self.saved = [kept]
        self.under_way, self.next_sampler, self.sampled_after, self.lost = None, None, -1, False

    def frozen(
        self, config: TrainConfig, tokenizer: Any, say: Callable[[str], None], progress: Progress
    ) -> FrozenModel:
        """A base model of the service: that of the policy, or another one that it offers."""
        name = config.teaching.student_model or config.model.model
        context = find_context_length(self.service, name, "[teaching] student_model")
        engine = FrozenTinkerEngine(self.service, self.throttle, tokenizer, find_stop_ids(name, tokenizer), progress)
        with self.throttle.slot():
            client = self.service.call(
                lambda: self.service.client.create_sampling_client(base_model=name), "preparing the student"
            )
        engine.sync(client)
        say(f"Student: {name}, as the service has it.")
        return FrozenModel(engine, context)

    def close(self, ended_by: type[BaseException] | None) -> None:
        """End the session, so that the service need not wait for its heartbeats to stop. What was saved stays."""
        if ended_by is None:
            self.service.close("success")
        else:
            self.service.close("errored" if issubclass(ended_by, Exception) else "interrupted")

    @property
    def _client(self) -> tinker.TrainingClient:
        assert self.training is not None, "create or load comes first"
        return self.training

    def _submit(self, datums: Sequence[Datum], step: int) -> _Step:
        """Three requests in one go: the service takes them in the order they were made."""
        loss, wanted = self.config.loss, service_loss(self.config.loss)
        divisor = denominator(loss, datums, self.config.training.max_tokens)
        rows = [to_service(datum, divisor, wanted) for datum in datums]
        settings = dict(wanted.settings) if wanted.settings is not None else None
        self.lost = True  # until the service says that all went well
        gradient = self._client.forward_backward(rows, wanted.name, settings)
        update = self._client.optim_step(
            types.AdamParams(
                learning_rate=learning_rate(self.config, step),
                beta1=self.config.optimizer.beta1,
                beta2=self.config.optimizer.beta2,
                eps=self.config.optimizer.eps,
                weight_decay=self.config.training.weight_decay,
                grad_clip_norm=loss.grad_clip,
            )
        )
        sampler = in_background(self._client.save_weights_and_get_sampling_client)
        return _Step(step, datums, divisor, gradient, update, sampler)

    def _finish_step(self) -> StepMetrics:
        """Wait for the step under way; its sampler becomes the next one."""
        assert self.under_way is not None
        step, self.under_way = self.under_way, None
        output = self.service.wait(step.gradient, "training")
        told = self.service.wait(step.update, "training").metrics or {}
        self.lost = False
        self.next_sampler = step.sampler
        norm = next((value for key, value in told.items() if key.rpartition("/")[2].startswith("grad_norm")), None)
        return {**step_metrics(self.config.loss, step.datums, output, step.divisor), "grad_norm": norm, "skipped": 0}

    def _take_sampler(self, after: int) -> None:
        """Sample from the newest weights from now on."""
        waiting = self.next_sampler or in_background(self._client.save_weights_and_get_sampling_client)
        self.engine.sync(self.service.wait(waiting, "preparing the sampler"))
        self.next_sampler, self.sampled_after = None, after

    def _check_state(self, kept: str) -> None:
        """Refuse the state of another model or rank before anything is made from it."""
        rest = tinker.RestClient(base_url=self.service.url)
        doing = f"looking up {kept}"
        try:
            told = self.service.call(lambda: rest.get_weights_info_by_tinker_path(kept).result(), doing)
        except BackendError as error:
            if not isinstance(error.__cause__, tinker.NotFoundError | tinker.BadRequestError | ValueError):
                raise
            raise CheckpointError(f"the state {kept} is not there any more: {error}") from error
        model, rank = self.config.model.model, self.config.model.lora_rank
        if (told.base_model, told.lora_rank) != (model, rank):
            raise CheckpointError(
                f"{kept} belongs to another run: it has model {told.base_model!r} and rank {told.lora_rank}, "
                f"this configuration {model!r} and {rank}."
            )

    def _forget_old_states(self) -> None:
        """Delete what this run saved beyond `[training] keep`; one more than that stays until the new one is sealed."""
        while len(self.saved) > self.config.training.keep + 1:
            old = self.saved.pop(0)
            rest = tinker.RestClient(base_url=self.service.url)
            try:
                self.service.wait(rest.delete_checkpoint_from_tinker_path(old), f"deleting {old}")
            except (BackendError, ConfigError) as error:
                self.say(f"Warning: {old} could not be deleted: {error}")


def find_context_length(service: Service, model: str, where: str = "[model] model") -> int:
    """Most tokens the service takes for this model. Refuses a model that it does not have; `where` names it."""
    offered = service.call(service.client.get_server_capabilities, "asking what it offers").supported_models
    names = [one.model_name for one in offered if one.model_name]
    if names and model not in names:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(f"{where} = {model!r} is not offered by {service.url}. It has: {shown}.")
    told = next((one.max_context_length for one in offered if one.model_name == model), None)
    if told:
        return int(told)
    try:
        return int(AutoConfig.from_pretrained(resolve_model(model)).get_text_config().max_position_embeddings)
    except (OSError, ValueError, AttributeError):
        return _UNKNOWN_CONTEXT


def find_stop_ids(model: str, tokenizer: Any) -> list[int]:
    """The tokens that end an answer: not every service knows them by itself."""
    ids: list[int] | int | None = None
    # A model without a generation configuration leaves it to the tokenizer, which knows one of them.
    with contextlib.suppress(OSError, ValueError):
        ids = GenerationConfig.from_pretrained(resolve_model(model)).eos_token_id
    found = list(ids) if isinstance(ids, list) else [] if ids is None else [ids]
    return found or ([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])
