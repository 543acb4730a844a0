"""What sharded ranks share: each must call every collective as often as the others, whatever its share of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from retrain.backends.local.learner import Size, Totals
from retrain.config import TrainConfig
from retrain.distributed.learner import RankedLearner
from retrain.errors import BackendError
from retrain.modeling.packing import length_of
from retrain.modeling.policy import Policy
from retrain.types import Datum

# A micro-batch that trains on nothing.
FILLER = Datum(
    prompt_ids=np.zeros(1, np.int64),
    completion_ids_T=np.zeros(1, np.int64),
    logprobs_T=np.zeros(1, np.float32),
    advantages_T=np.zeros(1),
    mask_T=np.zeros(1, bool),
)


class EvenLearner(RankedLearner):
    """A Learner whose passes are collectives. `mirror` is a whole policy to sample from and save, where needed here."""

    is_whole = False

    def __init__(self, policy: Policy, config: TrainConfig, say: Callable[[str], None], mirror: Policy | None) -> None:
        super().__init__(policy, config, say)
        self.mirror = mirror

    def warm_up(self, ways: set[str]) -> None:
        """Nothing: ranks may need it at different times, and a pass of one waits for all of them."""

    def wholes(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter that learns, by name and as a whole; every rank must go through all of them."""
        raise NotImplementedError

    @torch.no_grad()
    def whole_policy(self) -> Policy | None:
        """Gather the weights that learn into the mirror; every rank must call this."""
        own = dict(self.mirror.adapted.named_parameters()) if self.mirror is not None else {}
        for name, whole in self.wholes():
            if own:
                own[name].copy_(whole)
        return self.mirror

    def split(self, datums: Sequence[Datum]) -> list[list[Datum]]:
        """As many micro-batches as the rank with most of them has."""
        batches = super().split(datums)
        most = torch.tensor(len(batches), device=self.policy.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return [*batches, *([FILLER] for _ in range(int(most) - len(batches)))]

    def _backward_within_memory(self, datums: Sequence[Datum], size: Size) -> Totals:
        """Accumulate gradients. A rank that runs out of memory cannot start over, since the others wait for it."""
        self.memory.prepare(max((length_of(datum) for datum in datums), default=0))
        try:
            return self._backward(self.split(datums), size)
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"{self.policy.device} ran out of memory with micro-batches of {self.memory.micro_batch_tokens} "
                "tokens.  Try: a smaller [memory] micro_batch_tokens, or gradient_checkpointing = true"
            ) from error

    def save(self, path: Path) -> None:
        """Gather everything and let rank 0 write it, as a single process would."""
        policy, state = self.whole_policy(), self.state()
        if dist.get_rank() == 0:
            assert policy is not None
            policy.save_adapter(path / "adapter")
            save_file(state, str(path / "learner.safetensors"))
