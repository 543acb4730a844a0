"""Every table and every option, each declared once.

The TOML key, the flag, the check, the message, the docs table, the manual, the starter files, `explain` and the JSON
schema all follow from these declarations. To add an option, add one line here and use it.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WrapValidator

from retrain.config.declare import Count, Section, Table, option, table_or_json, whole_number


class Backend(Section):
    """Where the weights are trained."""

    backend: str = option(
        "local", "Training backend: local (PyTorch and PEFT) or tinker (a remote service).", kind="backend"
    )
    devices: str = option(
        "gpu:0",
        "auto (the first GPU, else the CPU), cpu, gpu:N, or several with commas: the first samples, the last trains.",
    )
    adapter_path: str = option(
        "/tmp/retrain_adapter",
        "Folder that always holds the newest adapter in PEFT layout.",
        min_length=1,
        flag="--adapter-path",
    )
    max_concurrent: Count = option(4, "Most Tinker calls in flight over all runs that share throttle_dir.", ge=1)
    throttle_dir: str = option(
        "", "Folder of the semaphore shared by parallel Tinker runs; empty uses the system's temporary one."
    )


class Model(Section):
    """The model that learns."""

    model: str = option(
        "Qwen/Qwen3-4B-Instruct-2507", "Hugging Face id, a local folder, or builtin:tiny.", min_length=1, flag="--model"
    )
    base_url: str = option("", "Tinker service URL (tinker backend only).")
    lora_rank: Count = option(32, "LoRA rank; 0 trains the whole model.", ge=0)
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", "Training precision; auto is bf16 on a GPU and fp32 on the CPU."
    )
    init_kwargs: Table = option({}, "Keyword arguments of transformers' from_pretrained, beside those set here.")


class Algorithm(Section):
    """How rewards become token advantages."""

    advantage_mode: str = option(
        "maxrl", "Episode advantage: grpo, grpo_scaled, maxrl or a dotted path.", kind="advantage"
    )
    transform_mode: str = option(
        "gtpo_sepa", "Token transform: none, gtpo, gtpo_hicra, gtpo_sepa or a dotted path.", kind="transform"
    )
    algorithm_mode: str = option(
        "", "Dotted path of a function that replaces advantage and transform together.", kind="algorithm"
    )
    uncertainty_kind: str = option(
        "surprisal",
        "Token uncertainty: surprisal, predictive_variance, shannon_entropy or a dotted path.",
        kind="uncertainty",
    )
    advantage_params: Table = option({}, "Keyword arguments for a custom advantage.")
    transform_params: Table = option({}, "Keyword arguments for a custom transform or algorithm.")


Deterministic = Literal["auto", True, False]


class Training(Section):
    """How long, how much, and how completions are drawn."""

    seed: Count = option(
        -1, "Seed of every random draw; -1 takes a fresh one and writes it into the run's config.toml.", ge=-1
    )
    max_steps: Count = option(500, "Training steps in all.", ge=1, flag="--max-steps")
    epochs: float = option(0.0, "Passes over the examples in place of max_steps; 0 counts steps.", ge=0, le=1e6)
    batch_size: Count = option(8, "Prompts a step.", ge=1, le=1_000_000)
    group_size: Count = option(16, "Completions per prompt.", ge=1, le=100_000)
    max_tokens: Count = option(2048, "Most new tokens a completion.", ge=1)
    temperature: float = option(0.7, "Sampling temperature.", gt=0, le=100, flag="--temperature")
    lr: float = option(4e-5, "Learning rate.", gt=0, le=10)
    weight_decay: float = option(0.0, "AdamW weight decay.", ge=0)
    max_examples: Count = option(0, "Use only the first n examples; 0 uses all.", ge=0, flag="--max-examples")
    save_every: Count = option(20, "Steps between checkpoints.", ge=1)
    keep: Count = option(2, "Checkpoints kept; older ones are deleted.", ge=1)
    record: bool = option(False, "Store every step's rollouts, so that `retrain replay` can recompute credit on them.")
    resample_dead_groups: Count = option(
        0, "Rounds of fresh prompts drawn to replace groups whose rewards are all equal.", ge=0, le=100
    )
    prompts_per_sampling: Count = option(0, "Prompts sampled at one time; 0 samples a step's all at once.", ge=0)
    async_steps: Count = option(
        0, "Steps the sampler may run ahead of the trainer; 0 is strictly on-policy.", ge=0, le=1
    )
    top_p: float = option(1.0, "Nucleus sampling: keep the likeliest tokens up to this mass.", gt=0, le=1)
    top_k: Count = option(0, "Keep only the k likeliest tokens; 0 keeps all.", ge=0)
    min_p: float = option(0.0, "Drop tokens less likely than this share of the likeliest one.", ge=0, le=1)
    repetition_penalty: float = option(1.0, "Divide the logits of tokens already seen; 1 is off.", gt=0, le=100)
    deterministic: Deterministic = option(
        "auto",
        "Repeat runs to the bit: auto does on a CPU, and on a GPU wherever it costs less than 5 %.",
    )
    max_prompt_tokens: Count = option(
        0, "Cut prompts from the left to this many tokens; 0 refuses prompts that do not fit.", ge=0
    )


class Optimizer(Section):
    """AdamW and its learning rate over the steps."""

    beta1: float = option(0.9, "AdamW beta1.", ge=0, lt=1)
    beta2: float = option(0.95, "AdamW beta2.", ge=0, lt=1)
    eps: float = option(1e-8, "AdamW epsilon.", gt=0, le=1)
    schedule: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"] = option(
        "constant", "Learning rate after its warm-up.", flag="--lr-schedule"
    )
    schedule_args: Table = option({}, "Arguments of the schedule by transformers' names, such as min_lr_rate.")
    warmup_steps: float = option(
        0.0, "Steps over which the learning rate rises from 0; below 1 it is a share of all steps.", ge=0
    )


class Lora(Section):
    """The adapter."""

    alpha: Count = option(0, "LoRA alpha; 0 means twice the rank.", ge=0)
    dropout: float = option(0.0, "LoRA dropout.", ge=0, lt=1)
    target_modules: str = option(
        "all-linear", "Layers that get an adapter: all-linear, or comma-separated module names.", min_length=1
    )


class Loss(Section):
    """The policy-gradient loss."""

    type: Literal["importance_sampling", "ppo", "cispo", "gspo", "dr_grpo", "grpo"] = option(
        "importance_sampling", "Loss over completion tokens.", flag="--loss-type"
    )
    clip_low: float = option(
        0.2, "Ratios below 1 - clip_low are clipped (not of importance_sampling).", ge=0, le=1, flag="--loss-clip-low"
    )
    clip_high: float = option(
        0.2, "Ratios above 1 + clip_high are clipped (not of importance_sampling).", ge=0, flag="--loss-clip-high"
    )
    ratio_cap: float = option(
        2.0,
        "Cap on the importance ratio (not of cispo), against engine and trainer disagreeing; 0 is off, else from 1 up.",
        ge=0,
        flag="--loss-ratio-cap",
    )
    grad_clip: float = option(1.0, "Largest gradient norm; 0 is off.", ge=0, flag="--loss-grad-clip")


class Kl(Section):
    """A pull towards a reference policy."""

    beta: float = option(0.0, "Weight of the KL penalty to the reference; 0 is off.", ge=0)
    sync_ref_model: bool = option(False, "Move the reference towards the policy now and then.")
    ref_model_mixup_alpha: float = option(0.9, "Share of the policy in each such move.", ge=0, le=1)
    ref_model_sync_steps: Count = option(64, "Steps between such moves.", ge=1)


class Memory(Section):
    """What fits where."""

    micro_batch_tokens: Count = option(0, "Most tokens in one forward and backward pass; 0 chooses.", ge=0)
    micro_batches: Count = option(0, "Forward and backward passes a step is split into, at least; 0 chooses.", ge=0)
    micro_batch_rows: Count = option(0, "Most completions in one forward and backward pass; 0 chooses.", ge=0)
    gradient_checkpointing: bool = option(
        False, "Always recompute activations in the backward pass; otherwise only as many layers as memory asks for."
    )
    offload_untrained_models: bool = option(
        False, "Keep a frozen reference and a frozen student in CPU memory between uses."
    )


class Inference(Section):
    """Where completions are sampled."""

    engine: str = option(
        "pytorch", "Engine: pytorch, max, vllm, sglang, mlx or openai.", kind="engine", flag="--inference-engine"
    )
    url: str = option(
        "", "Server URL, or several comma-separated, for the engines that are servers.", flag="--inference-url"
    )
    attention_kernel: Literal["default", "flash", "triton", "tk", "cutlass"] = option(
        "default", "Attention implementation.", flag="--inference-attention-kernel"
    )
    dtype: Literal["auto", "bf16", "fp8", "fp4"] = option(
        "auto", "Precision of the sampling weights.", flag="--inference-dtype"
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = option(
        "auto", "Precision of the KV cache.", flag="--inference-kv-cache-dtype"
    )
    prefix_caching: bool = option(
        True, "Compute a prompt's KV cache once for its whole group.", flag="--inference-prefix-caching"
    )
    adapter_dir: str = option(
        "",
        "Folder that servers read each step's adapter from, shared with their machine; empty takes a temporary one.",
        flag="--inference-adapter-dir",
    )
    timeout_s: float = option(
        600.0, "Seconds that a server may take for one request.", gt=0, le=86400, flag="--inference-timeout-s"
    )
    wait_s: float = option(
        300.0, "Seconds to wait for a server that does not answer.", ge=0, le=86400, flag="--inference-wait-s"
    )
    launch: bool = option(
        False, "Start a vLLM server for the length of the run, with the options below.", flag="--inference-launch"
    )
    launch_device: str = option(
        "auto",
        "Its device: cpu, cuda:N, or auto for the first GPU that does not train.",
        min_length=1,
        flag="--inference-launch-device",
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of the GPU's memory for its model and KV cache.", gt=0, le=1, flag="--inference-gpu-memory"
    )
    launch_dtype: Literal["auto", "float16", "bfloat16", "float32"] = option(
        "auto", "Precision it computes in.", flag="--inference-launch-dtype"
    )
    max_model_len: Count = option(
        0, "Most tokens of its context; 0 takes the model's.", ge=0, flag="--inference-max-model-len"
    )

    @property
    def starts_server(self) -> bool:
        """Whether the run starts a server of its own: only vLLM, and only where none is named."""
        return self.launch and self.engine == "vllm" and not self.url


class Data(Section):
    """Where problems come from; unused when [environment] names a provider."""

    source: str = option("math", "math, gsm8k, arithmetic, jsonl, hub or a dotted path.", kind="data")
    path: str = option("", "File for source = jsonl.")
    id: str = option("", "Dataset id for source = hub.", flag="--data-id")
    subset: str = option("", "Configuration name of a hub dataset.")
    split: str = option("train", "Split to train on.", min_length=1)
    prompt_field: str = option("", "Field that holds the problem; empty tries prompt, problem, question.")
    answer_field: str = option("", "Field that holds the reference; empty tries answer, solution.")
    system_prompt: str = option("", "System message put before every prompt.")
    remove_unused_columns: bool = option(False, "Keep only prompt and answer of a row; rewards see no other column.")


AS_IN_TRAINING = -1.0
"""The `[eval] temperature` that stands for that of `[training]`."""


class Eval(Section):
    """Held-out evaluation, before training and along the way."""

    every: Count = option(
        0, "Steps between evaluations; 0 is off. Step 0 is evaluated before any training.", ge=0, flag="--eval-every"
    )
    source: str = option("", "Data source; empty takes the one of [data].", kind="data", flag="--eval-source")
    path: str = option("", "File of held-out problems for source = jsonl.", flag="--eval-path")
    split: str = option("test", "Split to evaluate on; not that of [data].", min_length=1, flag="--eval-split")
    max_examples: Count = option(128, "Problems evaluated, always the same ones.", ge=1, flag="--eval-max-examples")
    samples: Count = option(1, "Completions a problem, for pass@1 and unbiased pass@k.", ge=1, flag="--eval-samples")
    k: Count = option(0, "The k of pass@k; 0 means as many as samples.", ge=0, flag="--eval-k")
    temperature: float = option(
        AS_IN_TRAINING,
        "Sampling temperature; 0 is greedy, -1 takes the training one.",
        ge=AS_IN_TRAINING,
        le=100,
        flag="--eval-temperature",
    )


class Environment(Section):
    """An environment in place of [data] and [reward]."""

    provider: str = option(
        "",
        "Environment provider: builtin, verifiers, reasoning_gym or a dotted path; empty trains on [data].",
        kind="environment",
    )
    id: str = option("", "Environment id, for example primeintellect/gsm8k.", flag="--environment-id")
    args: Annotated[Table, BeforeValidator(table_or_json)] = option(
        {}, "Arguments of the environment, as a table or a JSON string."
    )
    max_turns: Count = option(-1, "Most turns of a multi-turn rollout; -1 leaves it to the environment.", ge=-1)
    auto_install: bool = option(False, "Install a missing environment with the Prime CLI.")
    timeout_s: float = option(
        600.0,
        "Seconds that one rollout may take, all its turns and its scoring together.",
        gt=0,
        flag="--rollout-timeout-s",
    )


class Planning(Section):
    """Which tokens count as planning."""

    detector: str = option("regex", "Planning-token detector: regex, semantic or a dotted path.", kind="planning")
    model: str = option("all-MiniLM-L6-v2", "Sentence-transformer of the semantic detector.", min_length=1)
    threshold: float = option(
        0.02, "Margin by which a window must look more like planning than like execution.", ge=-2, le=2
    )


class Gtpo(Section):
    """Entropy weighting of tokens."""

    beta: float = option(0.1, "Strength of the weighting; 0 turns it off.", ge=0)


class Hicra(Section):
    """Amplification of planning tokens."""

    alpha: float = option(0.2, "Strength of the amplification; 0 turns it off.", ge=0, lt=1)


class Sepa(Section):
    """Pooling of execution-token uncertainty."""

    steps: Count = option(500, "Steps of the linear ramp from 0 to 1.", ge=1, flag="--sepa-steps")
    schedule: Literal["linear", "auto"] = option(
        "linear", "linear ramps by step; auto also follows the decay of uncertainty variance.", flag="--sepa-schedule"
    )
    delay_steps: Count = option(50, "Steps before the linear ramp begins.", ge=0, flag="--sepa-delay-steps")
    correct_rate_gate: float = option(
        0.1, "Batch correct rate that opens SEPA, for good.", ge=0, le=1, flag="--sepa-correct-rate-gate"
    )


class RewardTerm(Section):
    """One term of a weighted reward."""

    type: str = option("match", "match, math, judge, custom or a dotted path.", kind="reward")
    weight: float = option(1.0, "Factor of this term in the sum.")
    custom_module: str = option("", "Module of a custom term.")
    custom_function: str = option("score", "Function of a custom term.", min_length=1)


class Reward(Section):
    """How a completion is scored."""

    type: str = option("match", "match, math, judge, custom or a dotted path.", kind="reward", flag="--reward-type")
    judge_model: str = option("", "Model that judges; empty takes gpt-4o-mini.", flag="--reward-judge-model")
    judge_base_url: str = option(
        "", "OpenAI-compatible address of the judge; empty takes OPENAI_BASE_URL, then OpenAI's own."
    )
    judge_prompt: str = option(
        "", "What the judge is asked; knows {question}, {reference} and {response}. Empty takes the built-in prompt."
    )
    judge_concurrency: Count = option(32, "Most requests to the judge at a time.", ge=1, le=1024)
    judge_timeout_s: float = option(60.0, "Seconds that one request to the judge may take.", gt=0, le=3600)
    judge_cache: str = option(
        "~/.cache/retrain/judge", "Folder that keeps verdicts for later runs; empty keeps them for this one only."
    )
    judge_prompt_price: float = option(0.0, "Price of a million tokens sent to the judge; 0 is unknown.", ge=0)
    judge_completion_price: float = option(0.0, "Price of a million tokens from the judge; 0 is unknown.", ge=0)
    custom_module: str = option("", "Module path of a custom reward.", flag="--reward-custom-module")
    custom_function: str = option("score", "Function in that module.", min_length=1, flag="--reward-custom-function")
    think_boxes: bool = option(
        True,
        r"Whether match and math count a \boxed{…} inside <think>…</think> when the answer after it has none.",
        flag="--reward-think-boxes",
    )
    correct_from: float = option(
        1.0,
        "Reward from which a completion counts as correct, in correct_rate, pass@k and the SEPA gate; an environment's "
        "too.",
        ge=-1e6,
        le=1e6,
        flag="--reward-correct-from",
    )
    timeout_s: float = option(
        5.0, "Seconds that scoring one completion may take.", gt=0, le=3600, flag="--reward-timeout-s"
    )
    workers: Count = option(0, "Scoring processes; 0 takes one for each core.", ge=0, le=1024, flag="--reward-workers")
    memory_mb: Count = option(
        0, "Maximum address space per scoring process, in MiB; 0 sets no limit.", ge=0, flag="--reward-memory-mb"
    )
    pass_env: tuple[str, ...] = option(
        (), "Environment variables that rewards may see, for example OPENAI_API_KEY or MY_*.", strict=False
    )
    terms: tuple[RewardTerm, ...] = option(
        (),
        "Weighted terms; when present their sum is the reward and type is unused.",
        strict=False,
        flag="--reward-terms",
    )


class Teaching(Section):
    """Adaptive teaching: the model learns to teach a frozen student."""

    enabled: bool = option(
        False,
        "Train the model as a teacher, with advantage_mode grpo where the file names none.",
        flag="--teaching-enabled",
    )
    student_model: str = option(
        "",
        "Student: Hugging Face id or folder; empty takes the base model with the adapter off.",
        flag="--teaching-student-model",
    )
    max_probe_tokens: Count = option(
        50, "Most tokens of the student's diagnostic answer.", ge=1, flag="--teaching-max-probe-tokens"
    )
    degradation_penalty_multiplier: float = option(
        2.0,
        "Factor on the reward when teaching made the student worse.",
        ge=0,
        flag="--teaching-degradation-penalty-multiplier",
    )
    efficiency_weight: float = option(
        1.0, "Weight of the bonus for short teaching.", ge=0, flag="--teaching-efficiency-weight"
    )
    student_diagnostic_template: str = option(
        "", "Prompt of the probe; knows {question}.", flag="--teaching-student-diagnostic-template"
    )
    teacher_adaptive_template: str = option(
        "", "Prompt of the teacher; knows {question} and {approach}.", flag="--teaching-teacher-adaptive-template"
    )
    student_with_teaching_template: str = option(
        "",
        "Prompt of the taught student; knows {question} and {teaching}.",
        flag="--teaching-student-with-teaching-template",
    )
    student_baseline_template: str = option(
        "", "Prompt of the student alone; knows {question}.", flag="--teaching-student-baseline-template"
    )


class Distributed(Section):
    """More than one process."""

    zero_stage: Annotated[Literal[0, 1, 3], WrapValidator(whole_number)] = option(
        0, "DeepSpeed ZeRO stage of a run of several processes; 0 is plain data parallelism."
    )
    fsdp: bool = option(False, "Shard the weights over the processes with FSDP2; not with a zero_stage.")
    offload_optimizer: bool = option(False, "Keep optimiser state in CPU memory.")
    offload_parameters: bool = option(False, "Keep parameters in CPU memory (stage 3).")
    gather_for_generation: bool = option(
        True, "Gather sharded weights (stage 3, FSDP2) before sampling; false needs a server engine."
    )


class Backpressure(Section):
    """Batch size that follows measured throughput."""

    enabled: bool = option(False, "Adapt the batch size by the Universal Scalability Law.")
    warmup_steps: Count = option(10, "Steps observed before the law is fitted.", ge=1)
    ema_decay: float = option(0.9, "Decay of the running mean of throughput.", ge=0, lt=1)
    throttle_margin: float = option(0.85, "Share of the best concurrency to aim at.", gt=0, le=1)
    increase_margin: float = option(0.5, "Grow only when below this share of the aim.", gt=0, le=1)
    min_batch_size: Count = option(1, "Smallest batch size it may choose.", ge=1)
    max_batch_size: Count = option(64, "Largest batch size it may choose.", ge=1, le=1_000_000)
    peak_gflops: float = option(0.0, "Peak GFLOP/s of the hardware for roofline hints; 0 skips them.", ge=0)
    peak_bw_gb_s: float = option(0.0, "Peak memory bandwidth in GB/s; 0 skips roofline hints.", ge=0)


class Campaign(Section):
    """Conditions × seeds."""

    seeds: tuple[Annotated[Count, Field(ge=0)], ...] = option(
        (42, 101, 202, 303, 404, 505, 606, 707), "Seeds that every condition runs with.", strict=False, min_length=1
    )
    max_steps: Count = option(500, "Training steps of each run.", ge=1, flag="--campaign-max-steps")
    parallel: bool = option(False, "Run several at a time.")
    max_workers: Count = option(0, "Most runs at a time; 0 is all of them.", ge=0)
    stagger_seconds: float = option(0.0, "Pause between starts of parallel runs.", ge=0)
    executor: Literal["local", "ray"] = option("local", "Where runs execute.")
    gpus_per_run: float = option(1.0, "GPUs that the ray executor reserves for each run.", ge=0)
    share_model: bool = option(False, "Keep one copy of the frozen weights for all runs on one GPU.")
    stop_when: Literal["", "decided"] = option(
        "", "decided stops a pair of conditions once a sequential test has decided."
    )
    conditions: tuple[Table, ...] = option(
        (
            {"advantage_mode": "grpo", "transform_mode": "none"},
            {"advantage_mode": "maxrl", "transform_mode": "none"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
        ),
        "What is compared: each table overrides options by name, or by section.",
        strict=False,
        min_length=1,
    )


class Squeeze(Section):
    """LoRA rank analysis and compression."""

    min_variance_retention: float = option(0.95, "Share of variance the recommended rank must keep.", gt=0, le=1)
    adapter_path: str = option("", "Adapter folder; a campaign fills it in by itself.", flag="--squeeze-adapter-path")
    source_rank: Count = option(
        0, "Rank the adapter must have; 0 takes any, and remarks on one that is not [model] lora_rank.", ge=0
    )
    target_ranks: tuple[Annotated[Count, Field(ge=1)], ...] = option(
        (), "Ranks to evaluate; empty takes powers of two.", strict=False
    )
    output_path: str = option("", "Folder for the compressed adapter; empty only analyses.")
    compress_to: Count = option(0, "Rank to compress to; 0 takes the recommended one.", ge=0)
    device: str = option("cpu", "Torch device of the decomposition.", min_length=1)


class Resume(Section):
    """Going on with an earlier run."""

    from_: str = option("", "Log folder with trainer_state.json to go on from.", flag="--resume", alias="from")


class Logging(Section):
    """What is written where."""

    log_dir: str = option("logs/train", "Folder for logs and checkpoints.", min_length=1)
    wandb_project: str = option("", "Weights & Biases project; set it to turn wandb on.")
    wandb_run_name: str = option("", "Run name; empty takes {advantage_mode}+{transform_mode}.")
    wandb_entity: str = option("", "Weights & Biases entity.")
    wandb_group: str = option("", "Weights & Biases group.")
    wandb_tags: str = option("", "Weights & Biases tags, comma-separated.")
    trackio_project: str = option("", "Trackio project; set it to turn trackio on, with wandb's run name and group.")
    every: Count = option(
        1,
        "Steps between lines on the screen and rows in trackers; 0 is never. metrics.jsonl has every step.",
        ge=0,
        flag="--log-every",
    )
    log_completions: bool = option(False, "Send a table of every step's completions to wandb and trackio.")
    save_completions_probability: float = option(
        1.0, "Share of the steps whose completions are written to generations.jsonl.", ge=0, le=1
    )
    debug: bool = option(False, "Write what every step did in detail to debug.jsonl.")
    strategic_grams: str = option(
        "", "Planning phrases as a JSON array or comma-separated; empty takes the built-in ones."
    )


class Plugins(Section):
    """Where your own code is found."""

    search_paths: tuple[str, ...] = option((".",), "Folders searched first for dotted paths.", strict=False)


class TrainConfig(Section):
    """A whole configuration file."""

    backend: Backend = Field(default_factory=Backend)
    model: Model = Field(default_factory=Model)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    training: Training = Field(default_factory=Training)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lora: Lora = Field(default_factory=Lora)
    loss: Loss = Field(default_factory=Loss)
    kl: Kl = Field(default_factory=Kl)
    memory: Memory = Field(default_factory=Memory)
    gtpo: Gtpo = Field(default_factory=Gtpo)
    hicra: Hicra = Field(default_factory=Hicra)
    sepa: Sepa = Field(default_factory=Sepa)
    planning: Planning = Field(default_factory=Planning)
    inference: Inference = Field(default_factory=Inference)
    data: Data = Field(default_factory=Data)
    environment: Environment = Field(default_factory=Environment)
    reward: Reward = Field(default_factory=Reward)
    eval: Eval = Field(default_factory=Eval)
    teaching: Teaching = Field(default_factory=Teaching)
    distributed: Distributed = Field(default_factory=Distributed)
    backpressure: Backpressure = Field(default_factory=Backpressure)
    resume: Resume = Field(default_factory=Resume)
    logging: Logging = Field(default_factory=Logging)
    plugins: Plugins = Field(default_factory=Plugins)
    squeeze: Squeeze | None = None
    campaign: Campaign | None = None

    @property
    def kind(self) -> Literal["train", "campaign", "squeeze"]:
        """What running this file does."""
        if self.campaign is not None:
            return "campaign"
        # Without an adapter there is nothing to analyse: the table then waits for a campaign.
        return "squeeze" if self.squeeze is not None and self.squeeze.adapter_path else "train"

    @property
    def condition(self) -> str:
        """The label that names this algorithm in logs, plots and comparisons."""
        mode = self.algorithm
        return mode.algorithm_mode or f"{mode.advantage_mode}+{mode.transform_mode}"
