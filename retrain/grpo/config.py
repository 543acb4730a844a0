"""GRPOConfig: TRL's, with the parameters and defaults that TRL does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import trl

from retrain.errors import ConfigError
from retrain.teaching.templates import TEMPLATE_VARIABLES


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

    docs/grpo_parameters.md lists the defaults that differ from TRL's.
    """

    max_prompt_length: int | None = _new(512, "Longer prompts lose tokens on the left. None: no limit.")
    max_completion_length: int | None = _new(256, "Maximum number of tokens per completion.")
    temperature: float = _new(0.7, "Sampling temperature.")
    top_k: int | None = _new(None, "Sample from the k most likely tokens. None or 0: from all.")
    beta: float = _new(0.04, "KL coefficient. 0: no reference model is loaded.")
    generation_aggregation_steps: int | None = _new(
        None, "Steps whose completions are sampled together: another name for `steps_per_generation`."
    )
    vllm_gpu_memory_utilization: float = _new(0.9, "Share of the GPU's memory for vLLM in this process.")
    vllm_server_timeout: float = _new(120.0, "Seconds to wait for the vLLM server.")
    vllm_device: str = _new("auto", "Device of vLLM. TRL runs it on the training GPU or in a server.")
    vllm_dtype: str = _new("auto", "Precision of vLLM in this process: auto, float16 or bfloat16.")
    vllm_max_model_len: int | None = _new(None, "Context length of vLLM: another name for `vllm_max_model_length`.")
    use_vllm_server: bool = _new(False, "Sample with a running vLLM server (`trl vllm-serve`).")
    vllm_host: str | None = _new(None, "Host of the vLLM server: another name for `vllm_server_host`.")
    vllm_port: int | None = _new(None, "Port of the vLLM server: another name for `vllm_server_port`.")
    num_vllm_clients: int = _new(1, "Number of vLLM clients. TRL has one, in the main process.")
    model_init_kwargs: dict[str, Any] | str | None = _new(  # noqa: RUF009  (a field)
        None, "Keyword arguments of `from_pretrained`."
    )
    ref_model_mixup_alpha: float = _new(0.9, "Weight of the policy when the reference model is synchronised.")
    ref_model_sync_steps: int = _new(64, "Steps between synchronisations of the reference model.")
    offload_untrained_models: bool = _new(
        False, "Keep reference and reward models on the CPU except while they are used."
    )
    backprop_accumulation_steps: int | None = _new(
        None,
        "Split the backward pass of a batch into this many parts, for less memory and one more forward pass.",
    )
    backprop_accumulation_micro_batch_size: int | None = _new(None, "The same, by the maximum number of rows per part.")
    adaptive_teaching: bool = _new(False, "Train the model as the teacher of a frozen student.")
    student_model: str | None = _new(None, "Model of the student. None: the trained model before training.")
    max_probe_tokens: int = _new(50, "Maximum tokens of the student's answer to the diagnostic probe.")
    degradation_penalty_multiplier: float = _new(2.0, "Factor on the reward of teaching that made the student worse.")
    efficiency_weight: float = _new(1.0, "Weight of the bonus for short teaching.")
    student_diagnostic_template: str | None = _new(None, "Prompt of the probe, with {question}.")
    teacher_adaptive_template: str | None = _new(None, "Prompt of the teacher, with {question} and {approach}.")
    student_with_teaching_template: str | None = _new(
        None, "Prompt of the student with teaching, with {question} and {teaching}."
    )
    student_baseline_template: str | None = _new(None, "Prompt of the student without teaching, with {question}.")
    activate_debugging_logs: bool = _new(False, "Print lengths, rewards and advantages of every generated batch.")
    save_completions_probability: float | None = _new(
        None, "Probability that a batch is appended to completions.jsonl in output_dir."
    )
    artificial_epochs: int = _new(1, "Repeat the training set this many times per epoch.")

    def __post_init__(self) -> None:
        self._check()
        self.top_k = self.top_k or 0
        if self.generation_aggregation_steps is not None:
            self.steps_per_generation = self.generation_aggregation_steps
        if self.use_vllm_server:
            self.use_vllm, self.vllm_mode = True, "server"
        if self.vllm_host is not None:
            self.vllm_server_host = self.vllm_host
        if self.vllm_port is not None:
            self.vllm_server_port = self.vllm_port
        if self.vllm_max_model_len is not None:
            self.vllm_max_model_length = self.vllm_max_model_len
        self.model_init_kwargs = rename_dtype(self.model_init_kwargs)
        if vars(self)["bf16"] is None and not torch.accelerator.is_available():
            # TRL's default requires a GPU.
            self.bf16 = False
        super().__post_init__()

    def _check(self) -> None:
        """Raise for values and combinations that cannot work."""
        for name, least in (
            ("num_generations", 1),
            ("num_iterations", 1),
            ("per_device_train_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("max_prompt_length", 1),
            ("generation_aggregation_steps", 1),
            ("backprop_accumulation_steps", 1),
            ("backprop_accumulation_micro_batch_size", 1),
            ("max_probe_tokens", 1),
            ("artificial_epochs", 1),
            ("degradation_penalty_multiplier", 0),
            ("efficiency_weight", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")
        for name in ("learning_rate", "temperature"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} must be a number, got {getattr(self, name)}.")
        share = self.save_completions_probability
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"save_completions_probability must be between 0 and 1, got {share}.")
        if self.generation_aggregation_steps is not None and self.steps_per_generation is not None:
            raise ConfigError("generation_aggregation_steps and steps_per_generation are two names of one setting.")
        if self.backprop_accumulation_steps and self.backprop_accumulation_micro_batch_size:
            raise ConfigError(
                "backprop_accumulation_steps and backprop_accumulation_micro_batch_size are alternatives.  Set one."
            )
        if self.num_vllm_clients != 1:
            raise ConfigError("num_vllm_clients must be 1: TRL samples through one client, in the main process.")
        if self.vllm_device != "auto":
            raise ConfigError(
                f"vllm_device = {self.vllm_device!r}: TRL runs vLLM on the training GPU (vllm_device='auto') or in a "
                "server.  Try: use_vllm_server=True, with the server started on that device"
            )
        if self.vllm_dtype not in ("auto", "float16", "bfloat16"):
            raise ConfigError(f"vllm_dtype must be auto, float16 or bfloat16, got {self.vllm_dtype!r}.")
        for name, variables in TEMPLATE_VARIABLES.items():
            template = getattr(self, name)
            for variable in variables:
                if template is not None and f"{{{variable}}}" not in template:
                    raise ConfigError(f"{name} has no {{{variable}}}.")


def add_missing_fields(args: trl.GRPOConfig) -> None:
    """Let a plain `trl.GRPOConfig` be used: what it does not have is off."""
    theirs = {each.name for each in fields(trl.GRPOConfig)}
    for each in fields(GRPOConfig):
        if each.name not in theirs:
            setattr(args, each.name, None if each.name == "max_prompt_length" else each.default)


def different_defaults(args: trl.GRPOConfig) -> dict[str, tuple[Any, Any]]:
    """Arguments that have our default where TRL's is another one: name, ours and TRL's."""
    theirs = {each.name: each.default for each in fields(trl.GRPOConfig)}
    return {
        each.name: (each.default, theirs[each.name])
        for each in fields(GRPOConfig)
        if each.name in theirs and theirs[each.name] != (each.default or 0) and getattr(args, each.name) == each.default
    }
