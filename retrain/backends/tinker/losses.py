"""Our losses in the service's terms.

The service sums over tokens where we average, so advantages are divided by our denominator before they are sent: loss,
gradient and update are then those of the local backend on the same data, but for a `ratio_cap` that the service lacks.
Log-probs are raw on both sides, whatever the temperature: the ratio compares one distribution with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import tinker
from tinker import types

from retrain.backends.tinker.service_loss import ServiceLoss, service_loss
from retrain.config.schema import Loss
from retrain.errors import BackendError
from retrain.types import Datum, FloatArray, StepMetrics

MAX_LOG_RATIO = 20.0


def denominator(loss: Loss, datums: Sequence[Datum], max_tokens: int) -> float:
    """What the service's sum has to be divided by."""
    if loss.type == "dr_grpo":
        return float(len(datums) * max_tokens)
    return float(sum(int(datum.mask_T.sum()) for datum in datums))


def to_service(datum: Datum, divisor: float, wanted: ServiceLoss) -> types.Datum:
    """A row as the service takes it: inputs are all tokens but the last, targets all but the first."""
    tokens = np.concatenate([datum.prompt_ids, datum.completion_ids_T]).astype(np.int64)
    before = len(datum.prompt_ids) - 1
    mask = datum.mask_T.astype(np.float32)

    def aligned(values_T: FloatArray) -> FloatArray:
        # Prompt positions predict tokens that nobody sampled: zero advantage keeps them out of the loss.
        return np.concatenate([np.zeros(before, np.float32), np.where(datum.mask_T, values_T, 0.0).astype(np.float32)])

    inputs = {
        "target_tokens": types.TensorData.from_numpy(tokens[1:]),
        "logprobs": types.TensorData.from_numpy(aligned(datum.logprobs_T)),
        "advantages": types.TensorData.from_numpy(aligned(datum.advantages_T / divisor)),
    }
    if wanted.needs_mask:
        inputs["sequence_ratio_mask"] = types.TensorData.from_numpy(aligned(mask))
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def step_metrics(
    loss: Loss, datums: Sequence[Datum], logprobs: Sequence[FloatArray] | None, reported: float | None, divisor: float
) -> StepMetrics:
    """Loss and ratios of a step, from the log-probs and the loss that the service computed on the way, if it tells."""
    if logprobs is None:
        if reported is None:
            raise BackendError(
                "the Tinker service returned neither a loss nor log-probs, so nothing is known of the step."
            )
        return {"loss": reported, "ratio_mean": None, "ratio_max": None, "kl_sample_train": None}
    objective, log_ratios = 0.0, []
    for ours, datum in zip(logprobs, datums, strict=True):
        current, advantages = ours[datum.mask_T].astype(np.float64), datum.advantages_T[datum.mask_T]
        log_ratio = (current - datum.logprobs_T[datum.mask_T]).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        objective += float(_objective(loss, log_ratio, current, advantages).sum())
        log_ratios.append(log_ratio)
    log_ratio = np.concatenate(log_ratios)
    ratio = np.exp(log_ratio)
    return {
        "loss": reported if reported is not None and service_loss(loss).reports_ours else -objective / divisor,
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        # As the local backend estimates it: E_sampled[r - 1 - log r].
        "kl_sample_train": float((ratio - 1 - log_ratio).mean()),
    }


def _objective(loss: Loss, log_ratio: FloatArray, logprobs: FloatArray, advantages: FloatArray) -> FloatArray:
    """The value of `[loss] type` at each token of a row; services may report none, or that of a stand-in."""
    ratio = np.exp(log_ratio.mean() if loss.type == "gspo" else log_ratio)
    if loss.type == "importance_sampling":
        return np.minimum(ratio, loss.ratio_cap or np.inf) * advantages
    clipped = np.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
    if loss.type == "cispo":
        return clipped * advantages * logprobs
    return np.minimum(ratio * advantages, clipped * advantages)


def cancelling(loss: Loss, datum: Datum, own_T: FloatArray) -> Datum:
    """A row whose gradient under importance_sampling is minus that of `datum` under `loss`; `own_T` are log-probs now.

    Every loss moves a token by some weight times the gradient of its log-prob. At a ratio of 1 that weight is the
    advantage, so what was added up on the service can be taken back.
    """
    log_ratio_T = np.where(datum.mask_T, own_T - datum.logprobs_T, 0.0).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if loss.type == "gspo":
        log_ratio_T = np.full_like(log_ratio_T, log_ratio_T.sum() / max(1, int(datum.mask_T.sum())))
    ratio_T, advantages_T = np.exp(log_ratio_T), datum.advantages_T
    clipped_T = np.clip(ratio_T, 1 - loss.clip_low, 1 + loss.clip_high)
    if loss.type == "importance_sampling":
        weight_T = np.minimum(ratio_T, loss.ratio_cap or np.inf) * advantages_T
    elif loss.type == "cispo":
        weight_T = clipped_T * advantages_T
    else:
        weight_T = np.where(ratio_T * advantages_T <= clipped_T * advantages_T, ratio_T * advantages_T, 0.0)
    return replace(datum, logprobs_T=own_T, advantages_T=-weight_T)


def completion_logprobs(datums: Sequence[Datum], output: tinker.ForwardBackwardOutput) -> list[FloatArray] | None:
    """The trained policy's log-prob of each completion token, where the service tells."""
    told = output.loss_fn_outputs
    if len(told) != len(datums) or not all("logprobs" in row for row in told):
        return None
    rows = [np.asarray(row["logprobs"].to_numpy(), dtype=np.float32) for row in told]
    return [row[len(row) - len(datum.completion_ids_T) :] for row, datum in zip(rows, datums, strict=True)]
