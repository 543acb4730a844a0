"""DeepSpeed ZeRO: stage 1 shards the optimiser, stage 3 the weights too; either may lie in main memory.

DeepSpeed runs the passes, sums gradients and moves the weights; loss, micro-batches and checkpoints are as everywhere.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from retrain.backends.local.optimizer import MasterOptimizer
from retrain.backends.local.reference import Reference
from retrain.backends.local.trainable import TrainableParams
from retrain.config import TrainConfig
from retrain.config.schema import Kl
from retrain.distributed.lockstep import LockstepLearner
from retrain.errors import MissingExtraError
from retrain.modeling.packing import MicroBatch, packed_logprobs
from retrain.modeling.policy import Policy
from retrain.modeling.sampling import training_distribution
from retrain.types import Datum, Sampling

MOMENTS = ("exp_avg", "exp_avg_sq")


def import_deepspeed(device: torch.device) -> Any:
    """The package, for this kind of device."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
    # DeepSpeed calls collectives by names that PyTorch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    try:
        import deepspeed  # noqa: PLC0415  (an optional extra)
    except ImportError as error:
        raise MissingExtraError(
            '[distributed] zero_stage needs DeepSpeed, which is not installed.  Try: pip install -e ".[distributed]"'
        ) from error
    return deepspeed


def engine_config(config: TrainConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What DeepSpeed is metrics. Batch sizes are a formality: micro-batches are ours, and so is their number."""
    own = config.distributed
    zero: dict[str, Any] = {"stage": own.zero_stage}
    if own.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if own.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    if own.zero_stage == 3:
        # Nothing stays gathered but what is named below: a reference that is put in place must be seen everywhere.
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.loss.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "wall_clock_breakdown": False,
    }


class Pass(nn.Module):
    """The forward pass of a micro-batch as a module, for DeepSpeed to hang its hooks on."""

    def __init__(self, policy: Policy, sampling: Sampling) -> None:
        super().__init__()
        self.adapted = policy.adapted
        self.policy = policy
        self.sampling = sampling

    def forward(self, packed: MicroBatch) -> Tensor:
        """Log-probs of its completion tokens."""
        return packed_logprobs(self.policy, packed, self.sampling)


class ZeroOptimizer(MasterOptimizer):
    """DeepSpeed's engine in an optimizer's place."""

    def __init__(self, policy: Policy, config: TrainConfig, trained: TrainableParams) -> None:
        self.trainable = trained
        self.names = list(self.trainable.shards)
        self.parameters = list(self.trainable.shards.values())
        self.masters: list[nn.Parameter] = []
        self.stage = config.distributed.zero_stage
        self.deepspeed = import_deepspeed(policy.device)
        self.adam = torch.optim.AdamW(
            self.parameters,
            lr=config.training.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
            weight_decay=config.training.weight_decay,
        )
        self.engine: Any = self.deepspeed.initialize(
            model=Pass(policy, training_distribution(config)),
            optimizer=self.adam,
            config=engine_config(config, policy.dtype),
            dist_init_required=False,
        )[0]
        policy.adapted.eval()
        if self.stage == 3:
            self._keep_whole(policy)
        self._begin_state()

    def _keep_whole(self, policy: Policy) -> None:
        """Keep the head on every rank: it is used a slice of tokens at a time, on some ranks more often than others."""
        zero = self.engine.optimizer
        for parameter in policy.causal_lm.get_output_embeddings().parameters():
            parameter.ds_persist = True  # type: ignore[attr-defined]
            zero.persistent_parameters.append(parameter)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _begin_state(self) -> None:
        """Moments of zero at step zero, so that they can be read and set before the first step."""
        inner = self.engine.optimizer.optimizer
        for group in inner.param_groups:
            for master in group["params"]:
                state = {key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS}
                inner.state[master] = {"step": torch.tensor(0.0), **state}

    def clear(self) -> None:
        """Forget gradients."""
        self.engine.optimizer.zero_grad()

    def gather(self) -> None:
        """DeepSpeed has taken the gradients as they came."""

    def round(self) -> None:
        """DeepSpeed rounds as it steps."""

    def step(self, lr: float) -> float | None:
        """Clip and move; returns the norm before clipping, or None when it is not finite and nothing moved."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        return norm if math.isfinite(norm) else None

    @property
    def steps(self) -> Tensor:
        """How many there have been."""
        return next(iter(self.engine.optimizer.optimizer.state.values()))["step"]  # type: ignore[no-any-return]

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, on the CPU; every rank must call this."""
        utils = self.deepspeed.utils
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trainable.parameters.items():
            shape = self.trainable.shapes[name]
            tensors[f"parameter/{name}"] = utils.safe_get_full_fp32_param(parameter).detach().cpu().view(shape)
            if not self.steps:
                continue
            tensors[f"step/{name}"] = self.steps.cpu().clone()
            for key in MOMENTS:
                moment = utils.safe_get_full_optimizer_state(parameter, key)
                tensors[f"{key}/{name}"] = moment.detach().cpu().view(shape).clone()
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave, or a single process."""
        utils, device = self.deepspeed.utils, self.parameters[0].device
        for name, parameter in self.trainable.parameters.items():
            whole = tensors[f"parameter/{name}"].to(device)
            with self.gathered([parameter], modified=True):
                parameter.data.copy_(whole)
            utils.safe_set_full_fp32_param(parameter, whole)
            for key in MOMENTS:
                known = tensors.get(f"{key}/{name}")
                value = known.to(device) if known is not None else torch.zeros_like(whole)
                utils.safe_set_full_optimizer_state(parameter, value, key)
        first = f"step/{self.names[0]}"
        for state in self.engine.optimizer.optimizer.state.values():
            state["step"].copy_(tensors[first] if first in tensors else torch.tensor(0.0))

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], modified: bool = False) -> Iterator[None]:
        """Have parameters whole for a while; every rank must call this."""
        if self.stage != 3:
            yield
            return
        with self.deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if modified else None):
            yield


