"""Tables about tasks: data, environments, evaluation, rewards and teaching."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator

from retrain.config import reasons
from retrain.config.declare import BoundedInt, Facets, Section, Table, option, table_or_json


class Data(Section):
    """Where problems come from; unused when [environment] names a provider."""

    source: str = option(
        "math",
        "{names} or a dotted path.",
        kind="data",
        held_out=True,
        step_time=True,
        unused=reasons.needs_no_environment,
        synonyms=("dataset",),
    )
    path: str = option(
        "",
        "File for source = {data.path or}.",
        path="absolute",
        held_out=True,
        step_time=True,
        unused=reasons.read_by_training_source("path"),
        synonyms=("train_file", "train_files", "train_path", "prompt_data"),
    )
    id: str = option(
        "",
        "Dataset id for source = {data.id or}.",
        flag="--data-id",
        held_out=True,
        step_time=True,
        unused=reasons.read_by_training_source("id"),
        synonyms=("dataset_name",),
    )
    subset: str = option(
        "",
        "Configuration name of a hub dataset, or one subject of math.",
        held_out=True,
        step_time=True,
        unused=reasons.read_by_source("subset"),
    )
    split: str = option("train", "Split to train on.", min_length=1, unused=reasons.read_by_training_source("split"))
    prompt_field: str = option(
        "",
        "Field that holds the problem; empty tries prompt, problem, question.",
        unused=reasons.read_by_source("prompt_field"),
        synonyms=("prompt_key", "input_key"),
    )
    answer_field: str = option(
        "",
        "Field that holds the reference answer; empty tries answer, solution.",
        unused=reasons.read_by_source("answer_field"),
        synonyms=("answer_key", "label_key"),
    )
    system_prompt: str = option(
        "",
        "System message before every prompt that has none of its own.",
        held_out=True,
        step_time=True,
        unused=reasons.needs_no_environment,
    )
    remove_unused_columns: bool = option(
        False,
        "Keep only the prompt and answer of each row; rewards see no other columns.",
        unused=reasons.read_by_source("remove_unused_columns"),
    )


AS_IN_TRAINING = -1.0
"""The `[eval] temperature` that stands for the one of `[training]`."""


class Eval(Section):
    """Held-out evaluation, before and during training."""

    facets: ClassVar[Facets] = Facets(prefixed=True, on_resume="free", held_out=True)

    every: BoundedInt = option(
        0,
        "Steps between evaluations; 0 is off. Step 0 is evaluated before any training.",
        ge=0,
        held_out=False,
        synonyms=("eval_steps", "eval_strategy", "eval_freq", "eval.steps", "eval.freq", "test_freq"),
    )
    source: str = option("", "Data source; empty uses that of [data].", kind="data", unused=reasons.needs_held_out_data)
    path: str = option(
        "",
        "File of held-out problems for source = {data.path or}.",
        path="absolute",
        unused=reasons.needs_held_out_file,
        synonyms=("val_file", "val_files", "test_file", "test_files", "val_path", "test_path"),
    )
    split: str = option(
        "test",
        "Split to evaluate on; must differ from [data] split.",
        min_length=1,
        unused=reasons.needs_splits,
        synonyms=("test_split", "val_split"),
    )
    max_examples: BoundedInt = option(
        128, "Most held-out problems to evaluate; of more, the same random ones in every run.", ge=1
    )
    samples: BoundedInt = option(
        1,
        "Completions per problem, for pass@1 and unbiased pass@k.",
        ge=1,
        synonyms=("eval.n", "eval.num_samples", "eval.n_samples"),
    )
    k: BoundedInt = option(0, "The k of pass@k; 0 uses the number of samples.", ge=0, held_out=False)
    temperature: float = option(
        AS_IN_TRAINING, "Sampling temperature; 0 is greedy, -1 uses that of training.", ge=AS_IN_TRAINING, le=100
    )


class Environment(Section):
    """An environment in place of [data] and [reward]."""

    facets: ClassVar[Facets] = Facets(step_time=True, unused=reasons.used_if("environment.provider", bool))

    provider: str = option(
        "",
        "Environment provider: {names} or a dotted path; empty trains on [data].",
        kind="environment",
        unused=reasons.never,
        synonyms=("environment",),
    )
    id: str = option("", "Environment id, for example primeintellect/gsm8k.", flag="--environment-id")
    args: Annotated[Table, BeforeValidator(table_or_json)] = option(
        {}, "Arguments of the environment, as a table or a JSON string."
    )
    max_turns: BoundedInt = option(-1, "Maximum turns of a multi-turn rollout; -1 leaves it to the environment.", ge=-1)
    auto_install: bool = option(False, "Install a missing environment with the Prime CLI.")
    timeout_s: float = option(
        600.0,
        "Timeout for the environment's own work in one rollout (turns and scoring, not sampling), in seconds.",
        gt=0,
        flag="--rollout-timeout-s",
        step_time=False,
    )


class RewardTerm(Section):
    """One term of a weighted reward."""

    type: str = option("match", "{names} or a dotted path.", kind="reward")
    weight: float = option(1.0, "Weight of this term in the sum.")
    custom_module: str = option("", "Module of a custom term.")
    custom_function: str = option("score", "Function of a custom term.", min_length=1)


class Reward(Section):
    """How a completion is scored."""

    type: str = option(
        "match",
        "{names} or a dotted path.",
        kind="reward",
        flag="--reward-type",
        step_time=True,
        unused=reasons.needs_single_reward,
        synonyms=("reward", "reward_funcs"),
    )
    judge_model: str = option(
        "", "Judge model; empty uses gpt-4o-mini.", flag="--reward-judge-model", unused=reasons.needs_judge
    )
    judge_base_url: str = option(
        "",
        "OpenAI-compatible URL of the judge; empty uses OPENAI_BASE_URL, then OpenAI's own.",
        unused=reasons.needs_judge,
    )
    judge_prompt: str = option(
        "",
        "Judge prompt, with {question}, {reference} and {response}; empty uses the built-in prompt.",
        variables={"question": False, "reference": False, "response": True},
        unused=reasons.needs_judge,
    )
    judge_concurrency: BoundedInt = option(
        32, "Maximum concurrent requests to the judge.", ge=1, le=1024, on_resume="free", unused=reasons.needs_judge
    )
    judge_timeout_s: float = option(
        60.0,
        "Timeout for one request to the judge, in seconds.",
        gt=0,
        le=3600,
        on_resume="free",
        unused=reasons.needs_judge,
    )
    judge_cache: str = option(
        "~/.cache/retrain/judge",
        "Folder that caches verdicts across runs; empty caches them in memory only.",
        path="as_given",
        on_resume="free",
        unused=reasons.needs_judge,
    )
    judge_prompt_price: float = option(
        0.0,
        "Price per million tokens sent to the judge; 0 if unknown.",
        ge=0,
        on_resume="free",
        unused=reasons.needs_judge,
    )
    judge_completion_price: float = option(
        0.0,
        "Price per million tokens from the judge; 0 if unknown.",
        ge=0,
        on_resume="free",
        unused=reasons.needs_judge,
    )
    custom_module: str = option(
        "", "Module path of a custom reward.", flag="--reward-custom-module", unused=reasons.needs_custom_reward
    )
    custom_function: str = option(
        "score",
        "Function in that module.",
        min_length=1,
        flag="--reward-custom-function",
        unused=reasons.needs_custom_reward,
    )
    think_boxes: bool = option(
        True,
        r"Whether match and math accept a \boxed{…} inside <think>…</think> when the answer after it has none.",
        flag="--reward-think-boxes",
        unused=reasons.needs_boxed_answers,
    )
    correct_from: float = option(
        1.0,
        "Minimum reward of a correct completion, for correct_rate, pass@k and the SEPA gate; also with environments.",
        ge=-1e6,
        le=1e6,
        flag="--reward-correct-from",
    )
    timeout_s: float = option(
        5.0,
        "Timeout for scoring one completion, in seconds.",
        gt=0,
        le=3600,
        flag="--reward-timeout-s",
        on_resume="free",
        unused=reasons.needs_scoring_processes,
    )
    workers: BoundedInt = option(
        0,
        "Scoring processes; 0 uses one per CPU core.",
        ge=0,
        le=1024,
        flag="--reward-workers",
        on_resume="free",
        unused=reasons.needs_scoring_processes,
    )
    memory_mb: BoundedInt = option(
        0,
        "Maximum address space per scoring process, in MiB; 0 sets no limit.",
        ge=0,
        flag="--reward-memory-mb",
        on_resume="free",
        unused=reasons.needs_scoring_processes,
    )
    pass_env: tuple[str, ...] = option(
        (),
        "Environment variables that rewards may see, for example OPENAI_API_KEY or MY_*.",
        strict=False,
        on_resume="free",
        unused=reasons.needs_scoring_processes,
    )
    terms: tuple[RewardTerm, ...] = option(
        (),
        "Weighted terms; if present, their sum is the reward and type is unused.",
        strict=False,
        flag="--reward-terms",
        unused=reasons.needs_no_environment,
    )


class Teaching(Section):
    """Adaptive teaching: the model learns to teach a frozen student."""

    facets: ClassVar[Facets] = Facets(prefixed=True, unused=reasons.used_if("teaching.enabled", bool))

    enabled: bool = option(
        False, "Train the model as a teacher; advantage_mode defaults to grpo.", step_time=True, unused=reasons.never
    )
    student_model: str = option(
        "",
        "Student: Hugging Face id or folder; empty uses the base model without the adapter.",
        path="or_id",
        step_time=True,
    )
    max_probe_tokens: BoundedInt = option(50, "Maximum tokens of the student's diagnostic answer.", ge=1)
    degradation_penalty_multiplier: float = option(
        2.0, "Factor on the reward when teaching made the student worse.", ge=0
    )
    efficiency_weight: float = option(1.0, "Weight of the bonus for short teaching.", ge=0)
    student_diagnostic_template: str = option(
        "", "Prompt of the probe, with {question}; empty uses the built-in one.", variables={"question": True}
    )
    teacher_adaptive_template: str = option(
        "",
        "Prompt of the teacher, with {question} and {approach}; empty uses the built-in one.",
        variables={"question": True, "approach": True},
    )
    student_with_teaching_template: str = option(
        "",
        "Prompt of the taught student, with {question} and {teaching}; empty uses the built-in one.",
        variables={"question": True, "teaching": True},
    )
    student_baseline_template: str = option(
        "",
        "Prompt of the student without teaching, with {question}; empty uses the question itself.",
        variables={"question": True},
    )
