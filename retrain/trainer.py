"""The training loop: sample, score, assign credit, train, log, checkpoint.

Nothing changes before a step is trained on, so an interrupt there loses nothing; training and logging are not
interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from retrain.advantages import Credit
from retrain.assemble import Overrides, Parts, assemble
from retrain.backends import AsyncBackend
from retrain.checks.agreement import DisagreementError, sample_unsignalled
from retrain.checks.repeats import check_repeats
from retrain.config import TrainConfig
from retrain.datums import build_datums, rows_of
from retrain.errors import CheckpointError
from retrain.evaluate import Evaluation
from retrain.isolation.tracebacks import summarize_error
from retrain.rollout import Rollouts
from retrain.runtime.control import raise_if_stopped
from retrain.runtime.interrupts import Interrupts
from retrain.schedules.learning_rate import learning_rate, warmup_steps
from retrain.seeding import derive_seed, seed_everything
from retrain.storage.checkpoint import mark_running, publish_adapter, read_notes, record_failure, write_state_file
from retrain.storage.recording import write_recording
from retrain.tracking.console import Console
from retrain.types import Datum, Group, StepMetrics

# Reported by every backend; None where it has no value for a step.
TRAINING_METRICS = ("loss", "ratio_mean", "ratio_max", "kl_sample_train", "grad_norm")


@dataclass
class RunState:
    """Counters of a run, saved with every checkpoint."""

    step: int = 0
    right: int = 0
    scored: int = 0
    batch_size: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class StepBatch:
    """The data of a step, and how it was obtained."""

    rollouts: Rollouts
    credit: Credit
    datums: list[Datum]
    evaluation: Evaluation | None
    repeated_completions: int
    sepa_lambda: float


@dataclass(frozen=True)
class TrainResult:
    """Result of a run."""

    log_dir: str
    steps: int
    running_correct_rate: float
    first_evaluation: Evaluation | None
    last_evaluation: Evaluation | None
    weights: str = ""
    """Where a service keeps the trained weights; empty when they are in `[backend] adapter_path`."""
    adapter: Path | None = None
    """Folder of the newest adapter, or of the model in full fine-tuning: `[backend] adapter_path`, or the last
    checkpoint where it could not be copied there."""


def train(
    config: TrainConfig,
    force_resume: bool = False,
    console: Console | None = None,
    overrides: Overrides | None = None,
) -> TrainResult:
    """Run a configuration to its last step, from its checkpoint if it resumes one.

    `overrides` replaces components that the configuration names, and may steer the run through its `control`.
    """
    with Interrupts() as interrupts, assemble(config, force_resume, console, overrides) as parts:
        state = resume(parts)
        parts.folder.settle()
        if not parts.folder.only_evaluates:
            mark_running(parts.folder.path)
        try:
            parts.tracker.start(parts.config)
            return run_or_save(parts, state, interrupts)
        finally:
            parts.tracker.finish()


def run_or_save(parts: Parts, state: RunState, interrupts: Interrupts) -> TrainResult:
    """Run the remaining steps; if they end early, save a checkpoint and, unless the run was interrupted, the reason."""
    try:
        return run_steps(parts, state, interrupts)
    except BaseException as error:
        if parts.folder.only_evaluates:
            raise  # it is still the finished run that it was
        late = parts.backend.capabilities.reports_late
        rejected = isinstance(error, DisagreementError) and (late or not error.state_intact)
        # Between steps the state is complete and worth keeping, unless it counts a step that was rejected.
        if interrupts.between_steps and not rejected:
            interrupts.hold()
            try:
                save(parts, state, "interrupted")
            except Exception as failure:
                # After an interrupt it is the only error; otherwise it must not hide what ended the run.
                if not isinstance(error, Exception):
                    raise
                parts.console.print(f"Warning: no checkpoint of step {state.step} could be saved: {failure}")
        if isinstance(error, Exception) and not interrupts.stopping:
            # A disk that cannot be written to must not hide what ended the run either.
            with suppress(CheckpointError, OSError, ValueError):
                record_failure(parts.folder.path, summarize_error(error))
        raise


def run_steps(parts: Parts, state: RunState, interrupts: Interrupts) -> TrainResult:
    """Run the remaining steps."""
    first = None
    while not is_done(parts, state):
        raise_if_stopped(parts.control)
        step, started = state.step, time.perf_counter()
        order, sepa = parts.order.state_dict(), parts.sepa.state_dict()
        try:
            batch = collect_batch(parts, state)
            first = first or batch.evaluation
            # Inside the try: an interrupt must find either the examples restored or the step running.
            interrupts.hold()
        except BaseException:
            # The step never happened: it will draw the same examples when it does.
            parts.overlap.discard()
            parts.order.load_state_dict(order)
            parts.sepa.load_state_dict(sepa)
            raise
        with interrupts.deferring():
            training_started = time.perf_counter()
            try:
                outcome = train_on(parts, batch, step)
            except DisagreementError as error:
                # A rejected step never happened either, so the state before it is worth keeping.
                if error.state_intact and not parts.backend.capabilities.reports_late:
                    parts.order.load_state_dict(order)
                    parts.sepa.load_state_dict(sepa)
                    interrupts.cancel()
                raise
            train_time = time.perf_counter() - training_started
            update(parts, state, batch, outcome)
            metrics = step_metrics(parts, state, batch, outcome)
            metrics |= {"train_time_s": train_time, "step_time_s": time.perf_counter() - started}
            adapt_batch_size(parts, state, metrics)
            record(parts, state, batch, metrics)
        parts.control.after_step(step, metrics)
    last, adapter = finish(parts, state)
    weights = str(read_notes(parts.checkpoints.path_of(state.step)).get("adapter", ""))
    right = state.right / max(1, state.scored)
    return TrainResult(str(parts.folder.path), state.step, right, first, last, weights, adapter)


def is_done(parts: Parts, state: RunState) -> bool:
    """Whether the run has completed its steps, or its passes over the examples."""
    left = examples_left(parts)
    return state.step >= parts.config.training.max_steps if left is None else left == 0


def examples_left(parts: Parts) -> int | None:
    """Examples until the end of the last epoch; None if the number of steps is known."""
    return None if parts.total_examples is None else max(0, parts.total_examples - parts.order.position)


def expected_steps(parts: Parts, state: RunState) -> int:
    """Steps of the run, at the current batch size if that may change."""
    left = examples_left(parts)
    return parts.config.training.max_steps if left is None else state.step + math.ceil(left / state.batch_size)


def collect_batch(parts: Parts, state: RunState) -> StepBatch:
    """Evaluate if due, sample and score the step's prompts, and assign credit.

    In an overlapped step, the backend meanwhile computes the gradients of the groups that are complete.
    """
    config, step = parts.config, state.step
    # The last batch does not go beyond the last epoch.
    state.batch_size = min(state.batch_size, examples_left(parts) or state.batch_size)
    seed_everything(config.training.seed, step)
    engine = parts.backend.sampler(step)
    evaluation = parts.evaluator.run(engine) if parts.evaluator.due(step) else None
    deliver = parts.overlap.begin(parts.sepa.known_lambda(step) if parts.credit.uses_sepa else 0.0)
    rollouts = parts.rollouts.collect(engine, step, state.batch_size, deliver)
    repeats = count_repeats(parts, rollouts.groups)
    parts.sepa.observe_correct_rate(rollouts.correct_rate)
    sepa_lambda = parts.sepa.resolve_lambda(step) if parts.credit.uses_sepa else 0.0
    taken = parts.overlap.taken
    masks = parts.planning.of(rollouts.groups, taken.masks) if parts.planning else None
    credit = parts.credit.assign(rollouts.groups, masks, sepa_lambda)
    datums = build_datums(rollouts.groups, credit, config.kl.beta > 0, taken.datums)
    return StepBatch(rollouts, credit, datums, evaluation, repeats, sepa_lambda)


def train_on(parts: Parts, batch: StepBatch, step: int) -> StepMetrics:
    """Take one optimizer step."""
    parts.console.progress("training", 0, len(batch.datums))
    checked = rows_to_check(parts, batch.rollouts.groups, batch.datums, step)
    return parts.backend.train_step([*batch.datums, *checked], step)


def adapt_batch_size(parts: Parts, state: RunState, metrics: StepMetrics) -> None:
    """Let back-pressure choose the next batch size."""
    parts.backpressure.observe(metrics)
    state.batch_size = parts.backpressure.recommend(state.batch_size)
    metrics |= parts.backpressure.metrics()


def record(parts: Parts, state: RunState, batch: StepBatch, metrics: StepMetrics) -> None:
    """Write the step to the logs, and a checkpoint if one is due."""
    step, training, groups = state.step, parts.config.training, batch.rollouts.groups
    if batch.evaluation:
        parts.jsonl.log_evaluation(step, batch.evaluation)
    if training.record:
        write_recording(parts.folder.path, step, groups)
    credited = batch.credit.of(groups)
    parts.tracker.log(step, metrics, credited, batch.rollouts.as_asked(credited))
    state.step += 1
    parts.console.expect(expected_steps(parts, state))
    if state.step % training.save_every == 0 or is_done(parts, state):
        save(parts, state, "running")


def count_repeats(parts: Parts, groups: Sequence[Group]) -> int:
    """Completions that repeat another of their group; raises if chance does not explain them."""
    if parts.config.training.temperature == 0:
        return 0
    capabilities = parts.backend.capabilities
    return check_repeats(groups, capabilities.checks_rows and capabilities.sampled_logprobs)


def rows_to_check(parts: Parts, groups: Sequence[Group], datums: Sequence[Datum], step: int) -> list[Datum]:
    """A random sample of rows that are not trained on, whose log-probs are compared with the trainer's."""
    if not parts.backend.capabilities.checks_rows:
        return []
    trained = {(datum.group, datum.index) for datum in datums}
    others = [
        replace(row, mask_T=np.zeros_like(row.mask_T), check_T=row.mask_T)
        for at, group in enumerate(groups)
        for index, completion in enumerate(group.completions_G)
        if (at, index) not in trained and len(completion.token_ids_T)
        for row in rows_of(group, at, index, np.zeros(len(completion.token_ids_T)))
        if row.mask_T.any()
    ]
    tokens = sum(len(datum.prompt_ids) + len(datum.completion_ids_T) for datum in datums)
    return sample_unsignalled(others, tokens, derive_seed(parts.config.training.seed, "proof", step))


