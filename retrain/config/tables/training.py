"""Tables about the algorithm: training, optimizer, loss and credit assignment."""

from typing import ClassVar, Literal

from retrain.config import reasons
from retrain.config.declare import BoundedInt, Facets, Section, Table, option


class Algorithm(Section):
    """How rewards become token advantages."""

    facets: ClassVar[Facets] = Facets(replay=True)

    advantage_mode: str = option(
        "maxrl",
        "Episode advantage: {names} or a dotted path.",
        kind="advantage",
        unused=reasons.needs_no_algorithm,
        synonyms=("advantage", "adv_estimator", "advantage_estimator", "scale_rewards"),
    )
    transform_mode: str = option(
        "gtpo_sepa",
        "Token transform: {names} or a dotted path.",
        kind="transform",
        unused=reasons.needs_no_algorithm,
        synonyms=("transform",),
    )
    algorithm_mode: str = option(
        "", "Dotted path of a function that replaces both advantage and transform.", kind="algorithm"
    )
    uncertainty_kind: str = option(
        "surprisal",
        "Token uncertainty: {names} or a dotted path.",
        kind="uncertainty",
    )
    advantage_params: Table = option(
        {},
        "Keyword arguments for a custom advantage.",
        unused=reasons.needs_plugin("advantage", "algorithm.advantage_mode"),
    )
    transform_params: Table = option(
        {}, "Keyword arguments for a custom transform or algorithm.", unused=reasons.needs_transform_plugin
    )


Deterministic = Literal["auto", True, False]
Overlap = Literal["auto", True, False]
_TINKER_SAMPLING = "The service samples with temperature, top_p and top_k alone."


class Training(Section):
    """Length of the run, batch sizes and sampling."""

    seed: BoundedInt = option(
        -1,
        "Random seed; -1 draws one and writes it to the run's config.toml.",
        ge=-1,
        identity=True,
        per_condition=False,
        in_campaign=reasons.always("a campaign runs each of [campaign] seeds"),
    )
    max_steps: BoundedInt = option(
        500,
        "Total training steps.",
        ge=1,
        flag="--max-steps",
        on_resume="free",
        unused=reasons.used_if("training.epochs", lambda epochs: not epochs),
        in_campaign=reasons.used_if("campaign.max_steps", lambda steps: False),
        synonyms=("num_steps", "steps", "total_training_steps"),
    )
    epochs: float = option(
        0.0,
        "Passes over the examples, instead of max_steps; 0 uses max_steps.",
        ge=0,
        le=1e6,
        on_resume="free",
        per_condition=False,
        in_campaign=reasons.used_if("campaign.max_steps", lambda steps: False),
        synonyms=("num_epochs", "num_train_epochs", "total_epochs"),
    )
    batch_size: BoundedInt = option(
        8,
        "Prompts per step.",
        ge=1,
        le=1_000_000,
        step_time=True,
        synonyms=("bs", "per_device_train_batch_size", "train_batch_size"),
    )
    group_size: BoundedInt = option(
        16,
        "Completions per prompt.",
        ge=1,
        le=100_000,
        step_time=True,
        synonyms=("num_generations", "num_samples", "rollouts", "n_samples_per_prompt", "rollouts_per_example"),
    )
    max_tokens: BoundedInt = option(
        2048,
        "Maximum new tokens per completion.",
        ge=1,
        step_time=True,
        synonyms=("max_completion_length", "max_length", "max_new_tokens", "max_response_length", "generate_max_len"),
    )
    temperature: float = option(0.7, "Sampling temperature.", gt=0, le=100, flag="--temperature", synonyms=("temp",))
    lr: float = option(4e-5, "Learning rate.", gt=0, le=10, synonyms=("learning_rate", "actor_learning_rate"))
    weight_decay: float = option(0.0, "AdamW weight decay.", ge=0, synonyms=("wd",))
    max_examples: BoundedInt = option(
        0, "Use only the first n examples; 0 uses all.", ge=0, flag="--max-examples", synonyms=("max_train_samples",)
    )
    save_every: BoundedInt = option(
        20, "Steps between checkpoints.", ge=1, on_resume="free", synonyms=("save_steps", "save_freq")
    )
    keep: BoundedInt = option(
        2,
        "Number of checkpoints to keep; older ones are deleted.",
        ge=1,
        on_resume="free",
        synonyms=("save_total_limit",),
    )
    record: bool = option(
        False,
        "Store the rollouts of every step, so that `retrain replay` can recompute advantages on them.",
        on_resume="free",
    )
    resample_dead_groups: BoundedInt = option(
        0,
        "Maximum rounds of sampling new prompts to replace groups whose rewards are all equal; 0 is off.",
        ge=0,
        le=100,
        step_time=True,
    )
    prompts_per_sampling: BoundedInt = option(
        0,
        "Maximum number of a step's prompts to sample at once; 0 samples all of them. Evaluations are not split.",
        ge=0,
    )
    async_steps: BoundedInt = option(
        0,
        "Steps that sampling may run ahead of training, 0 or 1; 0 is strictly on-policy.",
        ge=0,
        le=1,
        step_time=True,
        unused=reasons.needs_separate_sampler,
        multi_process="all of them sample, then all of them train.",
    )
    top_p: float = option(
        1.0, "Nucleus sampling: keep the most likely tokens up to this total probability.", gt=0, le=1
    )
    top_k: BoundedInt = option(0, "Keep only the k most likely tokens; 0 keeps all.", ge=0)
    min_p: float = option(
        0.0,
        "Drop tokens less likely than this fraction of the most likely one.",
        ge=0,
        le=1,
        on_tinker=_TINKER_SAMPLING,
    )
    repetition_penalty: float = option(
        1.0, "Penalty on tokens already seen, as in transformers; 1 is off.", gt=0, le=100, on_tinker=_TINKER_SAMPLING
    )
    deterministic: Deterministic = option(
        "auto",
        "Make runs bitwise reproducible; auto: on a CPU, and on a GPU where it costs less than 5%.",
        on_resume="free",
        unused=reasons.needs_own_machine,
    )
    overlap: Overlap = option(
        "auto",
        "Train on complete groups while others are being sampled; auto: if another process samples.",
        on_resume="free",
        on_tinker="The service trains on complete steps.",
    )
    max_prompt_tokens: BoundedInt = option(
        0,
        "Truncate prompts from the left to this many tokens; 0 rejects prompts that do not fit.",
        ge=0,
        step_time=True,
        synonyms=("max_prompt_length", "prompt_max_len"),
    )


