"""Training rows as the Tinker service takes them, and the metrics of a step.

The service sums over tokens where retrain averages, so advantages are divided by the denominator before they are sent:
loss, gradient and update then equal those of the local backend on the same data, except for a `ratio_cap` that the
service lacks. Log-probs are those of temperature 1 on both sides, so that ratios compare like with like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import tinker
from tinker import types

from retrain.errors import BackendError
from retrain.losses import PolicyLoss, TinkerLoss
from retrain.losses.ratios import MAX_LOG_RATIO
from retrain.types import Datum, FloatArray, StepMetrics

NO_CLIP = (0.0, np.inf)


def denominator(loss: PolicyLoss, datums: Sequence[Datum], max_tokens: int) -> float:
    """The divisor of the service's sum."""
    tokens = sum(int(datum.mask_T.sum()) for datum in datums)
    return loss.average.denominator(tokens, len(datums), max_tokens)


def to_service(datum: Datum, divisor: float, loss: TinkerLoss) -> types.Datum:
    """A row for the service: inputs are all tokens but the last, targets all but the first."""
    tokens = np.concatenate([datum.prompt_ids, datum.completion_ids_T]).astype(np.int64)
    before = len(datum.prompt_ids) - 1
    mask = datum.mask_T.astype(np.float32)

    def aligned(values_T: FloatArray) -> FloatArray:
        # Prompt tokens were not sampled: zero advantage keeps them out of the loss.
        return np.concatenate([np.zeros(before, np.float32), np.where(datum.mask_T, values_T, 0.0).astype(np.float32)])

    inputs = {
        "target_tokens": types.TensorData.from_numpy(tokens[1:]),
        "logprobs": types.TensorData.from_numpy(aligned(datum.logprobs_T)),
        "advantages": types.TensorData.from_numpy(aligned(datum.advantages_T / divisor)),
    }
    if loss.per_sequence:
        inputs["sequence_ratio_mask"] = types.TensorData.from_numpy(aligned(mask))
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def step_metrics(
    loss: TinkerLoss,
    datums: Sequence[Datum],
    logprobs: Sequence[FloatArray] | None,
    reported: float | None,
    divisor: float,
) -> StepMetrics:
    """Loss and ratios of a step, from the log-probs and the loss that the service reported, if any."""
    if logprobs is None:
        if reported is None:
            raise BackendError("the Tinker service returned neither a loss nor log-probs of the step.")
        return {"loss": reported, "ratio_mean": None, "ratio_max": None, "kl_sample_train": None}
    objective, log_ratios = 0.0, []
    for row, datum in zip(logprobs, datums, strict=True):
        current, advantages = row[datum.mask_T].astype(np.float64), datum.advantages_T[datum.mask_T]
        log_ratio = (current - datum.logprobs_T[datum.mask_T]).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        objective += float(_objective(loss, log_ratio, current, advantages).sum())
        log_ratios.append(log_ratio)
    log_ratio = np.concatenate(log_ratios)
    ratio = np.exp(log_ratio)
    return {
        "loss": reported if reported is not None and loss.same_value else -objective / divisor,
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        # As the local backend estimates it: E_sampled[r - 1 - log r].
        "kl_sample_train": float((ratio - 1 - log_ratio).mean()),
    }


def _objective(loss: TinkerLoss, log_ratio: FloatArray, logprobs: FloatArray, advantages: FloatArray) -> FloatArray:
    """The value of our loss at each token of a row, if the service reports none, or that of another loss."""
    ratio = np.exp(log_ratio.mean() if loss.per_sequence else log_ratio)
    clipped: FloatArray = np.clip(ratio, *(loss.clip or NO_CLIP)) * advantages
    if loss.clips_gradient:
        return np.minimum(ratio * advantages, clipped)
    return clipped * logprobs if loss.name == "cispo" and loss.same_value else clipped


def cancel(loss: TinkerLoss, datum: Datum, current_T: FloatArray) -> Datum:
    """A row whose gradient under importance_sampling is minus that of `datum` under `loss`.

    The gradient of each loss is a weight times the gradient of the token's log-prob, which is now `current_T`. At a
    ratio of 1 that weight is the advantage, so a gradient that the service has accumulated can be subtracted.
    """
    log_ratio_T = np.where(datum.mask_T, current_T - datum.logprobs_T, 0.0).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if loss.per_sequence:
        log_ratio_T = np.full_like(log_ratio_T, log_ratio_T.sum() / max(1, int(datum.mask_T.sum())))
    ratio_T = np.exp(log_ratio_T)
    weight_T = np.clip(ratio_T, *(loss.clip or NO_CLIP)) * datum.advantages_T
    if loss.clips_gradient:
        unclipped_T = ratio_T * datum.advantages_T
        weight_T = np.where(unclipped_T <= weight_T, unclipped_T, 0.0)
    return replace(datum, logprobs_T=current_T, advantages_T=-weight_T)


def completion_logprobs(datums: Sequence[Datum], output: tinker.ForwardBackwardOutput) -> list[FloatArray] | None:
    """The trained policy's log-prob of each completion token, if the service returns them."""
    outputs = output.loss_fn_outputs
    if len(outputs) != len(datums) or not all("logprobs" in row for row in outputs):
        return None
    rows = [np.asarray(row["logprobs"].to_numpy(), dtype=np.float32) for row in outputs]
    return [row[len(row) - len(datum.completion_ids_T) :] for row, datum in zip(rows, datums, strict=True)]
