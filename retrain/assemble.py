"""TrainConfig -> Parts: builds all components of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

from retrain.advantages import CreditAssigner
from retrain.advantages.sepa import SEPAController, why_off
from retrain.backends import Backend, Closeable
from retrain.checks.code_digest import code_digests
from retrain.checks.preflight import check_before_loading, known_context
from retrain.checks.processes import check_devices
from retrain.checks.unsupported import check_supported
from retrain.checks.vocabulary import check_prompt_tokens
from retrain.config import TrainConfig
from retrain.config.schema import AS_IN_TRAINING
from retrain.data import (
    Endless,
    ExampleOrder,
    build_source,
    count_examples,
    count_steps,
    describe_shared,
    load_examples,
    load_held_out,
)
from retrain.environments.tasks import EnvironmentTasks
from retrain.errors import ConfigError, PluginError
from retrain.evaluate import Evaluator
from retrain.inference_engine import Progress
from retrain.losses import build_loss
from retrain.modeling.digest import digest_models
from retrain.modeling.sampling import training_distribution
from retrain.modeling.tokens import PromptEncoder, Tokenizer, load_tokenizer, vocabulary_texts
from retrain.overlap import StepOverlap, choose_overlap
from retrain.planning import PlanningDetector, build_detector
from retrain.planning.masks import PlanningMasks
from retrain.plugins import REGISTRIES
from retrain.rewards import BatchReward, build_reward
from retrain.rollout import ChunkedScorer, GroupCollector, RolloutScorer, RolloutSource, Scorer
from retrain.runtime.control import NoControl, RunControl, raise_if_stopped
from retrain.runtime.devices import is_on_cpu
from retrain.runtime.text import plural
from retrain.schedules.backpressure import BackPressure, NoBackPressure, USLBackPressure
from retrain.schedules.learning_rate import find_long_warmup, learning_rate
from retrain.seeding import derive_seed
from retrain.storage.checkpoint import Checkpoint, Checkpoints
from retrain.storage.folder import RunFolder
from retrain.storage.inputs import RunInputs
from retrain.teaching import build_teaching_scorer, check_context, check_known_context, limits_of
from retrain.tracking import ThrottledTracker, Tracker, Trackers
from retrain.tracking.background import BackgroundTracker
from retrain.tracking.console import Console
from retrain.tracking.jsonl import JsonlTracker
from retrain.tracking.steplog import StepLog
from retrain.types import Example, Sampling

MakeBackend = Callable[[TrainConfig, Tokenizer, Callable[[str], None], Progress], Backend]
"""Builds a backend from configuration, tokenizer, log function and progress."""

MAX_REPEATS = 1000
"""Maximum number of times that a step may use one example."""


class TaskSource(Protocol):
    """Provides a run's examples and scores the completions."""

    def load(self, tokenizer: Tokenizer) -> tuple[Sequence[Example], Sequence[Example]]:
        """The examples for training and for evaluation."""

    def scorer(self, backend: Backend) -> RolloutScorer:
        """The scorer, once the context length is known."""

    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True)
class Overrides:
    """Components that a caller brings in place of those that a configuration names."""

    backend: MakeBackend | None = None
    control: RunControl = field(default_factory=NoControl)


@dataclass
class Parts:
    """The components of a run."""

    config: TrainConfig
    folder: RunFolder
    backend: Backend
    rollouts: RolloutSource
    order: ExampleOrder
    credit: CreditAssigner
    planning: PlanningMasks | None
    sepa: SEPAController
    overlap: StepOverlap
    backpressure: BackPressure
    evaluator: Evaluator
    tracker: StepLog
    dashboards: Tracker
    jsonl: JsonlTracker
    checkpoints: Checkpoints
    console: Console
    control: RunControl
    inputs: RunInputs
    total_examples: int | None = None
    """Where back pressure decides the number of steps: the examples of all epochs. None if max_steps ends the run."""


@contextmanager
def assemble(
    config: TrainConfig,
    force_resume: bool = False,
    console: Console | None = None,
    overrides: Overrides | None = None,
) -> Iterator[Parts]:
    """Build a run's components, and close them however the run ends."""
    check_supported(config)
    console = console or Console()
    if overrides is None:
        check_before_loading(config, console.print)
    overrides = overrides or Overrides()
    if overrides.backend is None:
        check_devices(config)
    with ExitStack() as stack:
        try:
            parts = _build(config, force_resume, console, stack, overrides)
        except PluginError as error:
            # Before the first step, a plugin that does not load is a configuration error.
            error.exit_code = ConfigError.exit_code
            raise
        yield parts