class Optimizer(Section):
    """AdamW and the learning rate schedule."""

    beta1: float = option(0.9, "AdamW beta1.", ge=0, lt=1, synonyms=("adam_beta1",))
    beta2: float = option(0.95, "AdamW beta2.", ge=0, lt=1, synonyms=("adam_beta2",))
    eps: float = option(1e-8, "AdamW epsilon.", gt=0, le=1, synonyms=("adam_epsilon",))
    schedule: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"] = option(
        "constant", "Schedule after the warm-up.", flag="--lr-schedule", synonyms=("lr_scheduler_type", "scheduler")
    )
    schedule_args: Table = option(
        {},
        "Arguments of the schedule, named as in transformers, such as min_lr_rate.",
        synonyms=("min_lr", "min_lr_rate", "min_lr_ratio", "lr_scheduler_kwargs"),
    )
    warmup_steps: float = option(
        0.0,
        "Steps of linear warm-up from 0; a value below 1 is a fraction of all steps.",
        ge=0,
        synonyms=("warmup", "warmup_ratio", "num_warmup_steps"),
    )


class Loss(Section):
    """The policy-gradient loss."""

    facets: ClassVar[Facets] = Facets(prefixed=True)

    type: str = option("importance_sampling", "Token loss: {names} or a dotted path.", kind="loss", synonyms=("loss",))
    clip_low: float = option(0.2, "Clip ratios below 1 - clip_low; used by {loss.clip_low and}.", ge=0, le=1)
    clip_high: float = option(
        0.2,
        "Clip ratios above 1 + clip_high; used by {loss.clip_high and}.",
        ge=0,
        synonyms=("clip", "eps_clip", "epsilon", "epsilon_high"),
    )
    ratio_cap: float = option(
        2.0,
        "Cap on importance ratios, to guard against sampler-trainer mismatch; 0 is off, otherwise at least 1.",
        ge=0,
        unused=reasons.needs_ratio_cap,
    )
    grad_clip: float = option(
        1.0,
        "Maximum gradient norm; 0 is off.",
        ge=0,
        synonyms=("clip_grad", "gradient_clip", "gradient_clipping", "max_grad_norm"),
    )


