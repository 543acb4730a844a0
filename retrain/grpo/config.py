"""GRPOConfig: TRL's class with additional parameters and different defaults."""

# ruff: noqa: RUF009  (`_new` makes a field)
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_type_hints

import torch
import trl
from pydantic import FiniteFloat, NonNegativeFloat, PositiveInt

from retrain.errors import ConfigError, ConfigIssue
from retrain.grpo.settings import Share, check_types
from retrain.teaching.templates import TEMPLATE_VARIABLES

OTHER_NAMES = {
    "generation_aggregation_steps": "steps_per_generation",
    "vllm_host": "vllm_server_host",
    "vllm_port": "vllm_server_port",
    "vllm_max_model_len": "vllm_max_model_length",
}


def _new(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def rename_dtype(given: dict[str, Any] | str | None) -> dict[str, Any] | str | None:
    """Model arguments with `torch_dtype` as `dtype`: transformers renamed it, and TRL reads the new name only."""
    if not isinstance(given, dict):
        return given
    return {"dtype" if key == "torch_dtype" else key: value for key, value in given.items()}


@dataclass
class GRPOConfig(trl.GRPOConfig):  # type: ignore[misc]
    """Arguments of `GRPOTrainer`: every argument of `trl.GRPOConfig`, and those below.

    docs/grpo-parameters.md lists the defaults that differ from TRL's.
    """

    num_generations: PositiveInt | None = _new(8, "Completions per prompt.")
    num_iterations: PositiveInt = _new(1, "Passes over every generated batch.")
    per_device_train_batch_size: PositiveInt = _new(8, "Completions per process and step.")
    gradient_accumulation_steps: PositiveInt = _new(1, "Batches per optimizer step.")
    learning_rate: FiniteFloat = _new(1e-6, "Initial learning rate.")
    max_prompt_length: PositiveInt | None = _new(512, "Longer prompts are truncated from the left. None: no limit.")
    max_completion_length: int | None = _new(256, "Maximum number of tokens per completion.")
    temperature: FiniteFloat = _new(0.7, "Sampling temperature.")
    top_k: int | None = _new(None, "Sample from the k most likely tokens. None or 0: from all.")
    beta: float = _new(0.04, "KL coefficient. 0: no reference model is loaded.")
    generation_aggregation_steps: PositiveInt | None = _new(None, "Another name for `steps_per_generation`.")
    vllm_gpu_memory_utilization: float = _new(0.9, "Share of the GPU's memory for vLLM in this process.")
    vllm_server_timeout: float = _new(120.0, "Seconds to wait for the vLLM server.")
    vllm_device: str = _new("auto", "Device of vLLM. TRL runs it on the training GPU or in a server.")
    vllm_dtype: Literal["auto", "float16", "bfloat16"] = _new("auto", "Precision of vLLM in this process.")
    vllm_max_model_len: int | None = _new(None, "Another name for `vllm_max_model_length`.")
    use_vllm_server: bool = _new(False, "Sample with a running vLLM server (`trl vllm-serve`).")
    vllm_host: str | None = _new(None, "Another name for `vllm_server_host`.")
    vllm_port: int | None = _new(None, "Another name for `vllm_server_port`.")
    num_vllm_clients: int = _new(1, "Number of vLLM clients. TRL has one, in the main process.")
    model_init_kwargs: dict[str, Any] | str | None = _new(None, "Arguments of `from_pretrained`.")
    ref_model_mixup_alpha: float = _new(0.9, "Weight of the policy when the reference model is synchronized.")
    ref_model_sync_steps: int = _new(64, "Steps between synchronizations of the reference model.")
    offload_untrained_models: bool = _new(False, "Keep reference and reward models on the CPU while not in use.")
    backprop_accumulation_steps: PositiveInt | None = _new(
        None, "Parts that the backward pass of a batch is split into."
    )
    backprop_accumulation_micro_batch_size: PositiveInt | None = _new(None, "The same, by the rows per part.")
    adaptive_teaching: bool = _new(False, "Train the model as the teacher of a frozen student.")
    student_model: str | None = _new(None, "Model of the student. None: the trained model before training.")
    max_probe_tokens: PositiveInt = _new(50, "Maximum tokens of the student's answer to the diagnostic probe.")
    degradation_penalty_multiplier: NonNegativeFloat = _new(2.0, "Factor on rewards of teaching that did harm.")
    efficiency_weight: NonNegativeFloat = _new(1.0, "Weight of the bonus for short teaching.")
    student_diagnostic_template: str | None = _new(None, "Prompt of the probe, with {question}.")
    teacher_adaptive_template: str | None = _new(None, "Prompt of the teacher, with {question} and {approach}.")
    student_with_teaching_template: str | None = _new(None, "Taught student's prompt: {question} and {teaching}.")
    student_baseline_template: str | None = _new(None, "Prompt of the student without teaching, with {question}.")
    activate_debugging_logs: bool = _new(False, "Print lengths and advantages of every generated batch.")
    save_completions_probability: Share | None = _new(None, "Probability that a batch is saved to completions.jsonl.")
    artificial_epochs: PositiveInt = _new(1, "Repeat the training set this many times per epoch.")

    def __post_init__(self) -> None:
        hints = get_type_hints(GRPOConfig, include_extras=True)
        values, issues = check_types({name: vars(self)[name] for name in GRPOConfig.__annotations__}, hints)
        for name, value in values.items():
            setattr(self, name, value)
        issues = issues or self._find_conflicts()
        if issues:
            raise ConfigError("these arguments of GRPOConfig cannot be used:", tuple(issues))
        for name, name_in_trl in OTHER_NAMES.items():
            if vars(self)[name] is not None:
                setattr(self, name_in_trl, vars(self)[name])
        self.top_k = self.top_k or 0
        if self.use_vllm_server:
            self.use_vllm, self.vllm_mode = True, "server"
        if vars(self)["bf16"] is None and not torch.accelerator.is_available():
            # TRL's default requires a GPU.
            self.bf16 = False
        super().__post_init__()
        # By now a dictionary, if it was given as JSON on a command line.
        self.model_init_kwargs = rename_dtype(self.model_init_kwargs)

    def _find_conflicts(self) -> list[ConfigIssue]:
        """Values and combinations that cannot work."""
        given = vars(self)
        issues = [
            ConfigIssue(name, f"has no {{{variable}}}.")
            for name, variables in TEMPLATE_VARIABLES.items()
            for variable in variables
            if given[name] is not None and f"{{{variable}}}" not in given[name]
        ]
        if self.generation_aggregation_steps is not None and self.steps_per_generation is not None:
            issues.append(
                ConfigIssue("generation_aggregation_steps and steps_per_generation", "are two names of one setting.")
            )
        if self.backprop_accumulation_steps and self.backprop_accumulation_micro_batch_size:
            both = "backprop_accumulation_steps and backprop_accumulation_micro_batch_size"
            issues.append(ConfigIssue(both, "are alternatives.", "Set one."))
        if self.num_vllm_clients != 1:
            issues.append(
                ConfigIssue("num_vllm_clients", "must be 1: TRL samples through one client, in the main process.")
            )
        if self.vllm_device != "auto":
            text = f"= {self.vllm_device!r}: TRL runs vLLM on the training GPU (vllm_device='auto') or in a server."
            hint = "Try: use_vllm_server=True, with the server started on that device"
            issues.append(ConfigIssue("vllm_device", text, hint))
        return issues


def add_missing_fields(args: trl.GRPOConfig) -> None:
    """Add the parameters that a plain `trl.GRPOConfig` lacks, with values that switch them off."""
    theirs = {each.name for each in fields(trl.GRPOConfig)}
    for each in fields(GRPOConfig):
        if each.name not in theirs:
            setattr(args, each.name, None if each.name == "max_prompt_length" else each.default)


def different_defaults(args: trl.GRPOConfig) -> dict[str, tuple[Any, Any]]:
    """Arguments left at our default where TRL's differs: name, our default and TRL's."""
    theirs = {each.name: each.default for each in fields(trl.GRPOConfig)}
    own = {
        each.name: each.default for each in fields(GRPOConfig) if theirs.get(each.name, each.default) != each.default
    }
    return {name: (default, theirs[name]) for name, default in own.items() if getattr(args, name) == default}