def _build(config: TrainConfig, force_resume: bool, console: Console, stack: ExitStack, overrides: Overrides) -> Parts:
    folder = RunFolder(config, force_resume, console.print)
    stack.callback(folder.close)
    config = folder.config
    credit = CreditAssigner(config)
    # Built again by the backend; a plugin fails here, before the model is loaded.
    build_loss(config.loss, config.plugins.search_paths)
    code = code_digests(config)
    # Rewards and environments start first: they warm up while the model loads, and fail early.
    tasks = _find_tasks(config)(config, console)
    stack.callback(tasks.close)
    detector = _build_detector(config) if credit.needs_planning else None
    console.print(f"Loading tokenizer for {config.model.model} ...")
    tokenizer = load_tokenizer(config.model.model)
    console.print("Loading vocabulary table...")
    texts = vocabulary_texts(tokenizer)
    console.print(f"Vocabulary table: {len(texts)} entries")
    examples, held_out = tasks.load(tokenizer)
    _check_batch(config, examples, console.print)
    steps = count_steps(config.training, examples)
    config = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": steps})})
    total = _count_total(config, examples)
    order = _build_order(config, examples, folder)
    _check_schedules(config, credit, total, console.print)

    def progress(phase: str, done: int, total: int) -> None:
        # Engines report while they sample; a stop request ends the step here, before it is trained on.
        raise_if_stopped(overrides.control)
        console.progress(phase, done, total)

    backend = (overrides.backend or _find_backend(config))(config, tokenizer, console.print, progress)
    if isinstance(backend, Closeable):
        stack.push(lambda kind, error, trace: backend.close(kind))
    credit.require_entropies(backend.capabilities.gives_entropies, _name_sampler(config))
    scorer, sampling = _build_scorer(tasks, backend, folder.checkpoint), training_distribution(config)
    jsonl, dashboards = JsonlTracker(folder.path), _build_dashboards(config, folder, console.print)
    planning = PlanningMasks(detector, texts) if detector is not None else None
    evaluator = _build_evaluator(config, scorer, held_out, sampling)
    return Parts(
        config=config,
        folder=folder,
        backend=backend,
        rollouts=_build_collector(config, order, scorer, sampling),
        order=order,
        credit=credit,
        planning=planning,
        sepa=SEPAController(config.sepa),
        overlap=choose_overlap(config, backend, credit, planning, console.print),
        backpressure=_build_backpressure(config, console.print),
        evaluator=evaluator,
        tracker=StepLog(ThrottledTracker(config.logging.every, console), Trackers([jsonl, dashboards])),
        dashboards=dashboards,
        jsonl=jsonl,
        checkpoints=Checkpoints(folder.path, config.training.keep, console.print),
        console=console,
        control=overrides.control,
        # A model that had to be downloaded is there now.
        inputs=RunInputs(order.digest, code, digest_models(config), evaluator.digest, folder.forced),
        total_examples=total,
    )


def _name_sampler(config: TrainConfig) -> str:
    # Only the local backend uses [inference] engine.
    return config.inference.engine if config.backend.backend == "local" else config.backend.backend


def _build_order(config: TrainConfig, examples: Sequence[Example], folder: RunFolder) -> ExampleOrder:
    """The order of the examples; raises if there were more or fewer at the checkpoint, before the model is loaded."""
    order = ExampleOrder(examples, derive_seed(config.training.seed, "data"), config.training.max_examples)
    if folder.checkpoint is not None:
        order.check_state_dict(folder.checkpoint.state["order"])
    return order


def _find_tasks(config: TrainConfig) -> Callable[[TrainConfig, Console], TaskSource]:
    return EnvironmentTasks if config.environment.provider else DataTasks


def _check_batch(config: TrainConfig, examples: Sequence[Example], log: Callable[[str], None]) -> None:
    """Report a batch that repeats examples; reject one that repeats them absurdly often, probably a typo."""
    size, count = config.training.batch_size, min(len(examples), config.training.max_examples or len(examples))
    if size > MAX_REPEATS * count:
        which = "the only example" if count == 1 else f"each of the {count} examples"
        raise ConfigError(
            f"[training] batch_size = {size} takes {which} {size // count:,} times per step.  Try: batch_size = {count}"
        )
    if size > count:
        verb, some = "is" if count == 1 else "are", plural(count, "example")
        log(f"Note: [training] batch_size = {size} repeats prompts within a step: there {verb} only {some}.")


