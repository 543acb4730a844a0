"""Tables about runs: campaigns, squeezing, resuming, logging and plugins."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retrain.config import reasons
from retrain.config.declare import BoundedInt, Facets, Section, Table, option

# With three or four values of a bimodal distribution a t-test at 5% has 6.1% false positives.
FIRST_LOOK = 5
"""Seeds after which stop_when = "decided" tests for the first time."""


class Campaign(Section):
    """Conditions × seeds."""

    facets: ClassVar[Facets] = Facets(on_resume="free", per_condition=False)

    seeds: tuple[Annotated[BoundedInt, Field(ge=0)], ...] = option(
        (42, 101, 202, 303, 404, 505, 606, 707), "Seeds that every condition runs with.", strict=False, min_length=1
    )
    max_steps: BoundedInt = option(
        500, "Training steps of each run.", ge=1, flag="--campaign-max-steps", synonyms=("campaign.steps",)
    )
    parallel: bool = option(False, "Execute several runs at a time.")
    max_workers: BoundedInt = option(0, "Maximum concurrent runs; 0 runs all at once.", ge=0)
    stagger_seconds: float = option(0.0, "Seconds between the starts of parallel runs.", ge=0)
    executor: Literal["local", "ray"] = option("local", "Where runs execute.", package="ray")
    gpus_per_run: float = option(
        1.0,
        "GPUs that the ray executor reserves for each run.",
        ge=0,
        in_campaign=reasons.used_if("campaign.executor", "ray".__eq__),
    )
    share_model: bool = option(False, "Execute all runs in one process that shares one copy of the frozen weights.")
    stop_when: Literal["", "decided"] = option(
        "", "decided stops a condition once a sequential test has decided its comparison with the first."
    )
    conditions: tuple[Table, ...] = option(
        (
            {"advantage_mode": "grpo", "transform_mode": "none"},
            {"advantage_mode": "maxrl", "transform_mode": "none"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
        ),
        "Conditions to compare: each table overrides options, given by name or in tables.",
        strict=False,
        min_length=1,
    )


class Squeeze(Section):
    """LoRA rank analysis and compression."""

    facets: ClassVar[Facets] = Facets(
        on_resume="free", per_condition=False, unused=reasons.used_if("squeeze.adapter_path", bool)
    )

    min_variance_retention: float = option(0.95, "Fraction of variance that the recommended rank keeps.", gt=0, le=1)
    adapter_path: str = option(
        "",
        "Adapter folder; campaigns set it automatically.",
        flag="--squeeze-adapter-path",
        path="as_given",
        unused=reasons.never,
        in_campaign=reasons.always("a campaign analyzes the adapter of its first run"),
    )
    source_rank: BoundedInt = option(
        0, "Rank that the adapter must have; 0 accepts any, with a note if it differs from [model] lora_rank.", ge=0
    )
    target_ranks: tuple[Annotated[BoundedInt, Field(ge=1)], ...] = option(
        (), "Ranks to evaluate; empty uses powers of two.", strict=False
    )
    output_path: str = option("", "Folder for the compressed adapter; empty runs only the analysis.", path="as_given")
    compress_to: BoundedInt = option(
        0,
        "Rank to compress to; 0 uses the recommended one.",
        ge=0,
        unused=reasons.first_of(
            reasons.used_if("squeeze.adapter_path", bool), reasons.used_if("squeeze.output_path", bool)
        ),
        in_campaign=reasons.used_if("squeeze.output_path", bool),
    )
    device: str = option("cpu", "Torch device of the decomposition.", min_length=1)


class Resume(Section):
    """Resuming an earlier run."""

    facets: ClassVar[Facets] = Facets(on_resume="free", per_condition=False)

    from_: str = option(
        "",
        "Log folder of the run to resume, with its trainer_state.json.",
        flag="--resume",
        alias="from",
        path="as_given",
        identity=True,
        synonyms=("resume_from_checkpoint", "resume_from"),
    )


class Logging(Section):
    """Logs, checkpoints and trackers."""

    facets: ClassVar[Facets] = Facets(on_resume="free", identity=True)

    log_dir: str = option(
        "logs/train",
        "Folder for logs and checkpoints.",
        min_length=1,
        path="as_given",
        per_condition=False,
        synonyms=("output_dir",),
    )
    wandb_project: str = option(
        "",
        "Weights & Biases project; set it to turn wandb on.",
        package="wandb",
        synonyms=("project", "project_name", "report_to"),
    )
    wandb_run_name: str = option(
        "",
        "Run name; empty uses {advantage_mode}+{transform_mode}.",
        per_condition=False,
        in_campaign=reasons.always("a campaign names its runs"),
        synonyms=("run_name", "experiment_name"),
    )
    wandb_entity: str = option("", "Weights & Biases entity.")
    wandb_group: str = option(
        "",
        "Weights & Biases group.",
        per_condition=False,
        in_campaign=reasons.always("a campaign groups its runs by condition"),
    )
    wandb_tags: str = option("", "Weights & Biases tags, comma-separated.", per_condition=False)
    trackio_project: str = option(
        "", "Trackio project; set it to turn trackio on. Run name and group are those set for wandb.", package="trackio"
    )
    every: BoundedInt = option(
        1,
        "Steps between lines on the screen and rows in trackers; 0 disables both. metrics.jsonl has every step.",
        ge=0,
        flag="--log-every",
        synonyms=("log_steps", "logging_steps", "logging.steps"),
    )
    log_completions: bool = option(False, "Send a table of the completions of every step to wandb and trackio.")
    save_completions_probability: float = option(
        1.0, "Fraction of steps whose completions are written to generations.jsonl.", ge=0, le=1
    )
    debug: bool = option(False, "Write the details of every step to debug.jsonl.")
    strategic_grams: str = option(
        "",
        "Planning phrases as a JSON array or comma-separated; empty uses the built-in ones.",
        identity=False,
        on_resume="fixed",
        replay=True,
        unused=reasons.used_if("planning.detector", lambda name: name != "semantic"),
    )


class Plugins(Section):
    """Where custom code is found."""

    facets: ClassVar[Facets] = Facets(on_resume="free", per_condition=False, replay=True)

    search_paths: tuple[str, ...] = option(
        (".",), "Folders searched first for dotted paths.", strict=False, path="absolute"
    )