def update(parts: Parts, state: RunState, batch: StepBatch, outcome: StepMetrics) -> None:
    """Add a step to the running counts; a late outcome completes the row of the step before."""
    parts.sepa.update(batch.credit.exec_entropy_var)
    scores = batch.rollouts.scores
    state.right += sum(score.outcome == "right" for score in scores)
    state.scored += len(scores)
    if parts.backend.capabilities.reports_late:
        settle(parts, state, outcome)
    else:
        state.skipped += int(outcome.get("skipped") or 0)


def settle(parts: Parts, state: RunState, outcome: StepMetrics) -> None:
    """Complete the row that waits for its step's outcome, if there is one."""
    if parts.tracker.pending is not None:
        state.skipped += int(outcome.get("skipped") or 0)
    parts.tracker.settle(outcome, state.skipped)


def step_metrics(parts: Parts, state: RunState, batch: StepBatch, outcome: StepMetrics) -> StepMetrics:
    """The step's metrics: the loop's own, and everything that the backend reported."""
    rollouts = batch.rollouts
    completions = [completion for group in rollouts.groups for completion in group.completions_G]
    lengths = [completion.num_sampled for completion in completions] or [0]
    reported = {key: outcome.get(key) for key in TRAINING_METRICS} | outcome
    reported.pop("skipped", None)
    loop_metrics: StepMetrics = {
        "step": state.step,
        "condition": parts.config.condition,
        "loss_is_placeholder": parts.backend.capabilities.reports_late,
        "skipped_steps": state.skipped,
        "mean_reward": rollouts.mean_reward,
        "correct_rate": rollouts.correct_rate,
        "running_correct_rate": state.right / state.scored if state.scored else None,
        "sepa_gate_open": parts.sepa.gate_open,
        "sepa_lambda": batch.sepa_lambda,
        "max_token_hit_rate": sum(c.finish_reason == "length" for c in completions) / max(1, len(completions)),
        "sample_time_s": rollouts.sample_time_s,
        "score_time_s": rollouts.score_time_s,
        "prompt_tokens_mean": float(np.mean([len(group.prompt_ids) for group in rollouts.groups] or [0])),
        "completion_tokens_mean": float(np.mean(lengths)),
        "completion_tokens_p95": float(np.percentile(lengths, 95)),
        "completion_tokens_max": max(lengths),
        "tokens_per_s": sum(lengths) / max(rollouts.sample_time_s, 1e-9),
        "groups_sampled": len(rollouts.groups),
        "batch_size": state.batch_size,
        "group_size": parts.config.training.group_size,
        "num_datums": len(batch.datums),
        "repeated_completions": batch.repeated_completions,
        "reward_errors": rollouts.errors,
        "rewards_none": sum(score.outcome == "none" for group in rollouts.groups for score in group.scores_G),
        "uncertainty_kind": parts.config.algorithm.uncertainty_kind,
        **rollouts.metrics,
        **batch.credit.metrics(),
        **(batch.evaluation.metrics() | {"eval_time_s": batch.evaluation.seconds} if batch.evaluation else {}),
    }
    return reported | loop_metrics