def _count_total(config: TrainConfig, examples: Sequence[Example]) -> int | None:
    """The examples that end a run with epochs and back pressure, whose steps differ in size."""
    ends_by_examples = config.backpressure.enabled and config.training.epochs
    return count_examples(config.training, examples) if ends_by_examples else None


def _check_schedules(
    config: TrainConfig, credit: CreditAssigner, total: int | None, log: Callable[[str], None]
) -> None:
    """Report a run that ends within its warm-up or before SEPA begins, and schedules of unknown length."""
    training = config.training
    idle = [find_long_warmup(config), why_off(config.sepa, training.max_steps) if credit.uses_sepa else ""]
    for reason in filter(None, idle):
        log(f"Note: {reason}")
    if total is not None:
        end = "their end" if learning_rate(config, training.max_steps) else "their end, a learning rate of 0,"
        log(
            f"Note: [training] epochs = {training.epochs:g} ends the run after {plural(total, 'example', form='d')}, "
            f"since [backpressure] changes the batch size. Schedules assume {plural(training.max_steps, 'step')} of "
            f"batch_size = {training.batch_size}, and stay at {end} in any after that."
        )


def _build_scorer(tasks: TaskSource, backend: Backend, checkpoint: Checkpoint | None) -> RolloutScorer:
    scorer = tasks.scorer(backend)
    if checkpoint is not None:
        # A reward that has scored something before, in training or an evaluation, may return None for a whole step.
        saved = checkpoint.state
        scorer.failures.has_scored = saved.get("has_scored", saved["progress"]["scored"] > 0)
    return scorer


def _build_collector(
    config: TrainConfig, order: ExampleOrder, scorer: RolloutScorer, sampling: Sampling
) -> RolloutSource:
    training = config.training
    if training.prompts_per_sampling:
        scorer = ChunkedScorer(scorer, training.prompts_per_sampling)
    return GroupCollector(order, scorer, sampling, training.seed, training.resample_dead_groups)


class DataTasks:
    """Examples of `[data]`, scored by `[reward]` or by a given reward."""

    def __init__(self, config: TrainConfig, console: Console, reward: BatchReward | None = None) -> None:
        self.config = config
        self.console = console
        self.stack = ExitStack()
        if reward is None:
            # Fail early on a missing source, before reward processes are started.
            build_source(config.data, config.plugins.search_paths)
            reward = build_reward(config.reward, config.plugins.search_paths, console.print)
        self.reward = self.stack.enter_context(reward)

    def load(self, tokenizer: Tokenizer) -> tuple[Sequence[Example], Sequence[Example]]:
        """The examples for training and for evaluation."""
        config, log = self.config, self.console.print
        self.encoder = PromptEncoder(tokenizer, config.data.system_prompt, config.training.max_prompt_tokens, log)
        self.examples = _load_training_examples(config, self.encoder, log)
        self.held_out = load_held_out(config, log)
        if shared := describe_shared(self.examples, self.held_out):
            log(f"Warning: {shared}")
        for table, asked in self._asked().items():
            # With teaching, a question is only part of a prompt.
            if not config.teaching.enabled and (cut := self.encoder.describe_cut(asked)):
                log(f"Note: of {plural(len(asked), 'prompt')} of {table}, {cut}.")
        check_prompt_tokens(config, self.encoder, self._asked())
        context = known_context(config) if config.backend.backend == "local" else None
        if context is not None and config.teaching.enabled:
            check_known_context(config, self.encoder, list(chain.from_iterable(self._asked().values())))
        elif context is not None:
            check_prompts(config, self.encoder, self._asked(), context)
        return self.examples, self.held_out

    def scorer(self, backend: Backend) -> RolloutScorer:
        """The scorer, once the context length is known."""
        config, asked = self.config, self._asked()
        if config.teaching.enabled:
            scorer = build_teaching_scorer(config, backend, self.encoder, self.reward, self.console)
            self.stack.callback(scorer.close)
            examples, student = list(chain.from_iterable(asked.values())), scorer.student
            cuts = check_context(scorer.teacher, student.reader, student.templates, limits_of(config), examples)
            for line in cuts:
                self.console.print(f"Note: [teaching] {line}.")
            return scorer
        check_prompts(config, self.encoder, asked, backend.capabilities.context_length)
        return Scorer(self.encoder, self.reward, self.console.print, self.console.progress)

    def _asked(self) -> dict[str, Sequence[Example]]:
        """The examples whose prompts are measured, by table."""
        return {"[data]": sample_of(self.examples), "[eval]": self.held_out}

    def close(self) -> None:
        """Stop the reward's processes."""
        self.stack.close()