class ZeroTrained(TrainableParams):
    """Parameters whose shapes are kept from before DeepSpeed emptied them."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.before = {name: parameter.shape for name, parameter in self.parameters.items()}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each whole."""
        return self.before


class ZeroReference(Reference):
    """The base model under stage 3: the adapter is scaled to nothing, so that no sharded tensor is touched."""

    def __init__(self, policy: Policy, kl: Kl, offload: bool, trained: TrainableParams) -> None:
        self.kl, self.names, self.parameters, self.tensors = kl, [], [], []
        self.layers = [module for module in policy.adapted.modules() if isinstance(module, LoraLayer)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the policy be the reference for a while."""
        own = [layer.scaling["default"] for layer in self.layers]
        try:
            for layer in self.layers:
                layer.scaling["default"] = 0.0
            with torch.no_grad():
                yield
        finally:
            for layer, scaling in zip(self.layers, own, strict=True):
                layer.scaling["default"] = scaling


class ZeroLearner(LockstepLearner):
    """A Learner whose passes and steps are DeepSpeed's."""

    make_trainable = ZeroTrained
    make_optimizer = ZeroOptimizer
    optimizer: ZeroOptimizer

    def __init__(self, policy: Policy, config: TrainConfig, log: Callable[[str], None], mirror: Policy | None) -> None:
        if config.distributed.zero_stage == 3:
            self.make_reference = ZeroReference
        super().__init__(policy, config, log, mirror)
        self.left = 0
        """Micro-batches of the step that are still to come."""

    def replicated(self) -> list[nn.Parameter]:
        """None: DeepSpeed sums gradients."""
        return []

    def split(self, datums: Sequence[Datum]) -> list[list[Datum]]:
        """As many micro-batches as any rank has; they are counted down as they are trained on."""
        batches = super().split(datums)
        self.left = len(batches)
        return batches

    def logprobs(self, packed: MicroBatch) -> Tensor:
        """Log-probs of the completion tokens under the policy now."""
        self.optimizer.engine.set_gradient_accumulation_boundary(self.left == 1)
        logprobs: Tensor = self.optimizer.engine(packed)
        return logprobs

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed takes the mean over the ranks where a sum is wanted."""
        self.optimizer.engine.backward(loss * dist.get_world_size())
        self.left -= 1

    def gathered_policy(self) -> Policy | None:
        """The mirror, or under stage 1, which has the weights whole, the policy itself."""
        return super().gathered_policy() if self.optimizer.stage == 3 else self.policy

    def gathered_params(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter that learns, gathered while it is looked at."""
        for name, parameter in self.trainable.parameters.items():
            with self.optimizer.gathered([parameter]):
                yield name, parameter.data
