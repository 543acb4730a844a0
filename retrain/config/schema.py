"""The configuration: every table, put together.

Each option is declared once, in `retrain.config.tables`, with all facts about it: type, default, bounds, description,
facets (`declare.Facets`). The TOML key, flag, validation, docs table, manual, starter files, `explain`, JSON schema,
notes about unused options, and the rules for resuming, campaigns and Tinker follow from the declaration.
"""

from typing import Literal

from pydantic import Field

from retrain.config.declare import Section
from retrain.config.tables.inference import Inference
from retrain.config.tables.model import Backend, Distributed, Lora, Memory, Model
from retrain.config.tables.run import Campaign, Logging, Plugins, Resume, Squeeze
from retrain.config.tables.tasks import AS_IN_TRAINING, Data, Environment, Eval, Reward, RewardTerm, Teaching
from retrain.config.tables.training import (
    Algorithm,
    Backpressure,
    Deterministic,
    Gtpo,
    Hicra,
    Kl,
    Loss,
    Optimizer,
    Planning,
    Sepa,
    Training,
)
from retrain.plugins import SERVER_ENGINES

__all__ = [
    "AS_IN_TRAINING", "Algorithm", "Backend", "Backpressure", "Campaign", "Data", "Deterministic", "Distributed",
    "Environment", "Eval", "Gtpo", "Hicra", "Inference", "Kl", "Logging", "Lora", "Loss", "Memory", "Model",
    "Optimizer", "Planning", "Plugins", "Resume", "Reward", "RewardTerm", "Sepa", "Squeeze", "Teaching",
    "TrainConfig", "Training",
]  # fmt: skip


class TrainConfig(Section):
    """A complete configuration file."""

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
        """What running this configuration does."""
        if self.campaign is not None:
            return "campaign"
        # Without an adapter there is nothing to analyze; a campaign sets one.
        return "squeeze" if self.squeeze is not None and self.squeeze.adapter_path else "train"

    @property
    def condition(self) -> str:
        """The label that names this algorithm in logs, plots and comparisons."""
        mode = self.algorithm
        return mode.algorithm_mode or f"{mode.advantage_mode}+{mode.transform_mode}"

    @property
    def campaign_folder(self) -> str:
        """Where a campaign is or will be, as it was given; "" for a new one that is named after the date."""
        is_set = self.logging.log_dir != Logging().log_dir
        return self.resume.from_ or (self.logging.log_dir if is_set else "")

    @property
    def held_out_source(self) -> str:
        """The data source of evaluations."""
        return self.eval.source or self.data.source

    @property
    def samples_separately(self) -> bool:
        """Whether sampling and training run on different devices, so that they can overlap."""
        several = "," in self.backend.devices
        return self.backend.backend != "local" or several or self.inference.engine in SERVER_ENGINES