def resume(parts: Parts) -> RunState:
    """Restore every component from the checkpoint, if there is one."""
    checkpoint = parts.folder.checkpoint
    if checkpoint is None:
        return RunState(batch_size=parts.config.training.batch_size)
    saved = checkpoint.state
    try:
        parts.backend.load(checkpoint.path)
    except FileNotFoundError as error:
        if checkpoint.path.exists():
            raise
        # Its run is in progress and keeps the newest ones only.
        raise CheckpointError(f"{checkpoint.path} was deleted meanwhile.  Try: resume again") from error
    parts.order.load_state_dict(saved["order"])
    for edit in parts.inputs.add_earlier(saved):
        parts.console.print(f"Warning: {edit}")
    parts.sepa.load_state_dict(saved["sepa"])
    parts.backpressure.load_state_dict(saved["backpressure"])
    unknown = saved["progress"].keys() - {each.name for each in fields(RunState)}
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path} contains {', '.join(sorted(unknown))}, which this version of retrain does not "
            "support.  Try: resume with the version that wrote it"
        )
    state = RunState(**saved["progress"])
    warn_of_changed_steps(parts, checkpoint.step, int(saved.get("max_steps", parts.config.training.max_steps)))
    if saved["configured_batch_size"] != parts.config.training.batch_size:
        state.batch_size = parts.config.training.batch_size
    return state


