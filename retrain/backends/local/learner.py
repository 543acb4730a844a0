"""One optimizer step: micro-batches that fit into memory, gradients, rows checked, weights updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from retrain.backends.local.loss import summed_loss
from retrain.backends.local.memory import StepMemory
from retrain.backends.local.optimizer import MasterOptimizer
from retrain.backends.local.reference import Reference
from retrain.backends.local.totals import Totals
from retrain.backends.local.trainable import TrainableParams
from retrain.capacity.memory import MICRO_BATCH
from retrain.checks.agreement import Agreement, AgreementReport, LogprobGaps
from retrain.config import TrainConfig
from retrain.errors import BackendError
from retrain.losses import build_loss
from retrain.losses.batch import TokenBatch
from retrain.modeling.compiling import (
    WARM_UP_TOKENS,
    compile_layers,
    datums_for_warm_up,
    traced_only,
    varying_tokens,
)
from retrain.modeling.determinism import Determinism
from retrain.modeling.logprobs import start_compiling
from retrain.modeling.packing import (
    BatchLoad,
    MicroBatch,
    length_of,
    pack,
    packed_logprobs,
    split_by_tokens,
    split_rows,
)
from retrain.modeling.policy import Policy
from retrain.modeling.prefix import takes_uneven_lengths
from retrain.modeling.sampling import training_distribution
from retrain.modeling.transformers_internals import decoder_layers
from retrain.modeling.triton_internals import runs_triton
from retrain.schedules.learning_rate import learning_rate
from retrain.types import Datum, FloatArray, StepMetrics

# Consecutive steps without an update after which a run ends.
MAX_SKIPPED = 5
SKIPPED = "skipped_in_a_row"


@dataclass(frozen=True)
class StepSize:
    """Number of trained tokens and rows of a global step, over all processes."""

    tokens: int
    rows: int

    @classmethod
    def of(cls, datums: Sequence[Datum]) -> StepSize:
        """The size of a step with these datums."""
        return cls(sum(int(datum.mask_T.sum()) for datum in datums), len(datums))


@dataclass(frozen=True)
class Part:
    """Gradients and totals of some rows of a step, computed before its size was known: nothing is divided by it."""

    gradients: list[Tensor | None]
    totals: Totals

    @torch.no_grad()
    def add(self, other: Part) -> None:
        """Add another part to this one."""
        for at, gradient in enumerate(other.gradients):
            mine = self.gradients[at]
            self.gradients[at] = gradient if mine is None else mine if gradient is None else mine.add_(gradient)
        self.totals.join(other.totals)


class Learner:
    """Trains a policy: computes gradients and takes optimizer steps.

    Multi-process learners override the class attributes, `share` and `check_agreement`.
    """

    make_trainable: type[TrainableParams] = TrainableParams
    make_optimizer: type[MasterOptimizer] = MasterOptimizer
    make_reference: type[Reference] = Reference

    def __init__(self, policy: Policy, config: TrainConfig, log: Callable[[str], None]) -> None:
        self.policy = policy
        self.config = config
        self.log = log
        self.loss = build_loss(config.loss, config.plugins.search_paths)
        self.max_tokens = config.training.max_tokens
        self.sampling = training_distribution(config)
        self.memory = StepMemory(policy, config.memory, log)
        self.determinism = Determinism(config.training.deterministic, policy, log)
        if policy.device.type == "cuda":
            # The inputs of every layer then require gradients, the first included: one compiled variant, not two.
            policy.causal_lm.enable_input_require_grads()
        # Enabled for all layers; `_train_mode` chooses which of them recompute.
        policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.layers = decoder_layers(policy.adapted)
        self.is_compiled = runs_triton(policy.device) and not policy.attention_fallback_reason
        if self.is_compiled:
            compile_layers(policy.causal_lm)
        start_compiling(policy, self.sampling)
        self.warm: set[str] = set()
        """Modes whose compiled layers are warmed up."""
        self.trainable = self.make_trainable(policy)
        self.optimizer = self.make_optimizer(policy, config, self.trainable)
        offload = config.memory.offload_untrained_models
        self.reference = self.make_reference(policy, config.kl, offload, self.trainable) if config.kl.beta else None
        self.packs_tightly = takes_uneven_lengths(policy)
        self.agreement: Agreement | None = None
        """Compares the sampler's log-probs with ours; None where the caller's log-probs are synthetic."""
        self.report: AgreementReport | None = None
        """Its report on the last step."""
        self.skipped_in_a_row = 0
        self.updates = 0
        """Optimizer steps of this process that changed the weights."""

    def step(self, datums: Sequence[Datum], step: int = 0, staleness: int = 0, part: Part | None = None) -> StepMetrics:
        """Forward, backward and update over all datums, with the learning rate of `step`.

        `staleness` is the number of updates since the datums were sampled; `part` has the gradients of some of them.
        """
        size = StepSize.of([datum for datum in datums if datum.mask_T.any()])
        metrics = self.take_step(datums, size, step, staleness, part)
        self.raise_if_rejected()
        return metrics

    def compute_part(self, datums: Sequence[Datum]) -> Part:
        """Gradients of some rows of the next step; the weights do not change."""
        # A power of two: dividing by it changes no digit of a gradient, only its range.
        totals = self._backward_within_memory(datums, self.unit)
        return Part(self.optimizer.take(), totals)

    @property
    def unit(self) -> float:
        """The divisor of parts: a power of two near the divisor of a full step."""
        training = self.config.training
        rows = training.batch_size * training.group_size
        return 2.0 ** round(math.log2(self._divisor(StepSize(rows * self.max_tokens, rows))))

    def _divisor(self, size: StepSize) -> float:
        return self.loss.average.denominator(size.tokens, size.rows, self.max_tokens)

    def raise_if_rejected(self) -> None:
        """Raise if the last step was rejected because sampler and trainer disagreed."""
        if self.report is not None and self.report.rejected:
            raise self.report.error()

    def take_step(
        self, datums: Sequence[Datum], size: StepSize, step: int, staleness: int = 0, part: Part | None = None
    ) -> StepMetrics:
        """The same for this process's share of a global step of that size.

        A rejected step changes no weights; call `raise_if_rejected` afterwards.
        """
        lr = learning_rate(self.config, step)
        metrics: StepMetrics = {"loss": 0.0, "ratio_mean": None, "ratio_max": None, "kl_sample_train": None}
        norm: float | None = 0.0
        usable = [datum for datum in datums if datum.mask_T.any()]
        checked = self._check_untrained([datum for datum in datums if datum.check_T is not None])
        self.report = None
        if size.rows:
            metrics = self._agreed_gradients(usable, size, checked, staleness, part)
        elif self.agreement is not None and checked is not None:
            self.report = self.agreement.check(LogprobGaps.between([], []), checked, staleness)
        if self.report is not None and self.report.rejected:
            self.optimizer.clear()
            return metrics
        if size.rows:
            norm = self.optimizer.step(lr)
            self.updates += norm is not None
            self._count_skipped(step, is_skipped=norm is None)
        if self.reference is not None:
            self.reference.maybe_sync(step)
        metrics |= self.report.metrics() if self.report is not None else {}
        return {**metrics, "lr": lr, "grad_norm": norm, "skipped": int(norm is None)}

    def _count_skipped(self, step: int, is_skipped: bool) -> None:
        """Report an update that was skipped; several in a row end the run, which would no longer learn."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0
        if self.skipped_in_a_row == 1:
            self.log(f"Warning: step {step}: the gradient is not finite, so the weights were not updated.")
        if self.skipped_in_a_row == MAX_SKIPPED:
            raise BackendError(
                f"the gradient was not finite in {MAX_SKIPPED} steps in a row, the last of them step {step}, so the "
                f"weights no longer change.  Try: check loss {self.config.loss.type!r} and the rewards for infinite "
                "values, or a smaller [training] lr"
            )

    def _agreed_gradients(
        self,
        datums: Sequence[Datum],
        size: StepSize,
        checked: LogprobGaps | None,
        staleness: int,
        part: Part | None = None,
    ) -> StepMetrics:
        """Gradients of the rows on which sampler and trainer agree; the others are excluded."""
        divisor = self._divisor(size)
        totals = self._complete(part, datums, divisor) if part else self._backward_within_memory(datums, divisor)
        self.share(totals)
        if self.agreement is None:
            return totals.metrics()
        self.report, own = self.check_agreement(self.agreement, totals.gaps(), checked, staleness)
        if self.report.excluded and not self.report.rejected:
            off = {id(datum) for datum, out in zip(totals.datums, self.report.excluded_rows[own], strict=True) if out}
            totals = self._backward_within_memory([datum for datum in datums if id(datum) not in off], divisor)
            self.share(totals)
        metrics = totals.metrics()
        shift = self.agreement.shift(metrics, totals.tokens, staleness)
        if not self.report.rejected and self.report.gaps.are_all_sampled:
            self.report = replace(self.report, shift=shift)
        return metrics

    def _complete(self, part: Part, datums: Sequence[Datum], divisor: float) -> Totals:
        """The gradients of all datums, of which a part has some."""
        # Rows are matched by their advantage array, since their group may have been renumbered.
        numbered = {id(datum.advantages_T): datum for datum in datums}
        done = {id(datum.advantages_T): None for datum in part.totals.datums}
        if not numbered.keys() >= done.keys():
            return self._backward_within_memory(datums, divisor)
        rest = [datum for datum in datums if id(datum.advantages_T) not in done]
        totals = self._backward_within_memory(rest, divisor)
        self.optimizer.add(part.gradients, self.unit / divisor)
        part.totals.sums[0] *= self.unit / divisor
        part.totals.datums = [numbered[row] for row in done]
        part.totals.join(totals)
        return part.totals

    @torch.no_grad()
    def _check_untrained(self, datums: Sequence[Datum]) -> LogprobGaps | None:
        """Compare the log-probs of rows that are not trained on."""
        if self.agreement is None or not datums:
            return None
        own: dict[int, FloatArray] = {}
        try:
            self.warm_up({"looking"})
            with self.determinism.kernels():
                for batch in split_by_tokens(datums, MICRO_BATCH):
                    rows = split_rows(self.logprobs(self.pack(batch)), [len(datum.completion_ids_T) for datum in batch])
                    own |= {id(datum): row for datum, row in zip(batch, rows, strict=True)}
        except RuntimeError as error:
            self.determinism.disable_after(error)
            return self._check_untrained(datums)
        return LogprobGaps.between(datums, [own[id(datum)] for datum in datums])

    def check_agreement(
        self, agreement: Agreement, own: LogprobGaps, checked: LogprobGaps | None, staleness: int
    ) -> tuple[AgreementReport, slice]:
        """Check the rows of all processes; returns the report and the slice of this one. Here there is one."""
        return agreement.check(own, checked, staleness), slice(0, len(own.tokens))

    def share(self, totals: Totals) -> None:
        """Sum gradients and totals over all processes; here there is one."""

    def _backward_within_memory(self, datums: Sequence[Datum], divisor: float) -> Totals:
        """Accumulate gradients; if memory runs out, retry with smaller micro-batches."""
        longest = max((length_of(datum) for datum in datums), default=0)
        self.memory.prepare(longest, self.optimizer.pending_bytes)
        while True:
            try:
                return self._backward(self.split(datums), divisor)
            except torch.OutOfMemoryError as error:
                if not self.memory.shrink(longest):
                    raise BackendError(self.memory.explain(longest)) from error
            except RuntimeError as error:
                self.determinism.disable_after(error)
            # Outside the handler: its traceback keeps the tensors of the failed pass alive.
            with self.policy.turns:
                self.optimizer.clear()
                if self.policy.device.type == "cuda":
                    torch.cuda.empty_cache()

    def split(self, datums: Sequence[Datum]) -> list[list[Datum]]:
        """Micro-batches by their cost: flash attention takes uneven lengths, other kernels pad."""
        options = self.config.memory
        rows = max(1, len(datums) // options.micro_batches) if options.micro_batches else options.micro_batch_rows
        cost = BatchLoad.fed if self.packs_tightly else BatchLoad.padded
        return split_by_tokens(datums, self.memory.micro_batch_tokens, cost, rows)

    def pack(self, datums: Sequence[Datum], is_deterministic: bool = True) -> MicroBatch:
        """One micro-batch; prompts are shared unless the model uses its own attention."""
        penalised = self.sampling.repetition_penalty != 1.0
        share = not self.policy.attention_fallback_reason
        return pack(datums, self.policy.device, penalised, share, is_deterministic)

    def _backward(self, batches: Sequence[Sequence[Datum]], divisor: float | None = None) -> Totals:
        """Accumulate the gradients of micro-batches; without a divisor, they are taken to be the whole step."""
        divisor = divisor or self._divisor(StepSize.of([datum for batch in batches for datum in batch]))
        totals = Totals(self.policy.device)
        with self.policy.turns:
            self.optimizer.clear()
            # All copied before the GPU has work: a later copy would wait for the running micro-batch.
            exact = [self.determinism.includes_attention([length_of(datum) for datum in batch]) for batch in batches]
            packs = [self.pack(*one) for one in zip(batches, exact, strict=True)]
            references = self._reference_logprobs(packs)
            self._train_mode(True)
            self.warm_up({"recomputing" if layer.training else "training" for layer in self.layers})
        for packed, expected, is_exact in zip(packs, references, exact, strict=True):
            # A sampler over the same weights takes its turn between two micro-batches.
            with self.policy.turns:
                totals.add(*self._backward_one(packed, expected, is_exact, divisor))
        self._train_mode(False)
        totals.datums = [datum for batch in batches for datum in batch]
        return totals

    def _backward_one(
        self, packed: MicroBatch, expected: Tensor | None, is_exact: bool, divisor: float
    ) -> tuple[Tensor, TokenBatch]:
        # Our operator knows whether its attention is to be deterministic; other attention follows PyTorch's setting.
        uses_setting = is_exact or self.packs_tightly
        with self.memory.watch(packed.token_ids.shape[1]), self.determinism.kernels(uses_setting):
            token_batch = TokenBatch(
                self.logprobs(packed), packed.sampled_logprobs, packed.advantages, packed.mask, packed.row,
                packed.rows, expected,
            )  # fmt: skip
            loss = summed_loss(token_batch, self.loss, self.config.kl.beta) / divisor
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.gather()
        return loss.detach(), token_batch

    def warm_up(self, ways: set[str]) -> None:
        """Run the layers on fixed shapes before they first run in one of these modes.

        Compiled kernels depend on the shapes seen first. A resumed process would see others first and round
        differently.
        """
        if not self.is_compiled or not self.determinism.is_on or ways <= self.warm:
            return
        self.warm |= ways
        traced, compiled = WARM_UP_TOKENS
        packed = self.pack(datums_for_warm_up(self.policy, compiled))
        devices = [self.policy.device] if self.policy.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.determinism.kernels():
            if not self.packs_tightly:
                # Attention causes graph breaks in the layers.
                with traced_only(self.policy.causal_lm):
                    self.logprobs(self.pack(datums_for_warm_up(self.policy, traced)))
            with varying_tokens(self.policy.causal_lm):
                logprobs = self.logprobs(packed)
            if logprobs.requires_grad:
                (0.0 * logprobs.sum()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.clear()

    def _reference_logprobs(self, packs: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Reference log-probs of all micro-batches, so that the reference weights are swapped in once per step."""
        if self.reference is None:
            return [None] * len(packs)
        with self.reference.in_place(), self.determinism.kernels():
            self.warm_up({"reference"})
            return [self.logprobs(packed) for packed in packs]

    def _train_mode(self, on: bool) -> None:
        """Enable adapter dropout and recomputation only: the base model's own dropout would change the policy."""
        for module in self.policy.adapted.modules():
            if isinstance(module, LoraLayer):
                module.lora_dropout.train(on)
        # A layer recomputes only in training mode. The first layers do: when the backward pass reaches them, the
        # activations of the later ones are already freed.
        for number, layer in enumerate(self.layers):
            layer.training = on and number < self.memory.recomputed_layers

    def logprobs(self, packed: MicroBatch) -> Tensor:
        """Log-probs of the completion tokens under the current policy."""
        return packed_logprobs(self.policy, packed, self.sampling)

    def save(self, path: Path) -> None:
        """Write the trained weights and the states of optimizer and reference into a folder."""
        self.policy.save_adapter(path / "adapter")
        save_file(self.state(), str(path / "learner.safetensors"))

    def state(self) -> dict[str, Tensor]:
        """State that a resume needs besides the model."""
        state = self.optimizer.state() | (self.reference.state() if self.reference is not None else {})
        return state | {SKIPPED: torch.tensor(self.skipped_in_a_row)}

    def load(self, path: Path) -> None:
        """Restore all of it bit for bit."""
        tensors = load_file(str(path / "learner.safetensors"))
        own = {f"parameter/{name}": parameter.shape for name, parameter in self.trainable.parameters.items()}
        if {name: tensor.shape for name, tensor in tensors.items() if name.startswith("parameter/")} != own:
            raise BackendError("the saved weights do not match this model; was another model trained?")
        # Earlier checkpoints lack it.
        self.skipped_in_a_row = int(tensors.pop(SKIPPED, 0))
        references = {name: tensors.pop(name) for name in list(tensors) if name.startswith("reference/")}
        self.optimizer.load(tensors)
        if self.reference is not None:
            self.reference.load(references)
