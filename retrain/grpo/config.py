"""GRPOConfig: transformers' TrainingArguments with the parameters of GRPO, each declared once and checked when made."""

# ruff: noqa: RUF009  (every call in the class makes a dataclasses.field)

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from retrain.errors import ConfigError, ConfigIssue
from retrain.grpo.combinations import find_combinations
from retrain.grpo.inherited import find_inherited
from retrain.grpo.parameters import Declared, check_values, parameter

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Names of TRL, and of older transformers, and what stands for them here.
RENAMED = {
    "vllm_mode": "use_vllm=True (a server of the run's own) or use_vllm_server=True",
    "vllm_server_base_url": "use_vllm_server=True with vllm_host and vllm_port",
    "vllm_server_host": "vllm_host",
    "vllm_server_port": "vllm_port",
    "vllm_max_model_length": "vllm_max_model_len",
    "steps_per_generation": "generation_aggregation_steps",
    "generation_batch_size": "per_device_train_batch_size and generation_aggregation_steps",
    "warmup_ratio": "warmup_steps below 1",
    "logging_dir": "output_dir, which holds the logs",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
}
_TWIN = "test_a_parameter_reaches_its_twin"


def _group(group: str) -> Any:
    """Declare parameters of one group; that one reaches its twin is tested of all, but for those that have none."""

    def declare(default: Any, twin: str, does: str, tested: str = "", **bounds: Any) -> Any:
        first = "" if twin.startswith(("none: ", "`[[", "`[resume]", "`[distributed]")) else _TWIN
        return parameter(default, Declared(group, twin, does, f"{first} {tested}".strip(), **bounds))

    return declare


_model = _group("Model and data")
_generation = _group("Generation")
_vllm = _group("vLLM")
_algorithm = _group("Algorithm")
_memory = _group("Memory")
_teaching = _group("Adaptive teaching")
_logging = _group("Logging and debugging")
_trl = _group("Arguments of TRL")
_run = _group("TrainingArguments that are honoured")


@contextmanager
def _alone() -> Iterator[None]:
    """Hide what a launcher said: transformers would join the processes by itself, and retrain does when it trains."""
    told = {name: value for name, value in os.environ.items() if name in LAUNCHED or name.startswith("ACCELERATE_USE_")}
    for name in told:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(told)


