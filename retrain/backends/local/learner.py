"""One optimiser step: micro-batches that fit, gradients checked, weights moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.backends.local.loss import divergence, summed_loss
from retrain.backends.local.memory import StepMemory
from retrain.backends.local.optimizer import MasterOptimizer
from retrain.backends.local.reference import Reference
from retrain.backends.local.trained import Trained
from retrain.capacity.memory import MICRO_BATCH
from retrain.checks.agreement import Agreement, Finding, Gaps
from retrain.config import TrainConfig
from retrain.errors import BackendError
from retrain.losses import build_loss
from retrain.losses.batch import TokenBatch
from retrain.modeling.compiling import WARM_UP_TOKENS, compile_layers, datums_for_warm_up
from retrain.modeling.determinism import Determinism, sum_by_row
from retrain.modeling.packing import Load, MicroBatch, length_of, pack, packed_logprobs, split_by_tokens
from retrain.modeling.policy import Policy
from retrain.modeling.prefix import takes_uneven_lengths
from retrain.modeling.sampling import training_distribution
from retrain.schedules.learning_rate import learning_rate
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
    """The policy's optimiser and everything it needs to take a step.

    Where several processes train together, the methods and classes named first are their own.
    """

    make_trained: type[Trained] = Trained
    make_optimizer: type[MasterOptimizer] = MasterOptimizer
    make_reference: type[Reference] = Reference

    def __init__(self, policy: Policy, config: TrainConfig, say: Callable[[str], None]) -> None:
        self.policy = policy
        self.config = config
        self.say = say
        self.loss = build_loss(config.loss, config.plugins.search_paths)
        self.max_tokens = config.training.max_tokens
        self.sampling = training_distribution(config)
        self.memory = StepMemory(policy, config.memory, say)
        self.determinism = Determinism(config.training.deterministic, policy, say)
        if policy.device.type == "cuda":
            # Every layer then sees inputs that want gradients, the first like the rest: one compiled variant, not two.
            policy.causal_lm.enable_input_require_grads()
        # Layers are able to recompute from the start; `_train_mode` says which of them do.
        policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.layers = [m for m in policy.adapted.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.is_compiled = policy.device.type == "cuda" and not policy.own_attention
        if self.is_compiled:
            compile_layers(policy.causal_lm)
        self.warm: set[str] = set()
        """Ways of running the layers that have been compiled for the shapes of `warm_up`."""
        self.trained = self.make_trained(policy)
        self.optimizer = self.make_optimizer(policy, config, self.trained)
        offload = config.memory.offload_untrained_models
        self.reference = self.make_reference(policy, config.kl, offload, self.trained) if config.kl.beta else None
        self.packs_tightly = takes_uneven_lengths(policy)
        self.agreement: Agreement | None = None
        """What compares the sampler's log-probs with ours; nothing does where the caller makes them up."""
        self.finding: Finding | None = None
        """What it found in the last step."""

    def step(self, datums: Sequence[Datum], step: int = 0, staleness: int = 0) -> StepMetrics:
        """Forward, backward and update over all datums; the learning rate is that of the run's `step`.

        `staleness` counts the updates since the datums were sampled.
        """
        told = self.take_step(datums, Size.of([datum for datum in datums if datum.mask_T.any()]), step, staleness)
        self.refuse_disagreement()
        return told

    def refuse_disagreement(self) -> None:
        """Raise where the last step was not applied, since sampler and trainer disagreed."""
        if self.finding is not None and self.finding.refused:
            raise self.finding.error()

    def take_step(self, datums: Sequence[Datum], size: Size, step: int, staleness: int = 0) -> StepMetrics:
        """The same over datums that are the whole step, or this process's share of a step of that size.

        A step that is refused moves nothing; whoever called finds out with `refuse_disagreement`.
        """
        lr = learning_rate(self.config, step)
        told: StepMetrics = {"loss": 0.0, "ratio_mean": None, "ratio_max": None, "kl_sample_train": None}
        norm: float | None = 0.0
        usable = [datum for datum in datums if datum.mask_T.any()]
        looked_at = self._look_at([datum for datum in datums if datum.check_T is not None])
        self.finding = None
        if size.rows:
            told = self._agreed_gradients(usable, size, looked_at, staleness)
        elif self.agreement is not None and looked_at is not None:
            self.finding = self.agreement.judge(Gaps.between([], []), looked_at, staleness)
        if self.finding is not None and self.finding.refused:
            self.optimizer.clear()
            return told
        if size.rows:
            norm = self.optimizer.step(lr)
        if self.reference is not None:
            self.reference.follow(step)
        told |= self.finding.metrics() if self.finding is not None else {}
        return {**told, "lr": lr, "grad_norm": norm, "skipped": int(norm is None)}

    def _agreed_gradients(
        self, datums: Sequence[Datum], size: Size, looked_at: Gaps | None, staleness: int
    ) -> StepMetrics:
        """Gradients of the rows that sampler and trainer agree on; rows that they do not are left out, as zeros."""
        totals = self._backward_within_memory(datums, size)
        self.share(totals)
        if self.agreement is None:
            return totals.metrics()
        self.finding, own = self.judge(self.agreement, totals.gaps(), looked_at, staleness)
        if self.finding.excluded and not self.finding.refused:
            off = {id(datum) for datum, out in zip(totals.datums, self.finding.left_out[own], strict=True) if out}
            totals = self._backward_within_memory([datum for datum in datums if id(datum) not in off], size)
            self.share(totals)
        told = totals.metrics()
        shift = self.agreement.shift(told, totals.tokens, staleness)
        if not self.finding.refused and self.finding.gaps.are_all_sampled:
            self.finding = replace(self.finding, shift=shift)
        return told

    @torch.no_grad()
    def _look_at(self, datums: Sequence[Datum]) -> Gaps | None:
        """Compare rows that are not trained on."""
        if self.agreement is None or not datums:
            return None
        self.warm_up({"looking"})
        own: dict[int, np.ndarray] = {}
        for batch in split_by_tokens(datums, MICRO_BATCH):
            values = self.logprobs(self.pack(batch)).float().cpu().numpy()
            parts = np.split(values, np.cumsum([len(datum.completion_ids_T) for datum in batch])[:-1])
            own |= {id(datum): part for datum, part in zip(batch, parts, strict=True)}
        return Gaps.between(datums, [own[id(datum)] for datum in datums])

    def judge(self, agreement: Agreement, own: Gaps, looked_at: Gaps | None, staleness: int) -> tuple[Finding, slice]:
        """What the gaps of all processes come to, and which of them are this one's; here there is one process."""
        return agreement.judge(own, looked_at, staleness), slice(0, len(own.tokens))

    def share(self, totals: Totals) -> None:
        """Add gradients and totals up over the processes of a run; here there is one."""

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of one micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _backward_within_memory(self, datums: Sequence[Datum], size: Size) -> Totals:
        """Accumulate gradients; when memory runs out, start over with less of it at once."""
        longest = max((length_of(datum) for datum in datums), default=0)
        self.memory.prepare(longest, self.optimizer.pending_bytes)
        while True:
            try:
                return self._backward(self.split(datums), size)
            except torch.OutOfMemoryError as error:
                if not self.memory.shrink(longest):
                    raise BackendError(self.memory.explain(longest)) from error
            except RuntimeError as error:
                self.determinism.give_up(error)
            # Outside the handler, whose traceback would keep the failed pass's tensors alive.
            self.optimizer.clear()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()

    def split(self, datums: Sequence[Datum]) -> list[list[Datum]]:
        """Micro-batches by what they cost here: flash attention takes uneven lengths as they are, others pad."""
        options = self.config.memory
        rows = max(1, len(datums) // options.micro_batches) if options.micro_batches else options.micro_batch_rows
        cost = Load.fed if self.packs_tightly else Load.padded
        return split_by_tokens(datums, self.memory.micro_batch_tokens, cost, rows)

    def pack(self, datums: Sequence[Datum]) -> MicroBatch:
        """One micro-batch; prompts are shared unless the model attends by itself."""
        penalised = self.sampling.repetition_penalty != 1.0
        return pack(datums, self.policy.device, penalised, share=not self.policy.own_attention)

    def _backward(self, batches: Sequence[Sequence[Datum]], size: Size | None = None) -> Totals:
        """Add up the gradients of micro-batches, which are the whole step unless its size is given."""
        size = size or Size.of([datum for batch in batches for datum in batch])
        self.optimizer.clear()
        divisor = self.loss.average.denominator(size.tokens, size.rows, self.max_tokens)
        totals = Totals(self.policy.device)
        # All at once, before the GPU has work: a copy to it would wait for the micro-batch under way.
        packs = [self.pack(batch) for batch in batches]
        references = self._reference_logprobs(packs)
        self._train_mode(True)
        self.warm_up({"recomputing" if layer.training else "training" for layer in self.layers})
        for batch, packed, expected in zip(batches, packs, references, strict=True):
            longest = max(map(length_of, batch))
            with self.memory.watch(packed.token_ids.shape[1]), self.determinism.kernels(packed.rows, longest):
                token_batch = TokenBatch(
                    self.logprobs(packed), packed.sampled_logprobs, packed.advantages, packed.mask, packed.row,
                    packed.rows, expected,
                )  # fmt: skip
                loss = summed_loss(token_batch, self.loss, self.config.kl.beta) / divisor
                self.backward(loss)
            self.optimizer.gather()
            totals.add(loss.detach(), token_batch)
        self._train_mode(False)
        totals.datums = [datum for batch in batches for datum in batch]
        return totals

    def warm_up(self, ways: set[str]) -> None:
        """Run the layers on the same shapes in every process before they are first run in one of these ways.

        Compiled kernels differ with the shapes that were seen first. A resumed process would see others first, and
        round differently from then on.
        """
        if not self.is_compiled or not self.determinism.is_on or ways <= self.warm:
            return
        self.warm |= ways
        with torch.random.fork_rng([self.policy.device]):
            for tokens in WARM_UP_TOKENS:
                packed = self.pack(datums_for_warm_up(self.policy, tokens))
                if not torch.is_grad_enabled():
                    self.logprobs(packed)
                    continue
                with self.determinism.kernels(packed.rows, 0):
                    self.backward(0.0 * self.logprobs(packed).sum())
        self.optimizer.clear()

    def _reference_logprobs(self, packs: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Of the whole step before any of it is trained on: the reference takes the policy's place once."""
        if self.reference is None:
            return [None] * len(packs)
        with self.reference.in_place():
            self.warm_up({"reference"})
            return [self.logprobs(packed) for packed in packs]

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
        """Write what was trained, the optimiser's state and the reference's into a folder."""
        self.policy.save_adapter(path / "adapter")
        save_file(self.state(), str(path / "learner.safetensors"))

    def state(self) -> dict[str, Tensor]:
        """What a resume needs besides the model."""
        return self.optimizer.state() | (self.reference.state() if self.reference is not None else {})

    def load(self, path: Path) -> None:
        """Restore all of it, to the bit."""
        tensors = load_file(str(path / "learner.safetensors"))
        own = {f"parameter/{name}": shape for name, shape in self.trained.shapes.items()}
        if {name: tensor.shape for name, tensor in tensors.items() if name.startswith("parameter/")} != own:
            raise BackendError("the saved weights have other layers than this model; was it trained on another one?")
        references = {name: tensors.pop(name) for name in list(tensors) if name.startswith("reference/")}
        self.optimizer.load(tensors)
        if self.reference is not None:
            self.reference.load(references)


class Totals:
    """Sums over the micro-batches of a step, left on the device until the end so that none of them is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        """Loss, ratios, divergence from the sampler, divergence from the reference, tokens."""
        self.largest = torch.zeros((), dtype=torch.float64, device=device)
        self.has_reference = False
        self.rows: list[Tensor] = []
        """For each micro-batch, (rows, 3): tokens, the sum of |Δ| of log-probs, and the largest."""
        self.datums: Sequence[Datum] = ()
        """Whose rows these are."""

    @torch.no_grad()
    def add(self, loss: Tensor, batch: TokenBatch) -> None:
        """Count a micro-batch in."""
        taken = batch.mask > 0
        chosen = (batch.logprobs - batch.sampled_logprobs).double().clamp(-20, 20)
        ratio = torch.where(taken, chosen.exp(), 0.0)
        # E_sampled[r - 1 - log r] estimates KL(sampled || trained) without bias and never below zero.
        apart = torch.where(taken, ratio - 1 - chosen, 0.0)
        strayed = torch.zeros_like(ratio)
        if batch.reference_logprobs is not None:
            self.has_reference = True
            strayed = torch.where(taken, divergence(batch.logprobs, batch.reference_logprobs).double(), 0.0)
        self.sums += torch.stack([loss.double(), ratio.sum(), apart.sum(), strayed.sum(), taken.sum()])
        self.largest = torch.maximum(self.largest, ratio.max())
        apart = torch.where(taken, chosen.abs().nan_to_num(0.0), 0.0)
        sums = sum_by_row(torch.stack([taken.double(), apart], 1), batch.row, batch.rows)
        largest = torch.zeros_like(sums[:, 0]).scatter_reduce_(0, batch.row, apart, "amax")
        self.rows.append(torch.cat([sums, largest[:, None]], 1))

    @property
    def tokens(self) -> float:
        """How many tokens took part."""
        return float(self.sums[4])

    def gaps(self) -> Gaps:
        """How far sampler and trainer are apart on each row."""
        table = torch.cat(self.rows).cpu().numpy() if self.rows else np.zeros((0, 3))
        return Gaps.of(self.datums, table)

    def metrics(self) -> StepMetrics:
        """Loss, means over tokens, and the largest ratio."""
        loss, ratios, apart, strayed, tokens = self.sums.tolist()
        tokens = max(tokens, 1.0)
        told: StepMetrics = {
            "loss": loss,
            "ratio_mean": ratios / tokens,
            "ratio_max": float(self.largest),
            "kl_sample_train": apart / tokens,
        }
        return told | ({"kl_ref": strayed / tokens} if self.has_reference else {})
