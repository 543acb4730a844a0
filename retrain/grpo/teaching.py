"""Adaptive teaching in TRL's trainer: completions are teaching, rewarded for how much they help a frozen student."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import logging

from retrain.backends.local.frozen import FrozenEngine, without_adapter
from retrain.config.schema import Inference, Lora, Model
from retrain.modeling.attention import register
from retrain.modeling.policy import Policy, load_policy
from retrain.modeling.tokens import PromptEncoder, load_tokenizer
from retrain.rewards.batch import outcome_of
from retrain.teaching import Student, teaching_reward
from retrain.teaching.student import Baseline
from retrain.teaching.templates import Reader, Templates, ask
from retrain.types import Example, Sampling, Score

if TYPE_CHECKING:
    from trl import GRPOTrainer

logger = logging.get_logger(__name__)

Row = dict[str, Any]


class TeachingRun:
    """The student of a trainer, and the questions of the batch that is being generated."""

    def __init__(self, trainer: GRPOTrainer, is_sharded: bool) -> None:
        self.trainer, args = trainer, trainer.args
        tokenizer = trainer.processing_class
        if args.student_model is not None:
            tokenizer = load_tokenizer(args.student_model, "student_model")
        policy = _student(trainer, is_sharded)
        encoder = PromptEncoder(tokenizer, "", args.max_prompt_length or 0, logger.warning)
        self.templates = Templates.of(args)
        with _unsharded(args.deepspeed_plugin):
            engine = FrozenEngine(policy, Inference(), tokenizer, lambda *_: None)
        reader = Reader(encoder, policy.context_length)
        self.student = Student(engine, reader, self.templates, args.max_probe_tokens, args.seed)
        self.rows: list[Row] = []
        self.baselines: list[Baseline] = []

    def ask_teacher(self, rows: list[Row]) -> list[Row]:
        """The rows with the teacher's prompts instead of the questions."""
        self.rows = rows
        examples = [_example(row) for row in rows]
        self.baselines = self.student.baseline(examples, self._sampling())
        asked = []
        for row, example, baseline in zip(rows, examples, self.baselines, strict=True):
            new = ask(self.templates.teacher, example, approach=baseline.probe).prompt
            asked.append({**row, "prompt": new if isinstance(new, str) else [dict(message) for message in new]})
        return asked

    def rewards(self, teaching: Sequence[Any], lengths: Sequence[int], score: Any) -> Tensor:
        """Rewards of this batch of teaching, one column per reward function.

        `score(rows, prompts, completions, completion_ids)` calls the reward functions, on all processes.
        """
        texts = [one if isinstance(one, str) else str(one[-1]["content"] or "") for one in teaching]
        lessons = [(_example(row), text) for row, text in zip(self.rows, texts, strict=True)]
        answers = self.student.answer(lessons, self._sampling())
        alone, taught = self._score([one.answer for one in self.baselines], score), self._score(answers, score)
        tokens = self.trainer.accelerator.gather(torch.tensor(lengths, device=taught.device)).tolist()
        rewards = torch.full_like(taught, torch.nan)
        for row, column in (~(alone.isnan() | taught.isnan())).nonzero().tolist():
            values = (float(each[row, column]) for each in (alone, taught))
            before, after = (Score(value, outcome_of(value, 1.0)) for value in values)
            rewards[row, column] = teaching_reward(before, after, tokens[row], self.trainer.args)
        self._log(alone, taught)
        return rewards

    def _score(self, answers: Sequence[str], score: Any) -> Tensor:
        prompts = [row["prompt"] for row in self.rows]
        completions: list[Any] = list(answers)
        if not isinstance(prompts[0], str):
            completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        ids = self.trainer.processing_class(text=list(answers))["input_ids"]
        rewards: Tensor = score(self.rows, prompts, completions, ids)
        return rewards

    def _log(self, alone: Tensor, taught: Tensor) -> None:
        mode = "train" if self.trainer.model.training else "eval"
        for name, value in (
            ("student_reward", taught.nanmean()),
            ("baseline_reward", alone.nanmean()),
            ("improvement_rate", (taught > alone).float().mean()),
            ("degradation_rate", (taught < alone).float().mean()),
        ):
            self.trainer._metrics[mode][f"teaching/{name}"].append(float(value))

    def _sampling(self) -> Sampling:
        args = self.trainer.args
        return Sampling(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
        )


def _student(trainer: GRPOTrainer, is_sharded: bool) -> Policy:
    """The base model over the trained model's tensors, or a separate model."""
    args, device = trainer.args, trainer.accelerator.device
    model = trainer.accelerator.unwrap_model(trainer.model)
    if args.student_model is None and isinstance(model, PeftModel) and not is_sharded:
        register()
        context = int(model.config.get_text_config().max_position_embeddings)
        return without_adapter(Policy(model, device, context, tuple(trainer.eos_token_ids)))
    name = args.student_model or str(model.config.name_or_path)
    logger.warning(f"Loading student: {name} on {device}")
    with _unsharded(args.deepspeed_plugin):
        return load_policy(Model(model=name, lora_rank=0), Lora(), args.seed, device, lambda line: None)


def _example(row: Row) -> Example:
    prompt = row["prompt"]
    return Example(prompt if isinstance(prompt, str) else tuple(prompt), "")


@contextmanager
def _unsharded(plugin: Any) -> Iterator[None]:
    """Load models unsharded inside the context, where DeepSpeed would shard them."""
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin is not None:
            plugin.set_deepspeed_weakref()