def warn_of_changed_steps(parts: Parts, step: int, max_steps: int) -> None:
    """Report a number of steps that is already exceeded, or that makes the learning rate jump."""
    config = parts.config
    if not config.training.epochs and config.training.max_steps < step:
        parts.console.print(
            f"Note: the run has completed {step} steps, more than max_steps = {config.training.max_steps}."
        )
    earlier = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": max_steps})})
    before, now = learning_rate(earlier, step), learning_rate(config, step)
    if before != now:
        warmup, schedule = config.optimizer.warmup_steps, config.optimizer.schedule
        is_warming = step < warmup_steps(warmup, max(max_steps, config.training.max_steps))
        changed = f"warmup_steps = {warmup:g}" if is_warming else f"schedule = {schedule!r}"
        parts.console.print(
            f"Note: [training] max_steps changed from {max_steps} to {config.training.max_steps}, and with it "
            f"[optimizer] {changed}: the learning rate of step {step} is {now:.4g} instead of {before:.4g}."
        )


def save(parts: Parts, state: RunState, status: str) -> Path | None:
    """Write a checkpoint at this step, unless it exists, and update trainer_state.json; return where the adapter is."""
    if isinstance(parts.backend, AsyncBackend):
        settle(parts, state, parts.backend.settle())
    parts.tracker.release()
    saved = {
        "progress": vars(state).copy(),
        "configured_batch_size": parts.config.training.batch_size,
        "max_steps": parts.config.training.max_steps,
        "order": parts.order.state_dict(),
        **asdict(parts.inputs),
        "has_scored": parts.evaluator.scorer.failures.has_scored,
        "config": parts.folder.settings(),
        "sepa": parts.sepa.state_dict(),
        "backpressure": parts.backpressure.state_dict(),
        # Every generator is seeded from these at each step, so they are the complete random state.
        "random": {"seed": parts.config.training.seed, "step": state.step},
        "log_sizes": parts.jsonl.sizes(),
    }
    if state.step in parts.checkpoints.steps():
        path = parts.checkpoints.path_of(state.step)
    else:
        path = parts.checkpoints.save(state.step, saved, parts.backend.save)
    write_state_file(
        parts.folder.path,
        {
            "step": state.step,
            "max_steps": expected_steps(parts, state),
            "status": status,
            "condition": parts.config.condition,
            "checkpoint": f"checkpoints/step_{state.step:06d}",
            "running_correct_rate": state.right / max(1, state.scored),
            **asdict(parts.inputs),
            **read_notes(path),
        },
    )
    if not state.step:
        # Untrained, and the folder may hold the adapter of an earlier run.
        return path / "adapter" if (path / "adapter").is_dir() else None
    # The last checkpoint is published after its step and again at the end.
    return publish_adapter(path, Path(parts.config.backend.adapter_path), parts.console.print_once)


def finish(parts: Parts, state: RunState) -> tuple[Evaluation | None, Path | None]:
    """Evaluate one last time and mark the run as finished; return the evaluation and where the adapter is."""
    last = None
    if parts.evaluator.every:
        # One step further: a sampler that lags by one step then has the last update.
        last = parts.evaluator.run(parts.backend.sampler(state.step + 1))
        parts.folder.replace_evaluation()
        parts.jsonl.log_evaluation(state.step, last)
        parts.console.log_evaluation(last)
        # Those before are among the metrics of their steps.
        found: StepMetrics = {"step": state.step, **last.metrics(), "eval_time_s": last.seconds}
        parts.dashboards.log(state.step, found, [])
    return last, save(parts, state, "finished")
