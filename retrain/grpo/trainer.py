"""GRPOTrainer: TRL's trainer that samples with retrain's engine and computes log-probs over packed rows.

Everything else is TRL's. Where one of the two cannot be used, TRL's own code runs, and one line says so.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest import mock

import datasets
import torch
import trl
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Sampler
from transformers import GenerationMixin
from transformers.utils import logging
from trl.trainer.utils import pad

from retrain.builtin import resolve_model
from retrain.errors import SamplingMemoryError
from retrain.grpo.completions import CompletionLog
from retrain.grpo.config import GRPOConfig, add_missing_fields, different_defaults
from retrain.grpo.engine import PromptLengthError, TrainerEngine, UnsupportedModelError, read_sampling
from retrain.grpo.packed import AttentionSwitch, pack_rows
from retrain.grpo.settings import TESTED, is_tested
from retrain.grpo.teaching import TeachingRun
from retrain.modeling.compiling import compile_layers, traced_only
from retrain.modeling.logprobs import only_tempered
from retrain.types import Sampling

# Completions and tokens per completion that sampling is checked with.
ROWS_CHECKED, TOKENS_CHECKED = 2, 16
# Largest mean difference in log-probs from TRL's forward pass, by precision. Rounding to bf16 alone causes up to 0.07
# for random weights; a wrong mask or adapter causes more than 1.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 5e-2}

GENERATE = GenerationMixin.generate

logger = logging.get_logger(__name__)


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer`, with the same arguments, methods and results."""

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: trl.GRPOConfig | None = None, *more: Any, **others: Any
    ) -> None:
        if isinstance(model, str):
            model = resolve_model(model)
        if args is None:
            name = model if isinstance(model, str) else model.config.name_or_path
            args = GRPOConfig(f"{name.rstrip('/').rpartition('/')[2]}-GRPO")
        elif not isinstance(args, GRPOConfig):
            add_missing_fields(args)
        is_unnamed = not isinstance(model, str | PeftModel) and not model.config.name_or_path
        if args.beta and isinstance(args, GRPOConfig) and is_unnamed and not others.get("peft_config"):
            raise ValueError(
                f"beta = {args.beta} needs a reference model, which is loaded by the name of the model; this model was "
                "made in memory and has none.  Try: beta=0.0, or a model loaded with from_pretrained"
            )
        if isinstance(args, GRPOConfig) and (ours := different_defaults(args)):
            listed = ", ".join(f"{name}={own} (TRL: {theirs})" for name, (own, theirs) in ours.items())
            logger.warning_once(f"Defaults of retrain.grpo that differ from TRL's: {listed}.")
        self._teaching: TeachingRun | None = None
        with _vllm_precision(args):
            super().__init__(model, reward_funcs, args, *more, **others)
        if args.artificial_epochs > 1:
            self.train_dataset: Any = datasets.concatenate_datasets([self.train_dataset] * args.artificial_epochs)
        self._completion_log = CompletionLog(args.output_dir)
        if args.save_completions_probability:
            self.add_callback(self._completion_log)
        self._engine: TrainerEngine | None = None
        self._attention = AttentionSwitch(self._causal_lm.config)
        # The reference takes the same path: its rounding must not look like a divergence.
        reference = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
        self._reference = None if reference is None else AttentionSwitch(reference.config)
        self._reasons: dict[str, str] = {}
        """Why TRL's own sampling or log-probs are used, by part."""
        self._checked: set[bool] = set()
        """Whether packing was compared with TRL for the trained model (True) and, if it has an adapter, without it."""
        self._cut_prompts = 0
        if not is_tested(trl.__version__):
            for part in ("sampling", "log-probs"):
                self._use_trl(part, f"retrain was tested with TRL {TESTED[0]}, this is {trl.__version__}")
        elif reason := self._attention.reason or _find_special_adapter(self.accelerator.unwrap_model(self.model)):
            self._use_trl("log-probs", reason)
        if args.offload_untrained_models:
            _offload([self.ref_model, *self.reward_funcs], self.accelerator.device)
        self._newest_logps: Tensor | None = None
        self._has_logprobs = False
        """Whether the engine sampled a turn of the current batch, with log-probs."""

    def _get_train_sampler(self, *arguments: Any, **others: Any) -> Sampler[int]:
        sampler = super()._get_train_sampler(*arguments, **others)
        return PromptOrder(sampler, lambda: int(self.state.epoch or 0))

    @property
    def _causal_lm(self) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if isinstance(model, PeftModel) else model

    @property
    def _has_own_generate(self) -> bool:
        """Whether the model's `generate` was replaced, as FSDP does; it must then be called."""
        is_replaced = "generate" in vars(self.accelerator.unwrap_model(self.model)) and not self.is_sharded
        return is_replaced or type(self._causal_lm).generate is not GENERATE

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only a part of the weights."""
        plugin = self.args.deepspeed_plugin
        return bool(self.is_fsdp_enabled) or (plugin is not None and plugin.zero_stage == 3)

    # Sampling.

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        limit = self.args.max_prompt_length
        if limit is None or images or fields:
            return prompt_ids, images, fields
        longer = sum(len(ids) > limit for ids in prompt_ids)
        if longer:
            self._cut_prompts += longer
            logger.warning(
                f"{longer} of {len(prompt_ids)} prompts have more than max_prompt_length = {limit} tokens and lost "
                f"tokens on the left ({self._cut_prompts} so far)."
            )
        return [ids[-limit:] for ids in prompt_ids], images, fields

    def _generate_single_turn(self, prompt_ids: Any, *more: Any, **others: Any) -> Any:
        theirs = functools.partial(super()._generate_single_turn, prompt_ids, *more, **others)
        is_others = self.use_vllm or self.use_transformers_continuous_batching or self._has_own_generate
        if is_others or "sampling" in self._reasons:
            return theirs()
        try:
            if any(bool(given) for given in (*more[:2], others.get("images"), others.get("multimodal_fields"))):
                raise UnsupportedModelError("the prompts have images or other multimodal inputs")
            ids, logprobs = self._sample(prompt_ids)
            self._has_logprobs = logprobs is not None
            return ids, logprobs
        except PromptLengthError as error:
            logger.warning_once(f"Using TRL to sample this batch: {error}.")
        except UnsupportedModelError as error:
            self._use_trl("sampling", str(error))
        except SamplingMemoryError as error:
            self._use_trl("sampling", str(error).partition("  Try: ")[0].rstrip("."))
        except torch.OutOfMemoryError:
            self._use_trl("sampling", "the copy of the model that samples does not fit into memory")
        # Outside the handlers: a traceback keeps the tensors of the failed call alive.
        if "sampling" in self._reasons:
            self._engine = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        ids, logprobs = theirs()
        if logprobs is None and self._has_logprobs:
            # Earlier turns of these conversations have log-probs, and then TRL wants those of every turn.
            scored = self._score_with_trl(prompt_ids, ids)[0].tolist()
            logprobs = [row[: len(one)] for row, one in zip(scored, ids, strict=True)]
        return ids, logprobs

    def _generate(self, *arguments: Any, **others: Any) -> Any:
        self._has_logprobs = False
        return super()._generate(*arguments, **others)

    def _score_with_trl(self, prompts: Any, completions: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Log-probs of completions by TRL's forward pass, and which of them are tokens."""
        left, right = ([torch.as_tensor(ids) for ids in side] for side in (prompts, completions))
        ids, mask = (
            torch.cat([pad(before, padding_side="left"), pad(after)], 1).to(self.accelerator.device)
            for before, after in ((left, right), ([*map(torch.ones_like, left)], [*map(torch.ones_like, right)]))
        )
        keep = max(map(len, right))
        with torch.no_grad(), _evaluating(self.model):
            return super()._get_per_token_logps_and_entropies(self.model, ids, mask, keep)[0], mask[:, -keep:]

    def _sample(self, prompt_ids: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
        """Sample with retrain's engine. The seed comes from PyTorch, whose state TRL saves in its checkpoints."""
        model = self.accelerator.unwrap_model(self.model)
        sampling, stops = read_sampling(self.generation_config, model.generation_config)
        if self._engine is None or not self._engine.serves(model):
            self._engine = self._build_engine()
            self._check_sampling(self._engine, prompt_ids, stops)
        context = self._engine.engine.policy.context_length
        if max(map(len, prompt_ids)) + sampling.max_tokens > context:
            logger.warning_once(f"Completions end at the model's context of {context} tokens.")
        # Drawn last: a call that falls back to TRL must leave the random state as TRL would.
        sampling = replace(sampling, seed=int(torch.randint(1 << 31, ())))
        completions = self._engine.generate(prompt_ids, sampling, stops)
        ids = [_cut_after(completion.token_ids_T.tolist(), self.eos_token_ids) for completion in completions]
        if not only_tempered(sampling) or sampling.is_greedy:
            return ids, None
        return ids, [one.logprobs_T[: len(kept)].tolist() for one, kept in zip(completions, ids, strict=True)]

    def _build_engine(self) -> TrainerEngine:
        if self.is_sharded:
            raise UnsupportedModelError("the weights are sharded (FSDP or ZeRO-3)")
        device = self.accelerator.device
        in_bf16 = bool(self.args.bf16) and device.type == "cuda"
        engine = TrainerEngine(self.accelerator.unwrap_model(self.model), self._tokenizer, device, in_bf16)
        if device.type == "cuda" and "log-probs" not in self._reasons:
            compile_layers(self._causal_lm)
        return engine

    def _check_sampling(self, engine: TrainerEngine, prompt_ids: Any, stops: Sequence[int]) -> None:
        """Compare the engine's log-probs with TRL's forward pass, once per model, on a few tokens without filters."""
        prompts = prompt_ids[:ROWS_CHECKED]
        drawn = engine.generate(prompts, Sampling(max_tokens=TOKENS_CHECKED, temperature=self.temperature), stops)
        own = pad([torch.as_tensor(one.logprobs_T) for one in drawn]).to(self.accelerator.device)
        if reason := self._find_difference(own, *self._score_with_trl(prompts, [one.token_ids_T for one in drawn])):
            raise UnsupportedModelError(reason)

    # Log-probs.

    def _get_per_token_logps_and_entropies(self, model: Any, *more: Any, **others: Any) -> Any:
        theirs = functools.partial(super()._get_per_token_logps_and_entropies, model, *more, **others)
        if self._is_policy(model) and not self._attention.fits(self._causal_lm.config):
            # The model or its attention was replaced.
            self._attention, self._checked = AttentionSwitch(self._causal_lm.config), set()
        attention = self._attention if self._is_policy(model) else self._reference
        if "log-probs" in self._reasons or attention is None or attention.reason:
            return theirs()
        given = inspect.signature(super()._get_per_token_logps_and_entropies).bind(model, *more, **others).arguments
        ids, mask, keep = (given.pop(name) for name in ("input_ids", "attention_mask", "logits_to_keep"))
        parts = self.args.backprop_accumulation_steps or 1
        most = self.args.backprop_accumulation_micro_batch_size or -(-len(ids) // parts)
        rows, entropy = given.pop("batch_size", None) or most, given.pop("compute_entropy", False)
        if any(value is not None and value is not False for name, value in given.items() if name != "model"):
            return theirs()
        is_trained = not _is_adapter_off(model)
        if self._is_policy(model) and is_trained not in self._checked:
            # Without its adapter, the model is the reference. It is compared first: if its first log-probs were TRL's,
            # the first step of a process would be rounded otherwise, and a resumed run would differ.
            self._checked.add(is_trained)
            self._check_packing(model, ids.device)
        found = self._packed(model, attention, (ids, mask, keep), rows) if "log-probs" not in self._reasons else None
        if found is None:
            return theirs()
        if attention is self._attention:
            self._newest_logps = found[0].detach()
        return found[0], found[1] if entropy else None, None

    def _is_policy(self, model: Any) -> bool:
        """Whether this is the trained model, not a separate reference model."""
        return self.accelerator.unwrap_model(model) is self.accelerator.unwrap_model(self.model)

    def _packed(
        self, model: Any, attention: AttentionSwitch, batch: tuple[Tensor, Tensor, int], rows: int
    ) -> tuple[Tensor, Tensor | None] | None:
        """Log-probs and entropies of the completions, `rows` rows per forward pass; None if one cannot be packed."""
        input_ids, attention_mask, keep = batch
        spans = [slice(start, start + rows) for start in range(0, len(input_ids), rows)]
        packs = [pack_rows(input_ids[span], attention_mask[span], keep) for span in spans]
        parts = [packed for packed in packs if packed is not None]
        if len(parts) < len(packs):
            return None
        logps, entropies = [], []
        for packed in parts:
            forward = functools.partial(self._forward, model, attention, packed.inputs)
            # Recomputed in the backward pass, so that only one part's activations exist at a time.
            is_recomputed = len(parts) > 1 and torch.is_grad_enabled()
            logprobs, entropy = checkpoint(forward, use_reentrant=False) if is_recomputed else forward()
            logps.append(packed.unpack(logprobs))
            # TRL computes no entropy of a reference model.
            entropies += [] if entropy is None else [packed.unpack(entropy)]
        if not torch.is_grad_enabled():
            attention.restore()
        return torch.cat(logps), torch.cat(entropies) if entropies else None

    def _forward(
        self, model: Any, attention: AttentionSwitch, inputs: dict[str, object]
    ) -> tuple[Tensor, Tensor | None]:
        with attention.packed(), self.accelerator.autocast():
            outputs = model(**inputs, fused_lm_head=True)
        return outputs.log_probs, outputs.entropy

    def _check_packing(self, model: Any, device: torch.device) -> None:
        """Compare packed rows with TRL's forward pass, once.

        The rows are fixed, so that all processes run the same passes, whatever their batches are like.
        """
        ids = torch.arange(30, device=device).view(3, 10) % self._causal_lm.config.get_text_config().vocab_size
        ids[1, :6], mask, keep = ids[0, :6], torch.ones_like(ids), 4
        mask[2, :3], mask[1, 9:] = 0, 0
        # These shapes occur in no batch: compiling kernels for them would be wasted.
        with torch.no_grad(), _evaluating(self.model), traced_only(self._causal_lm):
            theirs = super()._get_per_token_logps_and_entropies(model, ids, mask, keep)[0]
            try:
                found = self._packed(model, self._attention, (ids, mask, keep), len(ids))
            except (TypeError, ValueError, AttributeError, RuntimeError) as error:
                self._use_trl("log-probs", f"{type(self._causal_lm).__name__} does not take packed rows: {error}")
                return
            finally:
                self._attention.restore()
        assert found is not None, "every row has a prompt and a completion"
        if reason := self._find_difference(found[0], theirs, mask[:, -keep:]):
            self._use_trl("log-probs", reason)

    def _find_difference(self, own: Tensor, theirs: Tensor, mask: Tensor) -> str:
        gap = float(((own.float() - theirs.float()).abs() * mask).sum() / mask.sum().clamp(min=1))
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else self._causal_lm.dtype
        if gap <= TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]):
            return ""
        return f"log-probs of {type(self._causal_lm).__name__} differ from TRL's by {gap:.2g} per token"

    # The step.

    def training_step(self, *arguments: Any, **others: Any) -> Any:
        """Run TRL's training step, then restore the model's own attention."""
        try:
            return super().training_step(*arguments, **others)
        finally:
            self._attention.restore()

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """TRL's loss; also logs the ratio of the trained policy to the one that sampled."""
        self._newest_logps = None
        loss = super()._compute_loss(model, inputs)
        sampled = inputs.get("sampling_per_token_logps")
        if sampled is not None and self._newest_logps is not None and not self.use_vllm:
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            ratio = (self._newest_logps - sampled).clamp(-20, 20).exp()[mask > 0]
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name, value in (("mean", ratio.mean()), ("max", ratio.max())) if len(ratio) else ():
                # Over this process only: another one may have no rows here, and would not join a collective.
                metrics[f"importance_ratio/{name}"].append(value.item())
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        if self.args.adaptive_teaching:
            if self._teaching is None:
                self._teaching = TeachingRun(self, self.is_sharded)
            inputs = self._teaching.ask_teacher(inputs)
        output = super()._generate_and_score_completions(inputs)
        if self.args.activate_debugging_logs:
            lengths = output["completion_mask"].sum(1).tolist()
            advantages = [round(value, 4) for value in output["advantages"].flatten().tolist()][: len(inputs)]
            where = f"step {self.state.global_step}, process {self.accelerator.process_index}"
            print(f"{where}: {len(inputs)} completions, tokens {lengths}, advantages {advantages}", flush=True)
        draw = random.Random(f"{self.args.seed}/{self.state.global_step}/{self.model.training}").random()
        if draw < (self.args.save_completions_probability or 0) and self.accelerator.is_main_process:
            split = "train" if self.model.training else "eval"
            count = len(inputs) * self.accelerator.num_processes
            self._completion_log.append(self.state.global_step, split, count, self._logs)
        return output

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        score = super()._calculate_rewards
        if self._teaching is None:
            rewards: Tensor = score(inputs, prompts, completions, completion_ids_list)
            return rewards
        return self._teaching.rewards(completions, list(map(len, completion_ids_list)), score)

    def _use_trl(self, part: str, reason: str) -> None:
        if part not in self._reasons:
            self._reasons[part] = reason
            logger.warning(f"Using TRL for {part}: {reason}.")


