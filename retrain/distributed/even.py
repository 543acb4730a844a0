"""What sharded ranks share: each must call every collective as often as the others, whatever its share of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from retrain.backends.local.learner import Learner, Size, Totals
from retrain.backends.local.packing import length_of
from retrain.errors import BackendError
from retrain.types import Datum

# A micro-batch that trains on nothing.
FILLER = Datum(
    prompt_ids=np.zeros(1, np.int64),
    completion_ids_T=np.zeros(1, np.int64),
    logprobs_T=np.zeros(1, np.float32),
    advantages_T=np.zeros(1),
    mask_T=np.zeros(1, bool),
)


def fill_up(batches: Sequence[list[Datum]], device: torch.device) -> list[list[Datum]]:
    """As many micro-batches as the rank with most of them has."""
    most = torch.tensor(len(batches), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [*batches, *([FILLER] for _ in range(int(most) - len(batches)))]


def backward_evenly(learner: Learner, datums: Sequence[Datum], size: Size) -> Totals:
    """Accumulate gradients. A rank that runs out of memory cannot start over, since the others wait for it."""
    learner.memory.prepare(max((length_of(datum) for datum in datums), default=0))
    try:
        return learner.accumulate(learner.split(datums), size)
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"{learner.policy.device} ran out of memory with micro-batches of {learner.memory.micro_batch_tokens} "
            "tokens.  Try: a smaller [memory] micro_batch_tokens, or gradient_checkpointing = true"
        ) from error