@dataclass
class GRPOConfig(TrainingArguments):  # type: ignore[misc]  # transformers has no types
    """Everything about a GRPO run but the model, the rewards and the data.

    An argument that is wrong, or that would be without effect, is a ConfigError that names it. What transformers adds
    to TrainingArguments and is not declared here is refused when it is changed: its own training loop does not run.
    """

    model_init_kwargs: dict[str, Any] | None = _model(
        None,
        "`[model] init_kwargs`; dtype: `[model] dtype`",
        "Keyword arguments of from_pretrained; a dtype in them is the training precision.",
        "test_a_dtype_of_the_model_arguments_is_the_training_precision",
    )
    remove_unused_columns: bool = _model(
        False,
        "`[data] remove_unused_columns`",
        "Keep only the prompt: reward functions see no other column.",
        "test_unused_columns_are_kept_from_the_rewards",
    )
    artificial_epochs: int = _model(
        1, "`[training] epochs`", "Factor on num_train_epochs; not with max_steps.", "test_epochs_multiply", low=1
    )
    chat_template_kwargs: dict[str, Any] | None = _model(
        None,
        "none: Python only",
        "Arguments of the chat template, such as enable_thinking.",
        "test_the_chat_template_is_given_its_arguments",
    )

    num_generations: int = _generation(
        8,
        "`[training] group_size`",
        "Completions a prompt. The global batch must be a multiple of it.",
        "test_a_group_must_divide_the_global_batch",
        low=2,
    )
    max_prompt_length: int = _generation(
        512,
        "`[training] max_prompt_tokens`",
        "Longest prompt in tokens; longer ones lose their beginning.",
        "test_a_long_prompt_loses_its_beginning",
        low=1,
    )
    max_completion_length: int = _generation(
        256,
        "`[training] max_tokens`",
        "Most new tokens a completion.",
        "test_a_completion_ends_with_its_stop_token_or_at_the_limit",
        low=1,
    )
    generation_aggregation_steps: int | None = _generation(
        None,
        "`[training] prompts_per_sampling`",
        "Accumulation steps whose completions are sampled at one time; None samples all of a step's.",
        "test_aggregation_counts_prompts",
        low=1,
    )
    temperature: float = _generation(
        0.7,
        "`[training] temperature`",
        "Sampling temperature.",
        "test_every_option_draws_what_the_slow_version_draws",
        above=0,
        high=100,
    )
    top_p: float = _generation(
        1.0,
        "`[training] top_p`",
        "Keep the likeliest tokens up to this mass.",
        "test_every_option_draws_what_the_slow_version_draws",
        above=0,
        high=1,
    )
    top_k: int | None = _generation(
        None,
        "`[training] top_k`",
        "Keep only the k likeliest tokens; None or 0 keeps all.",
        "test_every_option_draws_what_the_slow_version_draws",
        low=0,
    )
    min_p: float | None = _generation(
        None,
        "`[training] min_p`",
        "Drop tokens less likely than this share of the likeliest.",
        "test_every_option_draws_what_the_slow_version_draws",
        low=0,
        high=1,
    )
    repetition_penalty: float = _generation(
        1.0,
        "`[training] repetition_penalty`",
        "Divide the logits of tokens already seen; 1 is off.",
        "test_every_option_draws_what_the_slow_version_draws",
        above=0,
        high=100,
    )

    use_vllm: bool = _vllm(
        False,
        '`[inference] engine = "vllm"`, `launch`',
        "Start a vLLM server for the length of the run.",
        "test_vllm_is_either_launched_or_found test_a_run_trains_on_its_own_server_which_ends_with_it",
    )
    vllm_device: str = _vllm(
        "auto",
        "`[inference] launch_device`",
        "Its device: cpu, cuda:N, or auto for the first GPU that does not train.",
        "test_a_device_is_chosen",
    )
    vllm_gpu_memory_utilization: float = _vllm(
        0.9, "`[inference] gpu_memory_utilization`", "Share of the GPU's memory for model and cache.", above=0, high=1
    )
    vllm_dtype: str = _vllm(
        "auto",
        "`[inference] launch_dtype`",
        "Precision it computes in.",
        choices=("auto", "float16", "bfloat16", "float32"),
    )
    vllm_max_model_len: int | None = _vllm(
        None, "`[inference] max_model_len`", "Most tokens of its context; None takes the model's.", low=1
    )
    use_vllm_server: bool = _vllm(
        False,
        '`[inference] engine = "vllm"`, `url`',
        "Sample on vLLM servers that run already.",
        "test_vllm_is_either_launched_or_found",
    )
    vllm_host: str | None = _vllm(None, "`[inference] url`", "Host of the servers; None is 127.0.0.1.")
    vllm_port: int | None = _vllm(
        None, "`[inference] url`", "Port of the first server; None is 8000.", low=1, high=65535
    )
    vllm_server_timeout: float = _vllm(
        120.0,
        "`[inference] wait_s`",
        "Seconds to wait for a server to come up.",
        "test_a_server_that_comes_up_late_is_waited_for",
        above=0,
        high=86400,
    )
    num_vllm_clients: int = _vllm(
        1, "`[inference] url`", "Servers that share the work, on ports that follow the first.", low=1, high=1024
    )

    learning_rate: float = _algorithm(
        1e-6, "`[training] lr`", "Learning rate of AdamW at its highest.", above=0, high=10
    )
    beta: float = _algorithm(
        0.04,
        "`[kl] beta`",
        "Weight of the KL penalty to the reference, by the k3 estimator; 0 is off.",
        "test_the_penalty_adds_its_gradient_and_its_value",
        low=0,
    )
    reward_weights: list[float] | None = _algorithm(
        None,
        "`[[reward.terms]]` `weight`",
        "A weight for each reward function; None weighs each by 1.",
        "test_rewards_are_weighed_and_each_is_a_metric test_weights_are_as_many_as_the_rewards",
    )
    sync_ref_model: bool = _algorithm(
        False,
        "`[kl] sync_ref_model`",
        "Move the reference towards the policy now and then.",
        "test_a_forbidden_combination_is_refused test_the_reference_follows_in_steps_by_its_share_of_the_policy",
    )
    ref_model_mixup_alpha: float = _algorithm(
        0.9,
        "`[kl] ref_model_mixup_alpha`",
        "Share of the policy in each such move.",
        "test_the_reference_follows_in_steps_by_its_share_of_the_policy",
        low=0,
        high=1,
    )
    ref_model_sync_steps: int = _algorithm(
        64,
        "`[kl] ref_model_sync_steps`",
        "Steps between such moves.",
        "test_the_reference_follows_in_steps_by_its_share_of_the_policy",
        low=1,
    )

    ds3_gather_for_generation: bool = _memory(
        True,
        "`[distributed] gather_for_generation`",
        "Gather the weights of ZeRO-3 before sampling.",
        "test_a_forbidden_combination_is_refused test_ungathered_weights_of_zero_3_reach_their_twin",
    )
    offload_untrained_models: bool = _memory(
        False,
        "`[memory] offload_untrained_models`",
        "Keep frozen models in CPU memory between uses.",
        "test_an_offloaded_reference_gives_the_same_penalty test_a_student_that_waits_in_cpu_memory_draws_the_same",
    )
    backprop_accumulation_steps: int | None = _memory(
        None,
        "`[memory] micro_batches`",
        "Passes that a step is split into, at least; None chooses.",
        "test_micro_batches_of_few_rows_have_the_gradient_of_one",
        low=1,
    )
    backprop_accumulation_micro_batch_size: int | None = _memory(
        None,
        "`[memory] micro_batch_rows`",
        "Most completions in one pass; None chooses.",
        "test_micro_batches_of_few_rows_have_the_gradient_of_one",
        low=1,
    )

    adaptive_teaching: bool = _teaching(
        False,
        "`[teaching] enabled`",
        "Train the model as a teacher of a frozen student.",
        "test_a_forbidden_combination_is_refused test_a_run_trains_the_teaching_and_logs_the_student",
    )
    student_model: str | None = _teaching(
        None,
        "`[teaching] student_model`",
        "The student; None is the model as it was before training.",
        "test_another_student_reads_with_its_own_tokenizer",
    )
    max_probe_tokens: int = _teaching(
        50,
        "`[teaching] max_probe_tokens`",
        "Most tokens of the student's diagnostic answer.",
        "test_each_model_is_asked_what_its_template_says",
        low=1,
    )
    degradation_penalty_multiplier: float = _teaching(
        2.0,
        "`[teaching] degradation_penalty_multiplier`",
        "Factor on the reward when teaching made the student worse.",
        "test_multiplier_and_weight_scale_their_own_part_only",
        low=0,
    )
    efficiency_weight: float = _teaching(
        1.0,
        "`[teaching] efficiency_weight`",
        "Weight of the bonus for short teaching.",
        "test_multiplier_and_weight_scale_their_own_part_only",
        low=0,
    )
    student_diagnostic_template: str | None = _teaching(
        None,
        "`[teaching] student_diagnostic_template`",
        "Prompt of the probe; holds `{question}`. None takes the built-in one.",
        "test_a_template_must_hold_its_variables",
    )
    teacher_adaptive_template: str | None = _teaching(
        None,
        "`[teaching] teacher_adaptive_template`",
        "Prompt of the teacher; holds `{question}` and `{approach}`.",
        "test_a_template_must_hold_its_variables",
    )
    student_with_teaching_template: str | None = _teaching(
        None,
        "`[teaching] student_with_teaching_template`",
        "Prompt of the taught student; holds `{question}` and `{teaching}`.",
        "test_a_template_must_hold_its_variables",
    )
    student_baseline_template: str | None = _teaching(
        None,
        "`[teaching] student_baseline_template`",
        "Prompt of the student alone; holds `{question}`.",
        "test_a_template_must_hold_its_variables",
    )

    activate_debugging_logs: bool = _logging(
        False,
        "`[logging] debug`",
        "Write what every step did in detail to debug.jsonl.",
        "test_debugging_writes_what_became_of_every_completion",
    )
    log_completions: bool = _logging(
        False,
        "`[logging] log_completions`",
        "Send a table of prompts, completions, rewards and advantages to wandb and trackio.",
        "test_wandb_is_sent_a_table_of_completions",
    )
    save_completions_probability: float | None = _logging(
        None,
        "`[logging] save_completions_probability`",
        "Share of the steps whose completions are written to generations.jsonl; None is retrain's default, all.",
        "test_the_share_of_steps_with_completions_is_as_asked",
        low=0,
        high=1,
    )

    loss_type: str = _trl(
        "dapo",
        "`[loss] type`",
        "dapo is ppo over all tokens of a step, bnpo the same without accumulation; dr_grpo; grpo.",
        "test_a_loss_that_differs_is_refused",
    )
    importance_sampling_level: str = _trl("token", "`[loss] type`", "sequence is gspo.", choices=("token", "sequence"))
    epsilon: float = _trl(0.2, "`[loss] clip_low`, `clip_high`", "Ratios below 1 - epsilon are clipped.", low=0, high=1)
    epsilon_high: float | None = _trl(
        None, "`[loss] clip_high`", "Ratios above 1 + epsilon_high are clipped; None is epsilon.", low=0
    )
    scale_rewards: str = _trl(
        "group",
        "`[algorithm] advantage_mode`",
        "group (or True) divides advantages by the spread of the group: grpo_scaled; none (or False): grpo.",
        "test_scaled_advantages_have_a_spread_of_one",
        choices=("group", "none"),
    )
    num_iterations: int = _trl(
        1,
        "none: always 1",
        "Updates a batch. Only 1: every batch is sampled afresh.",
        "test_a_wrong_value_is_refused_by_name",
        low=1,
        high=1,
    )
    mask_truncated_completions: bool = _trl(
        False,
        "none: always False",
        "Leave cut completions out of the loss. Only False.",
        "test_a_wrong_value_is_refused_by_name",
        choices=(False,),
    )
    num_generations_eval: int | None = _trl(
        None, "`[eval] samples`", "Completions a prompt of an evaluation; None is num_generations.", low=1
    )

    output_dir: str | None = _run(
        None, "`[logging] log_dir`", "Folder of logs and checkpoints; None is trainer_output."
    )
    per_device_train_batch_size: int = _run(
        8,
        "`[training] batch_size`",
        "Completions of a process and accumulation step. Prompts a step are the product over num_generations.",
        low=1,
    )
    gradient_accumulation_steps: int = _run(
        1, "`[training] batch_size`", "Accumulation steps: a factor on the completions of a step.", low=1
    )
    num_train_epochs: float = _run(
        3.0, "`[training] epochs`", "Passes over the prompts; unused with max_steps.", above=0, high=1e6
    )
    max_steps: int = _run(-1, "`[training] max_steps`", "Training steps; -1 counts epochs.", low=-1)
    lr_scheduler_type: SchedulerType | str = _run(
        "linear",
        "`[optimizer] schedule`",
        "Learning rate after its warm-up.",
        "test_schedules_have_their_names test_every_schedule_is_that_of_transformers",
    )
    lr_scheduler_kwargs: dict[str, Any] | None = _run(None, "`[optimizer] schedule_args`", "Arguments of the schedule.")
    warmup_steps: float = _run(
        0,
        "`[optimizer] warmup_steps`",
        "Steps over which the rate rises; below 1 a share of all steps.",
        "test_every_schedule_is_that_of_transformers",
        low=0,
    )
    optim: OptimizerNames | str = _run(
        "adamw_torch_fused",
        "none: AdamW",
        "adamw_torch or adamw_torch_fused: both are AdamW in float32.",
        "test_a_forbidden_combination_is_refused",
    )
    weight_decay: float = _run(
        0.0, "`[training] weight_decay`", "AdamW weight decay.", "test_the_optimizer_is_adamw_as_configured", low=0
    )
    adam_beta1: float = _run(
        0.9, "`[optimizer] beta1`", "AdamW beta1.", "test_the_optimizer_is_adamw_as_configured", low=0, high=1
    )
    adam_beta2: float = _run(
        0.999, "`[optimizer] beta2`", "AdamW beta2.", "test_the_optimizer_is_adamw_as_configured", low=0, high=1
    )
    adam_epsilon: float = _run(
        1e-8, "`[optimizer] eps`", "AdamW epsilon.", "test_the_optimizer_is_adamw_as_configured", above=0, high=1
    )
    max_grad_norm: float = _run(
        1.0, "`[loss] grad_clip`", "Largest gradient norm; 0 is off.", "test_a_gradient_is_clipped_to_its_norm", low=0
    )
    bf16: bool | None = _run(
        None, "`[model] dtype`", "True is bf16, False fp32, None bf16 on a GPU and fp32 on the CPU."
    )
    gradient_checkpointing: bool = _run(
        False,
        "`[memory] gradient_checkpointing`",
        "Always recompute activations; otherwise as many layers as memory asks for.",
        "test_gradient_checkpointing_recomputes_and_gives_the_same_gradient",
    )
    gradient_checkpointing_kwargs: dict[str, Any] | None = _run(
        None,
        "none: fixed",
        "Only use_reentrant=False, which is how activations are recomputed here.",
        "test_a_forbidden_combination_is_refused",
    )
    logging_strategy: IntervalStrategy | str = _run(
        "steps", "`[logging] every`", "steps, epoch, or no: only metrics.jsonl has the steps.", "test_intervals"
    )
    logging_steps: float = _run(
        10,
        "`[logging] every`",
        "Steps between lines on the screen, on_log, and rows in trackers; below 1 a share of all steps.",
        "test_intervals",
        above=0,
    )
    report_to: None | str | list[str] = _run(  # noqa: RUF036  (transformers' parser reads unions in this order)
        "none", "`[logging] wandb_project`, `trackio_project`", "wandb, trackio, both, or none."
    )
    run_name: str | None = _run(None, "`[logging] wandb_run_name`", "Name of the run in trackers.")
    project: str = _run(
        "huggingface",
        "`[logging] wandb_project`, `trackio_project`",
        "Project in trackers; WANDB_PROJECT wins for wandb.",
    )
    disable_tqdm: bool | None = _run(
        None,
        "none: there is no bar",
        "Accepted: retrain prints lines and draws no bar.",
        "test_harmless_arguments_are_accepted",
        choices=(True, False, None),
    )
    save_strategy: SaveStrategy | str = _run(
        "steps", "`[training] save_every`", "steps, epoch, or no: only the end is saved.", "test_intervals"
    )
    save_steps: float = _run(
        500,
        "`[training] save_every`",
        "Steps between checkpoints; below 1 a share of all steps.",
        "test_intervals",
        above=0,
    )
    save_total_limit: int | None = _run(None, "`[training] keep`", "Checkpoints kept; None keeps all.", low=1)
    eval_strategy: IntervalStrategy | str = _run(
        "no", "`[eval] every`", "steps, epoch, or no. Step 0 and the end are evaluated too.", "test_intervals"
    )
    eval_steps: float | None = _run(
        None, "`[eval] every`", "Steps between evaluations; None is logging_steps.", "test_intervals", above=0
    )
    resume_from_checkpoint: str | None = _run(
        None, "`[resume] from`", "Run folder to go on from.", "test_a_run_goes_on_where_it_ended"
    )
    seed: int = _run(42, "`[training] seed`", "Seed of every random draw.", low=0)
    use_cpu: bool = _run(
        False, "`[backend] devices`", "Train on the CPU though there is a GPU; without one it is the CPU anyway."
    )

    def __post_init__(self) -> None:
        """Check everything, then let transformers have its turn."""
        if isinstance(self.scale_rewards, bool):
            # As it was spelt before there were more than two ways.
            self.scale_rewards = "group" if self.scale_rewards else "none"
        hints = typing.get_type_hints(type(self))
        problems = [*find_inherited(self), *check_values(self, hints)]
        if not problems:
            problems = list(find_combinations(self))
        if problems:
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            raise ConfigError(f"GRPOConfig has {count}:", tuple(problems))
        with _alone():
            super().__post_init__()


def _refusing_strangers(made: Any) -> Any:
    """The dataclass's own `__init__`, with a sentence for arguments that it does not know."""

    @functools.wraps(made)
    def checked(self: Any, *args: Any, **arguments: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]
        problems = []
        for name in (name for name in arguments if name not in known):
            close = get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else "Leave it out; docs/grpo.md lists what there is."
            problems.append(ConfigIssue(name, "is not known.", f"Try: {RENAMED[name]}" if name in RENAMED else hint))
        if problems:
            raise ConfigError("GRPOConfig was given arguments that it does not have:", tuple(problems))
        made(self, *args, **arguments)

    return checked


GRPOConfig.__init__ = _refusing_strangers(GRPOConfig.__init__)  # type: ignore[method-assign]
