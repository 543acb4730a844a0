"""The loop: roll out, score, assign credit, train, adapt, record.

Up to the training of a step nothing changes, so an interrupt there costs nothing; from there to the record the step is
done as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrain.advantages import Credit
from retrain.assemble import NOTHING, Parts, Supplied, assemble
from retrain.backends import ReportsLate
from retrain.checks.agreement import DisagreementError, unsignalled
from retrain.checks.repeats import refuse_repeats
from retrain.config import TrainConfig
from retrain.evaluate import Evaluation
from retrain.rollout import Rollouts
from retrain.runtime.interrupts import Interrupts
from retrain.schedules.learning_rate import learning_rate
from retrain.seeding import derive_seed, seed_everything
from retrain.storage.checkpoint import publish_adapter, read_notes, write_state_file
from retrain.storage.recording import write_recording
from retrain.tracking.console import Console
from retrain.tracking.jsonl import EVALS
from retrain.types import Datum, FloatArray, Group, Segment, StepMetrics

# What a backend may tell about the sampler of a step, and about its own update.
OPTIONAL_METRICS = (
    *("lr", "kl_ref", "staleness", "policy_proof", "mismatch_mean", "mismatch_max", "mismatch_kl"),
    *("rows_checked", "rows_excluded", "rows_mismatch_max"),
)


@dataclass
class Progress:
    """How far a run is, and what it has seen."""

    step: int = 0
    right: int = 0
    scored: int = 0
    batch_size: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    log_dir: str
    steps: int
    running_correct_rate: float
    first_evaluation: Evaluation | None
    last_evaluation: Evaluation | None
    weights: str = ""
    """Where a service keeps what was trained; empty when it is in `[backend] adapter_path`."""


def train(
    config: TrainConfig,
    force_resume: bool = False,
    console: Console | None = None,
    supplied: Supplied = NOTHING,
) -> TrainResult:
    """Run a configuration to its last step, from its checkpoint if it resumes one.

    `supplied` are parts that take the place of those that the configuration names.
    """
    with assemble(config, force_resume, console, supplied) as parts, Interrupts() as interrupts:
        progress = resume(parts)
        parts.folder.settle()
        try:
            parts.tracker.start(parts.config)
            return run_or_save(parts, progress, interrupts)
        finally:
            parts.tracker.finish()


def run_or_save(parts: Parts, progress: Progress, interrupts: Interrupts) -> TrainResult:
    """Every step that is left, or a checkpoint where they end."""
    try:
        return run_steps(parts, progress, interrupts)
    except BaseException as error:
        late = parts.backend.capabilities.reports_late
        refused = isinstance(error, DisagreementError) and (late or not error.is_whole)
        # Whatever it was, between steps the state is whole and worth keeping; but for a step that was counted as done.
        if interrupts.between_steps and not refused:
            interrupts.hold()
            save(parts, progress, "interrupted")
        raise


def run_steps(parts: Parts, progress: Progress, interrupts: Interrupts) -> TrainResult:
    """Every step that is left."""
    training = parts.config.training
    first = last = None
    while progress.step < training.max_steps:
        step, started = progress.step, time.perf_counter()
        cursor, schedule = parts.order.state_dict(), parts.sepa.state_dict()
        try:
            seed_everything(training.seed, step)
            engine = parts.backend.sampler(step)
            last = parts.evaluator.run(engine) if parts.evaluator.due(step) else None
            first = first or last
            rollouts = parts.rollouts.collect(engine, step, progress.batch_size)
            repeats = count_repeats(parts, rollouts.groups)
            parts.sepa.observe_correct_rate(rollouts.correct_rate)
            sepa_lambda = parts.sepa.resolve_lambda(step)
            masks = parts.planning.of(rollouts.groups) if parts.planning else None
            credit = parts.credit.assign(rollouts.groups, masks, sepa_lambda)
            datums = build_datums(rollouts.groups, credit, all_groups=parts.config.kl.beta > 0)
            # Still inside the try: an interrupt must find the problems either given back or the step under way.
            interrupts.hold()
        except BaseException:
            # The step never happened: it will draw the same problems when it does.
            parts.order.load_state_dict(cursor)
            parts.sepa.load_state_dict(schedule)
            raise
        with interrupts.held():
            training_started = time.perf_counter()
            parts.console.progress("training", 0, len(datums))
            looked_at = rows_to_look_at(parts, rollouts.groups, datums, step)
            try:
                outcome = parts.backend.train_step([*datums, *looked_at], step)
            except DisagreementError as error:
                # A step that was refused never happened either, so what came before it is worth keeping.
                if error.is_whole and not parts.backend.capabilities.reports_late:
                    parts.order.load_state_dict(cursor)
                    parts.sepa.load_state_dict(schedule)
                    interrupts.give_up()
                raise
            train_time = time.perf_counter() - training_started
            parts.sepa.update(credit.exec_entropy_var)
            note(parts, progress, rollouts, outcome)
            metrics = describe(parts, progress, rollouts, credit, outcome)
            metrics |= {
                "num_datums": len(datums),
                "repeated_completions": repeats,
                "sepa_lambda": sepa_lambda,
                "train_time_s": train_time,
                "step_time_s": time.perf_counter() - started,
                **(last.metrics() if last else {}),
            }
            parts.backpressure.observe(metrics)
            progress.batch_size = parts.backpressure.recommend(progress.batch_size)
            metrics |= parts.backpressure.metrics()
            if last:
                parts.jsonl.write(EVALS, [last.record(step)])
            if training.record:
                write_recording(parts.folder.path, step, rollouts.groups)
            parts.tracker.log(step, metrics, credit.of(rollouts.groups))
            progress.step += 1
            if progress.step % training.save_every == 0 or progress.step == training.max_steps:
                save(parts, progress, "running")
    last = finish(parts, progress)
    weights = str(read_notes(parts.checkpoints.path_of(progress.step)).get("adapter", ""))
    rate = progress.right / max(1, progress.scored)
    return TrainResult(str(parts.folder.path), progress.step, rate, first, last, weights)


def build_datums(groups: Sequence[Group], credit: Credit, all_groups: bool = False) -> list[Datum]:
    """The rows worth training on: scored completions of groups that carry a signal.

    A penalty for leaving the reference concerns every completion, so with one `all_groups` take part.
    """
    excluded = set(credit.excluded)
    datums = []
    for at in range(len(groups)) if all_groups else credit.live():
        for index, completion in enumerate(groups[at].completions_G):
            if (at, index) not in excluded and len(completion.token_ids_T):
                datums += rows_of(groups[at], at, index, credit.token_advantages_PG[at][index])
    return datums


def count_repeats(parts: Parts, groups: Sequence[Group]) -> int:
    """Completions that repeat another of their group; raises where that is beyond chance."""
    if parts.config.training.temperature == 0:
        return 0
    capabilities = parts.backend.capabilities
    return refuse_repeats(groups, capabilities.checks_rows and capabilities.sampled_logprobs)


def rows_of(group: Group, at: int, index: int, advantages_T: FloatArray) -> list[Datum]:
    """The rows that one completion of group number `at` is trained as."""
    completion = group.completions_G[index]
    mask_T = completion.sampled_T if completion.sampled_T is not None else np.ones(len(advantages_T), bool)
    datums = []
    for row in completion.segments or (Segment(group.prompt_ids, 0, len(advantages_T)),):
        part = slice(row.start, row.stop)
        ids_T, logprobs_T = completion.token_ids_T[part], completion.logprobs_T[part]
        datums.append(Datum(row.prompt_ids, ids_T, logprobs_T, advantages_T[part], mask_T[part], at, index))
    return datums


def rows_to_look_at(parts: Parts, groups: Sequence[Group], datums: Sequence[Datum], step: int) -> list[Datum]:
    """A few rows that are not trained on, drawn from the seed: their log-probs are compared with the trainer's too."""
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
    return unsignalled(others, tokens, derive_seed(parts.config.training.seed, "proof", step))