def _load_training_examples(
    config: TrainConfig, encoder: PromptEncoder, log: Callable[[str], None]
) -> Sequence[Example]:
    log("Loading dataset...")
    examples = load_examples(config.data, config.plugins.search_paths)
    if isinstance(examples, Endless):
        most = config.training.max_examples
        log(f"Examples are generated during the run ({config.data.source}{f', {most} in all' if most else ''})")
        return examples
    total, most = len(examples), config.training.max_examples or len(examples)
    examples = examples[:most]
    log(f"Loaded {plural(len(examples), 'example', form='d')}{f' (the first of {total})' if most < total else ''}")
    encoder.longest(examples)
    log(f"Pre-encoded {plural(len(examples), 'prompt', form='d')}")
    return examples


def sample_of(examples: Sequence[Example]) -> Sequence[Example]:
    """All examples, or enough of an endless source to estimate prompt lengths."""
    return examples[:512] if isinstance(examples, Endless) else examples


def _find_backend(config: TrainConfig) -> MakeBackend:
    make: Any = REGISTRIES["backend"].load(config.backend.backend, config.plugins.search_paths)
    return make  # type: ignore[no-any-return]


def check_prompts(
    config: TrainConfig, encoder: PromptEncoder, asked: Mapping[str, Sequence[Example]], context: int
) -> None:
    """Reject prompts that leave no room for a completion; the error names the table with the longest one."""
    lengths = {table: encoder.longest(examples) for table, examples in asked.items()}
    table, room = max(lengths, key=lengths.__getitem__), config.training.max_tokens
    longest = lengths[table]
    if longest + room <= context:
        return
    if longest < context:
        hint = f"Try: max_tokens = {context - longest}"
    elif room < context:
        hint = f"Try: max_prompt_tokens = {context - room}"
    else:
        hint = f"Try: max_tokens = {context - context // 2} and max_prompt_tokens = {context // 2}"
    raise ConfigError(
        f"[training] max_tokens = {room} and prompts of up to {longest} tokens in {table} do not fit "
        f"the model's context of {context}.  {hint}"
    )


def build_planning(config: TrainConfig, texts: Sequence[str]) -> PlanningMasks:
    """The planning-token detector for a vocabulary."""
    return PlanningMasks(_build_detector(config), texts)


def _build_detector(config: TrainConfig) -> PlanningDetector:
    return build_detector(config.planning, config.logging.strategic_grams, config.plugins.search_paths)


def _build_evaluator(
    config: TrainConfig, scorer: RolloutScorer, held_out: Sequence[Example], sampling: Sampling
) -> Evaluator:
    eval_sampling = replace(
        sampling,
        n=config.eval.samples,
        temperature=sampling.temperature if config.eval.temperature == AS_IN_TRAINING else config.eval.temperature,
        seed=derive_seed(config.training.seed, "eval"),
    )
    k, code = config.eval.k or config.eval.samples, code_digests(config, of_scoring=True)
    return Evaluator(scorer, held_out, eval_sampling, config.eval.every, k, code)


def _build_backpressure(config: TrainConfig, log: Callable[[str], None]) -> BackPressure:
    if not config.backpressure.enabled:
        return NoBackPressure()
    log("Note: [backpressure] chooses batch sizes by measured speed, so this run does not repeat bit for bit.")
    # The precision of the loaded model.
    wide = config.model.dtype == "fp32" or (config.model.dtype == "auto" and is_on_cpu(config.backend.devices))
    return USLBackPressure(config.backpressure, config.training.group_size, bytes_per_weight=4 if wide else 2)


def _build_dashboards(config: TrainConfig, folder: RunFolder, log: Callable[[str], None]) -> Tracker:
    trackers: list[Tracker] = []
    if config.logging.wandb_project:
        from retrain.tracking.wandb import WandbTracker  # noqa: PLC0415  (slow to import, rarely used)

        trackers.append(BackgroundTracker("wandb", WandbTracker(folder.path), log))
    if config.logging.trackio_project:
        from retrain.tracking.trackio import TrackioTracker  # noqa: PLC0415  (an optional extra)

        trackers.append(BackgroundTracker("trackio", TrackioTracker(folder.path), log))
    return ThrottledTracker(config.logging.every, *trackers)
