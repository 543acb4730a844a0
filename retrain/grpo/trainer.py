"""GRPOTrainer: TRL's interface over retrain's own loop, engine, loss and checkpoints."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState

from retrain.assemble import Overrides, assemble
from retrain.backends.local import build_alone
from retrain.builtin import resolve_model
from retrain.config import TrainConfig
from retrain.distributed.run import train_on_ranks
from retrain.errors import CheckpointError, ConfigError
from retrain.grpo.callbacks import Callbacks
from retrain.grpo.combinations import global_batch
from retrain.grpo.config import GRPOConfig
from retrain.grpo.mapping import MODEL_FOLDER, Setup, to_train_config
from retrain.grpo.models import ModelKeeper, read_model
from retrain.grpo.problems import PromptsKeeper, ScriptData, ScriptProblems, read_dataset
from retrain.grpo.rewards import read_terms
from retrain.modeling.tokens import load_tokenizer
from retrain.runtime.control import StopRequested
from retrain.runtime.ranks import RankInfo, check_single_process, find_rank_info
from retrain.storage.checkpoint import Checkpoints
from retrain.tracking.console import Console
from retrain.trainer import TrainResult, resume, train
from retrain.types import Example


@dataclass(frozen=True)
class TrainOutput:
    """What a run came to, under the names of transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class GRPOTrainer:
    """Trains a model by GRPO on a dataset of prompts, scored by functions.

    `reward_funcs` are functions `f(prompts, completions, **columns) -> list[float]` or names of retrain's rewards;
    `peft_config` a `peft.LoraConfig`, without which the whole model is trained.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        _refuse(others)
        self.given = read_model(model, peft_config)
        self.args = args if args is not None else GRPOConfig(f"{self.given.name.rpartition('/')[2]}-GRPO")
        if not isinstance(self.args, GRPOConfig):
            raise ConfigError(
                f"args is a {type(self.args).__module__}.{type(self.args).__name__}.  "
                "Try: from retrain.grpo import GRPOConfig"
            )
        if self.given.loaded is not None and self.args.model_init_kwargs:
            raise ConfigError("model_init_kwargs has no effect on a model that is loaded already.  Leave it out.")
        self.terms = read_terms(reward_funcs, self.args.reward_weights)
        keep = not self.args.remove_unused_columns
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.examples = read_dataset(train_dataset, "train_dataset", self.terms, keep)
        self.prompts = PromptsKeeper(self.examples)
        self.held_out: list[Example] = []
        if eval_dataset is not None:
            self.held_out = read_dataset(eval_dataset, "eval_dataset", self.terms, keep)
        self.processing_class = processing_class or load_tokenizer(self.given.name)
        self.keeper = ModelKeeper(self.given, Path(str(self.args.output_dir)), self.processing_class)
        self.state = TrainerState()
        self.callbacks = Callbacks(self.args, self.state, TrainerControl())
        self.callbacks.epoch_steps = len(self.examples) * self.args.num_generations / global_batch(self.args)
        for callback in callbacks or ():
            self.add_callback(callback)
        # Everything that can be wrong is wrong now, not after an hour of loading.
        self.config()
        self._trained: Any = None

    def add_callback(self, callback: Any) -> None:
        """Have a transformers.TrainerCallback told of the run."""
        self.callbacks.add(callback)

    def config(self, resume_from: str = "") -> TrainConfig:
        """The run in retrain's own terms: what `config.toml` will hold."""
        return to_train_config(
            self.args,
            Setup(
                model=self.keeper.name,
                prompts=len(self.examples),
                held_out=len(self.held_out),
                terms=[term.as_option() for term in self.terms],
                lora=self.given.lora,
                dtype=self.given.dtype,
                resume=resume_from,
            ),
        )

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the last step, from a checkpoint if one is named (True: that of output_dir).

        Under torchrun or `accelerate launch`, rank 0 goes on with the script; the others serve it and end here.
        """
        config = self.config(self._find_resume(resume_from_checkpoint))
        rank_info = find_rank_info()
        self._trained = None
        self.state.log_history.clear()
        if rank_info is None or rank_info.is_main:
            self.keeper.start(config)
            self._find_step(config.resume.from_)
        started = time.perf_counter()
        try:
            with contextlib.suppress(StopRequested):
                self.callbacks.evaluate_last(self._run(config, rank_info).last_evaluation)
            self.callbacks.raise_failure()
        finally:
            self.callbacks.end()
        self._train_in_place()
        return self._output(time.perf_counter() - started)

    def _find_step(self, folder: str) -> None:
        """What callbacks and rewards see of the run before its first step."""
        step = 0
        if folder:
            self.prompts.check(Path(folder).expanduser())
            step = Checkpoints(Path(folder).expanduser(), 1, lambda line: None).newest().step
        self.state.global_step = step
        self.state.epoch = step / self.callbacks.epoch_steps

    def _run(self, config: TrainConfig, rank_info: RankInfo | None) -> TrainResult:
        if rank_info is None:
            check_single_process(config)
            return train(config, overrides=self._overrides())
        return train_on_ranks(config, rank_info, overrides=self._overrides())

    def _train_in_place(self) -> None:
        """A whole model that was given loaded is the trained one from here on, as a script for TRL expects."""
        if self.given.loaded is not None and not self.given.lora["model.lora_rank"]:
            self.given.loaded.load_state_dict(self._load_trained().state_dict())
            self._trained = self.given.loaded

    def evaluate(self) -> dict[str, float]:
        """Sample and score the evaluation prompts with the newest weights."""
        if not self.held_out:
            raise ConfigError("there is no eval_dataset to evaluate on.  Try: GRPOTrainer(…, eval_dataset=…)")
        folder = Path(str(self.args.output_dir))
        newest = str(folder) if (folder / "checkpoints").is_dir() else ""
        config = self.config(newest)
        self.keeper.start(config)
        # Of several ranks only the first is left by now.
        overrides = replace(self._overrides(training=False), backend=build_alone)
        with assemble(config, overrides=overrides) as parts:
            step = resume(parts).step
            # The step after next: a sampler that lags one step behind has the last update by then.
            metrics = parts.evaluator.run(parts.backend.sampler(step + 1)).metrics()
        return {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the newest weights (an adapter, or the whole model) and the tokenizer."""
        target = Path(output_dir or str(self.args.output_dir)).expanduser()
        shutil.copytree(self._weights(), target, dirs_exist_ok=True)
        self.processing_class.save_pretrained(target)

    @property
    def model(self) -> Any:
        """The trained model, loaded when it is first asked for; before training, the one that was given."""
        # Weights of an earlier run may lie there, which this one will move away.
        begun = self.callbacks.config is not None
        if not begun or not (Path(str(self.args.output_dir)) / MODEL_FOLDER).is_dir():
            return self.given.loaded if self.given.loaded is not None else self.given.name
        if self._trained is None:
            self._trained = self._load_trained()
        return self._trained

    def _load_trained(self) -> Any:
        weights = self._weights()
        if not self.given.lora["model.lora_rank"]:
            return AutoModelForCausalLM.from_pretrained(weights)
        name, kwargs = self.config().model.model, self.args.model_init_kwargs or {}
        base = AutoModelForCausalLM.from_pretrained(resolve_model(name), **kwargs)
        return PeftModel.from_pretrained(base, weights)

    def _weights(self) -> Path:
        folder = Path(str(self.args.output_dir)).expanduser() / MODEL_FOLDER
        if not folder.is_dir():
            raise CheckpointError(f"{folder.parent} holds no weights yet.  Try: trainer.train() first")
        return folder

    def _overrides(self, training: bool = True) -> Overrides:
        data = ScriptData(self.examples, self.held_out, self.terms, self.state, self.args.chat_template_kwargs or {})

        def problems(config: TrainConfig, console: Console) -> ScriptProblems:
            return ScriptProblems(data, config, console)

        overrides = Overrides(tasks=problems, tokenizer=self.processing_class)
        if not training:
            return overrides
        return replace(overrides, trackers=(self.keeper, self.prompts, self.callbacks), control=self.callbacks)

    def _find_resume(self, wanted: bool | str | None) -> str:
        """The run folder to go on from, or ""."""
        given = self.args.resume_from_checkpoint if wanted is None else wanted
        if not given:
            return ""
        folder = Path(str(self.args.output_dir) if given is True else str(given)).expanduser()
        if folder.parent.name != "checkpoints":
            return str(folder)
        run = folder.parent.parent
        newest = Checkpoints(run, 1, lambda line: None).newest().path
        if newest.name != folder.name:
            raise CheckpointError(f"{folder} is not the newest checkpoint of {run}, which is {newest.name}.")
        return str(run)

    def _output(self, seconds: float) -> TrainOutput:
        losses = self.callbacks.losses
        loss = sum(losses) / len(losses) if losses else 0.0
        metrics = {"train_loss": loss, "train_runtime": seconds, "reward": self.callbacks.reward}
        return TrainOutput(self.state.global_step, loss, metrics)


def _refuse(others: dict[str, Any]) -> None:
    """What TRL's trainer takes beside these: left at None it says nothing, else there is no part for it."""
    reasons = {
        "reward_processing_classes": "reward models of the hub are not rewards here; a function can call one",
        "optimizers": "the optimiser is AdamW, set by the arguments",
        "tools": "tools are of environments: see docs/environments.md",
        "environment_factory": "environments are named by [environment] of a TOML",
        "rollout_func": "completions are sampled by the engine",
        "quantization_config": "quantised weights cannot be trained here",
    }
    for name, value in others.items():
        if name not in reasons:
            raise ConfigError(f"GRPOTrainer takes no argument {name!r}.")
        if value is not None and value != (None, None):
            raise ConfigError(f"GRPOTrainer cannot use {name}: {reasons[name]}.  Leave it out.")