def note(parts: Parts, progress: Progress, rollouts: Rollouts, outcome: StepMetrics) -> None:
    """Add a step to the running counts; a late outcome is that of the step before, whose row waits for it."""
    scores = rollouts.scores
    progress.right += sum(score.outcome == "right" for score in scores)
    progress.scored += len(scores)
    if parts.backend.capabilities.reports_late:
        settle(parts, progress, outcome)
    else:
        progress.skipped += int(outcome.get("skipped") or 0)


def settle(parts: Parts, progress: Progress, outcome: StepMetrics) -> None:
    """Complete the row that waits for its step's outcome, if there is one."""
    if parts.tracker.held is not None:
        progress.skipped += int(outcome.get("skipped") or 0)
        parts.tracker.settle(outcome, progress.skipped)


def describe(parts: Parts, progress: Progress, rollouts: Rollouts, credit: Credit, outcome: StepMetrics) -> StepMetrics:
    """The step's metrics, but for what only the loop knows."""
    scores = rollouts.scores
    completions = [completion for group in rollouts.groups for completion in group.completions_G]
    tokens = sum(len(completion.token_ids_T) for completion in completions)
    return {
        "step": progress.step,
        "condition": parts.config.condition,
        "loss_is_placeholder": parts.backend.capabilities.reports_late,
        **{key: outcome.get(key) for key in ("loss", "ratio_mean", "ratio_max", "kl_sample_train", "grad_norm")},
        **{key: outcome[key] for key in OPTIONAL_METRICS if key in outcome},
        "skipped_steps": progress.skipped,
        "mean_reward": sum(score.value for score in scores) / len(scores) if scores else 0.0,
        "correct_rate": rollouts.correct_rate,
        "running_correct_rate": progress.right / max(1, progress.scored),
        "sepa_gate_open": parts.sepa.gate_open,
        "max_token_hit_rate": sum(c.finish_reason == "length" for c in completions) / max(1, len(completions)),
        "sample_time_s": rollouts.sample_time_s,
        "score_time_s": rollouts.score_time_s,
        "tokens_per_s": tokens / max(rollouts.sample_time_s, 1e-9),
        "batch_size": progress.batch_size,
        "group_size": parts.config.training.group_size,
        "reward_errors": rollouts.errors,
        "rewards_none": sum(score.outcome == "none" for group in rollouts.groups for score in group.scores_G),
        "uncertainty_kind": parts.config.algorithm.uncertainty_kind,
        **rollouts.metrics,
        **credit.metrics(),
    }


