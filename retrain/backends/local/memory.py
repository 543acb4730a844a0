"""Plans micro-batches from the model's shape and free memory, and corrects the plan by measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from retrain.capacity.memory import (
    MICRO_BATCH,
    PROMPT_TOKENS,
    SPARE,
    TrainingCost,
    TrainingPlan,
    plan_training,
    read_shape,
    wanted_training,
)
from retrain.config.schema import Memory, TrainConfig
from retrain.modeling.policy import Policy
from retrain.types import JsonObject

GIB = 2**30
# On the CPU small micro-batches are as fast; memory is not measured there.
CPU_MICRO_BATCH = 8192


def training_bytes(policy: Policy, config: TrainConfig) -> int:
    """Memory that training wants beside the weights; 0 where it is not measured, or on another device."""
    if policy.device.type != "cuda" or "," in config.backend.devices:
        return 0
    shape = read_shape(policy.causal_lm.config.to_dict())
    if shape is None:
        return 0
    cost, options = TrainingCost(shape, policy.rank, policy.dtype.itemsize), config.memory
    trained = sum(parameter.numel() for parameter in policy.adapted.parameters() if parameter.requires_grad)
    longest = config.training.max_tokens + (config.training.max_prompt_tokens or PROMPT_TOKENS)
    return wanted_training(
        cost,
        sum(_of_this_process(policy.device)),
        longest,
        trained,
        options.micro_batch_tokens,
        options.gradient_checkpointing,
    )


def _of_this_process(device: torch.device) -> tuple[int, int]:
    """What is free on the device, and what PyTorch has of it: others may use the device, too."""
    return torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)


class StepMemory:
    """Size of micro-batches and number of recomputed layers; changed only when necessary."""

    def __init__(self, policy: Policy, options: Memory, log: Callable[[str], None]) -> None:
        self.device, self.log, self.options = policy.device, log, options
        self.layers = policy.layers
        self.micro_batch_tokens = options.micro_batch_tokens or (
            MICRO_BATCH if self.device.type == "cuda" else CPU_MICRO_BATCH
        )
        self.recomputed_layers = self.layers if options.gradient_checkpointing else 0
        self.planned_for = 0
        """Longest sequence of the current plan."""
        self.planned_room = 0.0
        """Bytes free for a micro-batch at the first plan; later plans use the same number."""
        shape = read_shape(policy.causal_lm.config.to_dict()) if self.device.type == "cuda" else None
        self.cost = TrainingCost(shape, policy.rank, policy.dtype.itemsize) if shape is not None else None
        self.measured = False
        self.reclaim: Callable[[], None] = lambda: None
        """Makes the sampler free what it holds between batches; called only when memory is short."""

    def prepare(self, longest: int, pending: int = 0) -> None:
        """Plan for sequences of up to `longest` tokens; the optimizer has yet to allocate `pending` bytes.

        Free memory is measured once: plans that followed it would make a run depend on what else happens on the
        device.
        """
        if self.cost is None:
            return
        if longest <= self.planned_for:
            self._claim(self.cost.bytes(self.micro_batch_tokens, self.recomputed_layers))
            return
        first, self.planned_for = not self.planned_for, longest
        if not self.planned_room:
            # Larger micro-batches are not worth the sampler's memory.
            self._claim(self._plan(self.cost, math.inf, MICRO_BATCH).bytes + pending)
            self.planned_room = self.room() - pending
        plan = self._plan(self.cost, self.planned_room)
        self._claim(plan.bytes)
        if first or (plan.micro_batch_tokens, plan.recomputed_layers) != (
            self.micro_batch_tokens,
            self.recomputed_layers,
        ):
            self._adopt(plan, self.cost)

    def _claim(self, needed: float) -> None:
        """Get this much room, if the sampler can free it."""
        if self.room() < needed:
            self.reclaim()

    def _plan(self, cost: TrainingCost, room: float, wanted: int = 0) -> TrainingPlan:
        o = self.options
        return plan_training(cost, room, self.planned_for, o.micro_batch_tokens or wanted, o.gradient_checkpointing)

    def _adopt(self, plan: TrainingPlan, cost: TrainingCost) -> None:
        self.micro_batch_tokens, self.recomputed_layers = plan.micro_batch_tokens, plan.recomputed_layers
        self.log(
            f"Memory plan: micro-batches of {plan.micro_batch_tokens} tokens, {plan.recomputed_layers or 'none'} of "
            f"{self.layers} layers recomputed: about {plan.bytes / GIB:.1f} GiB of activations "
            f"({cost.layer * self.layers / 2**20:.2f} MiB per token), {max(self.planned_room, 0) / GIB:.1f} GiB free."
        )

    def room(self) -> float:
        """Bytes available to a micro-batch: free on the device and in the allocator, less a margin."""
        free, reserved = _of_this_process(self.device)
        return free + reserved - torch.cuda.memory_allocated(self.device) - SPARE * (free + reserved)

    @contextmanager
    def watch(self, tokens: int) -> Iterator[None]:
        """Measure the peak of the first micro-batches, and replan if the estimate was too low."""
        if self.cost is None or self.measured:
            yield
            return
        before, peak_before = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        yield
        peak = torch.cuda.max_memory_allocated(self.device)
        # Peaks are not reset, since others read them; an earlier peak of sampling is no measurement.
        if peak > peak_before:
            self.correct(tokens, peak - before)

    def correct(self, tokens: int, measured: int) -> None:
        """Correct the estimate by the measured peak of a micro-batch."""
        assert self.cost is not None
        self.measured = True
        logits = self.cost.logits(tokens)
        ratio = (measured - logits) / (self.cost.bytes(tokens, self.recomputed_layers) - logits)
        self.cost = replace(self.cost, correction=self.cost.correction * min(max(ratio, 0.25), 4.0))
        plan = self._plan(self.cost, self.planned_room)
        # A plan that works stays, even if there is more room than estimated.
        if plan.micro_batch_tokens < self.micro_batch_tokens or plan.recomputed_layers > self.recomputed_layers:
            self._adopt(plan, self.cost)

    def shrink(self, longest: int) -> bool:
        """Halve micro-batches after an out-of-memory error, then recompute all layers; False if neither helps."""
        self.reclaim()
        if self.micro_batch_tokens > longest:
            self.micro_batch_tokens = max(self.micro_batch_tokens // 2, longest)
            self.log(f"Out of memory; continuing with micro-batches of {self.micro_batch_tokens} tokens.")
        elif self.recomputed_layers < self.layers:
            self.recomputed_layers = self.layers
            self.log("Out of memory; continuing with activations recomputed in every layer.")
        else:
            return False
        return True

    def state(self) -> JsonObject:
        """Sizes that rounding depends on: other micro-batches are summed in another order."""
        return {
            "options": self._fixed_by_user(),
            "micro_batch_tokens": self.micro_batch_tokens,
            "recomputed_layers": self.recomputed_layers,
            "planned_for": self.planned_for,
            "planned_room": self.planned_room,
            "correction": self.cost.correction if self.cost is not None else 1.0,
            "measured": self.measured,
        }

    def load(self, state: JsonObject) -> None:
        """Restore the sizes of an earlier process, unless the options have changed."""
        if state["options"] != self._fixed_by_user():
            return
        self.micro_batch_tokens, self.recomputed_layers = state["micro_batch_tokens"], state["recomputed_layers"]
        self.planned_for, self.planned_room = state["planned_for"], state["planned_room"]
        self.measured = state["measured"]
        if self.cost is not None:
            self.cost = replace(self.cost, correction=state["correction"])

    def _fixed_by_user(self) -> list[int]:
        return [self.options.micro_batch_tokens, int(self.options.gradient_checkpointing)]

    def explain(self, longest: int) -> str:
        """Why a sequence does not fit, with numbers."""
        message = (
            f"one sequence of {longest} tokens does not fit into the memory of {self.device}, all layers recomputed"
        )
        if self.cost is not None:
            needed, room = self.cost.bytes(longest, self.layers), max(self.room(), 0)
            message += (
                f": it needs about {self.layers} layers × {longest} tokens × {self.cost.boundary / 1024:.1f} KiB of "
                f"layer inputs and {self.cost.layer * longest / GIB:.1f} GiB for the active layer, "
                f"{needed / GIB:.1f} GiB with the logits; {room / GIB:.1f} GiB are free"
            )
        return (
            f"{message}.  Try: a smaller [training] max_tokens, or fewer completions per step, for a smaller KV cache."
        )