class Kl(Section):
    """KL penalty to a reference policy."""

    beta: float = option(
        0.0,
        "Weight of the KL penalty to the reference; 0 is off.",
        ge=0,
        step_time=True,
        on_tinker="The service has no reference policy.",
        synonyms=("kl_coef", "kl_loss_coef", "init_kl_coef", "kl.coef", "kl.weight"),
    )
    sync_ref_model: bool = option(
        False, "Periodically move the reference towards the policy.", unused=reasons.used_if("kl.beta", bool)
    )
    ref_model_mixup_alpha: float = option(
        0.9, "Weight of the policy in each update of the reference.", ge=0, le=1, unused=reasons.needs_moving_reference
    )
    ref_model_sync_steps: BoundedInt = option(
        64, "Steps between updates of the reference.", ge=1, unused=reasons.needs_moving_reference
    )


class Planning(Section):
    """Which tokens count as planning."""

    facets: ClassVar[Facets] = Facets(replay=True)

    detector: str = option("regex", "Planning-token detector: {names} or a dotted path.", kind="planning")
    model: str = option(
        "all-MiniLM-L6-v2",
        "Sentence Transformers model used by the semantic detector.",
        min_length=1,
        unused=reasons.needs_semantic_planning,
    )
    threshold: float = option(
        0.02,
        "Margin by which a window of words must be closer to planning than to execution sentences.",
        ge=-2,
        le=2,
        unused=reasons.needs_semantic_planning,
    )


class Gtpo(Section):
    """Entropy weighting of tokens."""

    facets: ClassVar[Facets] = Facets(replay=True)

    beta: float = option(0.1, "Strength of the weighting; 0 turns it off.", ge=0)


class Hicra(Section):
    """Amplification of planning tokens."""

    facets: ClassVar[Facets] = Facets(replay=True)

    alpha: float = option(0.2, "Strength of the amplification; 0 turns it off.", ge=0, lt=1)


class Sepa(Section):
    """Pooling of execution-token uncertainty."""

    facets: ClassVar[Facets] = Facets(prefixed=True, replay=True)

    steps: BoundedInt = option(500, "Length of the linear ramp of lambda from 0 to 1, in steps.", ge=1)
    schedule: Literal["linear", "auto"] = option(
        "linear", "How pooling grows: linear, with the step; auto, also as the variance of the uncertainty decays."
    )
    delay_steps: BoundedInt = option(50, "Steps before the linear ramp begins.", ge=0)
    correct_rate_gate: float = option(
        0.1, "SEPA starts once the correct rate of a batch reaches this value, and then stays on.", ge=0, le=1
    )


class Backpressure(Section):
    """Batch size adapted to measured throughput."""

    facets: ClassVar[Facets] = Facets(unused=reasons.used_if("backpressure.enabled", bool))

    enabled: bool = option(False, "Adapt the batch size with the Universal Scalability Law.", unused=reasons.never)
    warmup_steps: BoundedInt = option(10, "Steps observed before the law is fitted.", ge=1)
    ema_decay: float = option(0.9, "Decay of the moving average of throughput.", ge=0, lt=1)
    throttle_margin: float = option(0.85, "Target fraction of the optimal concurrency.", gt=0, le=1)
    increase_margin: float = option(0.5, "Increase the batch size only below this fraction of the target.", gt=0, le=1)
    min_batch_size: BoundedInt = option(1, "Minimum batch size.", ge=1)
    max_batch_size: BoundedInt = option(64, "Maximum batch size.", ge=1, le=1_000_000)
    peak_gflops: float = option(0.0, "Peak GFLOP/s of the hardware for roofline hints; 0 skips them.", ge=0)
    peak_bw_gb_s: float = option(0.0, "Peak memory bandwidth in GB/s; 0 skips roofline hints.", ge=0)