def resume(parts: Parts) -> Progress:
    """Put every part where the checkpoint left it, or at the beginning."""
    checkpoint = parts.folder.checkpoint
    if checkpoint is None:
        return Progress(batch_size=parts.config.training.batch_size)
    state = checkpoint.state
    parts.backend.load(checkpoint.path)
    parts.order.load_state_dict(state["order"])
    parts.sepa.load_state_dict(state["sepa"])
    parts.backpressure.load_state_dict(state["backpressure"])
    progress = Progress(**state["progress"])
    mention_other_schedule(parts, checkpoint.step, int(state.get("max_steps", parts.config.training.max_steps)))
    if state["configured_batch_size"] != parts.config.training.batch_size:
        progress.batch_size = parts.config.training.batch_size
    return progress


def mention_other_schedule(parts: Parts, step: int, max_steps: int) -> None:
    """Say how the learning rate jumps where a schedule is stretched or squeezed to another number of steps."""
    config = parts.config
    earlier = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": max_steps})})
    before, now = learning_rate(earlier, step), learning_rate(config, step)
    if before != now:
        parts.console.say(
            f"Note: [optimizer] schedule = {config.optimizer.schedule!r} runs over max_steps, which is "
            f"{config.training.max_steps} where it was {max_steps}: the learning rate of step {step} is {now:.4g} in "
            f"place of {before:.4g}."
        )


def save(parts: Parts, progress: Progress, status: str) -> None:
    """A checkpoint at this step, unless it has one already, and a note of it in trainer_state.json."""
    if isinstance(parts.backend, ReportsLate):
        settle(parts, progress, parts.backend.settle())
    parts.tracker.release()
    state = {
        "progress": vars(progress).copy(),
        "configured_batch_size": parts.config.training.batch_size,
        "max_steps": parts.config.training.max_steps,
        "order": parts.order.state_dict(),
        "sepa": parts.sepa.state_dict(),
        "backpressure": parts.backpressure.state_dict(),
        # Every generator is seeded from these two at each step, so they are all the random state there is.
        "random": {"seed": parts.config.training.seed, "step": progress.step},
        "log_sizes": parts.jsonl.sizes(),
    }
    if progress.step in parts.checkpoints.steps():
        path = parts.checkpoints.path_of(progress.step)
    else:
        path = parts.checkpoints.save(progress.step, state, parts.backend.save)
    write_state_file(
        parts.folder.path,
        {
            "step": progress.step,
            "max_steps": parts.config.training.max_steps,
            "status": status,
            "condition": parts.config.condition,
            "checkpoint": f"checkpoints/step_{progress.step:06d}",
            "running_correct_rate": progress.right / max(1, progress.scored),
            **read_notes(path),
        },
    )
    publish_adapter(path, Path(parts.config.backend.adapter_path), parts.console.say)


def finish(parts: Parts, progress: Progress) -> Evaluation | None:
    """A last look at the held-out problems, and the run is marked finished."""
    last = None
    if parts.evaluator.every:
        # The step after next: a sampler that lags one step behind has the last update by then.
        last = parts.evaluator.run(parts.backend.sampler(progress.step + 1))
        parts.jsonl.write(EVALS, [last.record(progress.step)])
    save(parts, progress, "finished")
    return last