class PromptOrder(Sampler[int]):
    """TRL's order of the prompts, which is drawn epoch by epoch, also for a run that is resumed in a later epoch.

    TRL repeats the order of the first epoch there.
    """

    def __init__(self, sampler: Any, epochs_done: Callable[[], int]) -> None:
        self.sampler = sampler
        self.epochs_done = epochs_done
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        while self.drawn < self.epochs_done():
            next(iter(self.sampler), None)
            self.drawn += 1
        self.drawn += 1
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def _find_special_adapter(model: Any) -> str:
    """Why the adapter of a model needs TRL's padded rows: it adds tokens to each row, or looks for some in it."""
    for adapter in model.peft_config.values() if isinstance(model, PeftModel) else ():
        if adapter.is_prompt_learning:
            return f"its adapter is {adapter.peft_type.value}"
        if vars(adapter).get("alora_invocation_tokens"):
            return "its adapter uses alora_invocation_tokens"
    return ""


def _is_adapter_off(model: nn.Module) -> bool:
    layer = next((each for each in model.modules() if isinstance(each, BaseTunerLayer)), None)
    return layer is not None and layer.disable_adapters


def _cut_after(ids: list[int], stops: Sequence[int]) -> list[int]:
    """The tokens up to the first stop token."""
    at = next((at for at, token in enumerate(ids) if token in stops), len(ids))
    return ids[: at + 1]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout inside the context; every module's mode is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _vllm_precision(args: trl.GRPOConfig) -> AbstractContextManager[Any]:
    """Context in which TRL creates vLLM with `vllm_dtype`, for which it has no argument."""
    dtype, is_used = args.vllm_dtype, args.use_vllm and args.vllm_mode == "colocate"
    # TRL says that vLLM is missing.
    if dtype == "auto" or not is_used or find_spec("vllm") is None:
        return nullcontext()
    from trl.generation import vllm_generation  # noqa: PLC0415  (vLLM is optional)

    return mock.patch.object(vllm_generation, "LLM", functools.partial(vllm_generation.LLM, dtype=dtype))


def _offload(models: Sequence[object], device: torch.device) -> None:
    """Keep modules on the CPU, except while they run on the device."""
    for model in models:
        if isinstance(model, nn.Module):
            model.to("cpu")
            model.register_forward_pre_hook(lambda module, _: module.to(device) and None)
            model.register_forward_hook(lambda module, *_: module.to("cpu") and None)
