"""One optimiser step: micro-batches that fit, gradients checked, weights moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.backends.local.compiling import compile_layers
from retrain.backends.local.loss import TokenBatch, denominator, summed_loss
from retrain.backends.local.memory import StepMemory
from retrain.backends.local.model import Policy
from retrain.backends.local.optimizer import AdapterOptimizer
from retrain.backends.local.packing import Load, MicroBatch, length_of, pack, packed_logprobs, split_by_tokens
from retrain.backends.local.prefix import takes_uneven_lengths
from retrain.config import TrainConfig
from retrain.errors import BackendError
from retrain.sampling import training_distribution
from retrain.types import Datum, StepMetrics


@dataclass(frozen=True)
class Size:
    """How much a whole step trains on, of which one process may have a share."""

    tokens: int
    rows: int

    @classmethod
    def of(cls, datums: Sequence[Datum]) -> Size:
        """That of these datums."""
        return cls(sum(int(datum.mask_T.sum()) for datum in datums), len(datums))


class Learner:
    """The policy's optimiser and everything it needs to take a step."""

    def __init__(self, policy: Policy, config: TrainConfig, say: Callable[[str], None]) -> None:
        self.policy = policy
        self.loss = config.loss
        self.max_tokens = config.training.max_tokens
        self.sampling = training_distribution(config)
        self.memory = StepMemory(policy, config.memory, say)
        if policy.device.type == "cuda":
            # Every layer then sees inputs that want gradients, the first like the rest: one compiled variant, not two.
            policy.causal_lm.enable_input_require_grads()
        # Layers are able to recompute from the start; `_train_mode` says which of them do.
        policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.layers = [m for m in policy.adapted.modules() if isinstance(m, GradientCheckpointingLayer)]
        if policy.device.type == "cuda" and not policy.own_attention:
            compile_layers(policy.causal_lm)
        self.optimizer = AdapterOptimizer(policy, config)
        self.packs_tightly = takes_uneven_lengths(policy)

    def step(self, datums: Sequence[Datum], step: int = 0) -> StepMetrics:
        """Forward, backward and update over all datums."""
        usable = [datum for datum in datums if datum.mask_T.any()]
        return self.take_step(usable, Size.of(usable), step)

    def take_step(self, datums: Sequence[Datum], size: Size, step: int) -> StepMetrics:
        """The same over datums that are the whole step, or a share of one of this size."""
        if not size.rows:
            return {
                "loss": 0.0,
                "grad_norm": 0.0,
                "ratio_mean": None,
                "ratio_max": None,
                "kl_sample_train": None,
                "skipped": 0,
            }
        totals = self._backward_within_memory(datums, size)
        self.share(totals)
        norm = self.optimizer.step()
        return {**totals.metrics(), "grad_norm": norm, "skipped": int(norm is None)}

    def share(self, totals: Totals) -> None:
        """Add gradients and totals up over the processes of a run; here there is one."""

    def _backward_within_memory(self, datums: Sequence[Datum], size: Size) -> Totals:
        """Accumulate gradients; when memory runs out, start over with less of it at once."""
        longest = max((length_of(datum) for datum in datums), default=0)
        self.memory.prepare(longest)
        while True:
            try:
                return self._backward(self.split(datums), size)
            except torch.OutOfMemoryError as error:
                if not self.memory.shrink(longest):
                    raise BackendError(self.memory.explain(longest)) from error
            # Outside the handler, whose traceback would keep the failed pass's tensors alive.
            self.optimizer.clear()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()

    def split(self, datums: Sequence[Datum]) -> list[list[Datum]]:
        """Micro-batches by what they cost here: flash attention takes uneven lengths as they are, others pad."""
        return split_by_tokens(datums, self.memory.micro_batch_tokens, Load.fed if self.packs_tightly else Load.padded)

    def pack(self, datums: Sequence[Datum]) -> MicroBatch:
        """One micro-batch; prompts are shared unless the model attends by itself."""
        penalised = self.sampling.repetition_penalty != 1.0
        return pack(datums, self.policy.device, penalised, share=not self.policy.own_attention)

    def _backward(self, batches: Sequence[Sequence[Datum]], size: Size) -> Totals:
        self.optimizer.clear()
        self._train_mode(True)
        divisor = denominator(self.loss, size.tokens, size.rows, self.max_tokens)
        totals = Totals(self.policy.device)
        # All at once, before the GPU has work: a copy to it would wait for the micro-batch under way.
        for packed in [self.pack(batch) for batch in batches]:
            with self.memory.watch(packed.token_ids.shape[1]):
                logprobs = self.logprobs(packed)
                token_batch = TokenBatch(
                    logprobs, packed.sampled_logprobs, packed.advantages, packed.mask, packed.row, packed.rows
                )
                loss = summed_loss(token_batch, self.loss) / divisor
                loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.gather()
            totals.add(loss.detach(), logprobs.detach() - packed.sampled_logprobs, packed.mask)
        self._train_mode(False)
        return totals

    def _train_mode(self, on: bool) -> None:
        """Switch on what training needs and no more: a base model's own dropout would make it another policy."""
        for module in self.policy.adapted.modules():
            if isinstance(module, LoraLayer):
                module.lora_dropout.train(on)
        # A layer recomputes only while it believes to be training. The first ones do: when their turn comes in the
        # backward pass, what the others kept has gone.
        for number, layer in enumerate(self.layers):
            layer.training = on and number < self.memory.recomputed_layers

    def logprobs(self, packed: MicroBatch) -> Tensor:
        """Log-probs of the completion tokens under the policy now."""
        return packed_logprobs(self.policy, packed, self.sampling)

    def save(self, path: Path) -> None:
        """Write adapter and optimiser state into a folder."""
        self.policy.save_adapter(path / "adapter")
        save_file(self.optimizer.state(), str(path / "learner.safetensors"))

    def load(self, path: Path) -> None:
        """Restore adapter and optimiser state, to the bit."""
        tensors = load_file(str(path / "learner.safetensors"))
        own = {f"parameter/{n}": m.shape for n, m in zip(self.optimizer.names, self.optimizer.masters, strict=True)}
        if {name: tensor.shape for name, tensor in tensors.items() if name.startswith("parameter/")} != own:
            raise BackendError("the saved adapter has other layers than this model; was it trained on another one?")
        self.optimizer.load(tensors)


class Totals:
    """Sums over the micro-batches of a step, left on the device until the end so that none of them is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        """Loss, ratios, divergence, tokens."""
        self.largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, log_ratio: Tensor, mask: Tensor) -> None:
        taken, chosen = mask > 0, log_ratio.double().clamp(-20, 20)
        ratio = torch.where(taken, chosen.exp(), 0.0)
        # E_sampled[r - 1 - log r] estimates KL(sampled || trained) without bias and never below zero.
        divergence = torch.where(taken, ratio - 1 - chosen, 0.0)
        self.sums += torch.stack([loss.double(), ratio.sum(), divergence.sum(), taken.sum()])
        self.largest = torch.maximum(self.largest, ratio.max())

    def metrics(self) -> StepMetrics:
        loss, ratios, divergence, tokens = self.sums.tolist()
        return {
            "loss": loss,
            "ratio_mean": ratios / tokens,
            "ratio_max": float(self.largest),
            "kl_sample_train": divergence / tokens,
        }
