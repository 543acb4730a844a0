"""Sharded learners: every rank must call each collective equally often, whatever its share of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from retrain.backends.local.learner import StepSize, Totals
from retrain.config import TrainConfig
from retrain.distributed.learner import RankedLearner
from retrain.errors import BackendError
from retrain.modeling.packing import length_of
from retrain.modeling.policy import Policy
from retrain.types import Datum

# Padding micro-batch without trainable tokens.
FILLER = Datum(
    prompt_ids=np.zeros(1, np.int64),
    completion_ids_T=np.zeros(1, np.int64),
    logprobs_T=np.zeros(1, np.float32),
    advantages_T=np.zeros(1),
    mask_T=np.zeros(1, bool),
)


class LockstepLearner(RankedLearner):
    """A Learner whose passes are collectives. `mirror`: a full policy to sample from and save, where needed."""

    is_replicated = False

    def __init__(self, policy: Policy, config: TrainConfig, log: Callable[[str], None], mirror: Policy | None) -> None:
        super().__init__(policy, config, log)
        self.mirror = mirror

    def warm_up(self, ways: set[str]) -> None:
        """Nothing: ranks would warm up at different times, and each pass waits for all of them."""

    def gathered_params(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable parameter by name, gathered; every rank must iterate over all of them."""
        raise NotImplementedError

    @torch.no_grad()
    def gathered_policy(self) -> Policy | None:
        """Gather the trainable weights into the mirror; every rank must call this."""
        own = dict(self.mirror.adapted.named_parameters()) if self.mirror is not None else {}
        for name, full in self.gathered_params():
            if own:
                own[name].copy_(full)
        return self.mirror

    def split(self, datums: Sequence[Datum]) -> list[list[Datum]]:
        """Micro-batches, padded to the largest count of any rank."""
        batches = super().split(datums)
        most = torch.tensor(len(batches), device=self.policy.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return [*batches, *([FILLER] for _ in range(int(most) - len(batches)))]

    def _backward_within_memory(self, datums: Sequence[Datum], size: StepSize) -> Totals:
        """Accumulate gradients. A rank that runs out of memory cannot retry, since the others wait for it."""
        self.memory.prepare(max((length_of(datum) for datum in datums), default=0))
        try:
            return self._backward(self.split(datums), size)
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"{self.policy.device} ran out of memory with micro-batches of {self.memory.micro_batch_tokens} "
                "tokens.  Try: a smaller [memory] micro_batch_tokens, or gradient_checkpointing = true"
            ) from error

    def save(self, path: Path) -> None:
        """Gather everything; rank 0 writes what a single process would."""
        policy, state = self.gathered_policy(), self.state()
        if dist.get_rank() == 0:
            assert policy is not None
            policy.save_adapter(path / "adapter")
            save_file(state, str(path / "learner.safetensors"))
