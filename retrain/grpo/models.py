"""The model a trainer is given, by name or loaded, and its PEFT adapter, in retrain's terms."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import AutoConfig, PreTrainedModel

from retrain.builtin import resolve_model
from retrain.config import TrainConfig
from retrain.errors import ConfigError, ConfigIssue
from retrain.modeling.tokens import explain_missing_model
from retrain.types import Group, StepMetrics

GIVEN_FOLDER = "given_model"
"""Folder inside output_dir for a model that was given loaded: a resume reads it again."""
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_LORA_TWINS = ("r", "lora_alpha", "lora_dropout", "target_modules", "task_type")
# Written by PEFT itself, or a note without effect on training.
_LORA_NOTES = ("peft_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "runtime_config")


@dataclass(frozen=True)
class GivenModel:
    """What there is to train."""

    name: str
    loaded: Any = None
    """The causal LM, where it was given loaded."""
    dtype: str = ""
    lora: Mapping[str, Any] = field(default_factory=dict)


class ModelKeeper:
    """A Tracker that keeps a model which was given loaded where a run, and a resume of it, can read it."""

    def __init__(self, given: GivenModel, output_dir: Path, tokenizer: Any) -> None:
        self.given = given
        self.tokenizer = tokenizer
        self.folder = output_dir.expanduser() / f"{GIVEN_FOLDER}_{digest_of(given.loaded)}"

    @property
    def name(self) -> str:
        """What `[model] model` is to be."""
        return self.given.name if self.given.loaded is None else str(self.folder)

    def start(self, config: TrainConfig) -> None:
        """Write the model, also once more when an earlier run in the same place was moved away with it."""
        if self.given.loaded is None or self.folder.is_dir():
            return
        draft = self.folder.with_name(f".{self.folder.name}")
        draft.mkdir(parents=True, exist_ok=True)
        self.given.loaded.save_pretrained(draft)
        self.tokenizer.save_pretrained(draft)
        draft.rename(self.folder)

    def log(self, step: int, metrics: StepMetrics, groups: Sequence[Group]) -> None:
        """Nothing: the model that was given does not change."""

    def finish(self) -> None:
        """Nothing: a resume will want it."""


def digest_of(model: Any) -> str:
    """A short digest of a loaded model's weights, so that another model has another folder; "" for None."""
    if model is None:
        return ""
    found = hashlib.blake2b(digest_size=6)
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_model(model: object, peft_config: object) -> GivenModel:
    """The model and the options of its adapter; without a peft_config the whole model is trained."""
    if isinstance(model, str | Path):
        return GivenModel(str(model), lora=lora_options(peft_config, str(model), None))
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ConfigError("model is a PeftModel, which has its adapter already.  Try: leave out peft_config")
        peft_config, model = _fresh_adapter(model), _without_adapter(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model is {model!r} ({type(model).__name__}).  Try: a model id, a folder, builtin:tiny, or a loaded model"
        )
    if model.dtype not in _DTYPES:
        raise ConfigError(f"model is in {model.dtype}, which cannot be trained in.  Try: dtype=torch.bfloat16")
    name = str(model.config.name_or_path)
    return GivenModel(name, model, _DTYPES[model.dtype], lora_options(peft_config, name, model.config))


def _fresh_adapter(model: PeftModel) -> LoraConfig:
    """The configuration of an adapter that does nothing yet; one that was trained has no place to go."""
    trained = [name for name, p in model.named_parameters() if "lora_B" in name and bool(p.detach().any())]
    if trained:
        raise ConfigError(
            f"model is a PeftModel whose adapter was trained already ({trained[0]} is not zero); a run begins with an "
            "adapter of its own.  Try: model.merge_and_unload(), with a peft_config"
        )
    return model.active_peft_config


def _without_adapter(model: PeftModel) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.unload()


def lora_options(peft_config: object, model: str, config: Any) -> dict[str, Any]:
    """Options of `[model]` and `[lora]` that a LoraConfig becomes."""
    if peft_config is None:
        return {"model.lora_rank": 0}
    if not isinstance(peft_config, LoraConfig):
        raise ConfigError(f"peft_config is a {type(peft_config).__name__}; only peft.LoraConfig has a twin here.")
    usual, given = vars(LoraConfig()), vars(peft_config)
    known = (*_LORA_TWINS, *_LORA_NOTES)
    problems = [
        ConfigIssue(f"peft_config: {name}", f"= {given[name]!r} has no twin in retrain.", "Leave it out.")
        for name in given
        if name not in known and given[name] != usual.get(name)
    ]
    if str(given["task_type"] or "CAUSAL_LM").rpartition(".")[2] != "CAUSAL_LM":
        problems.append(ConfigIssue("peft_config: task_type", f"= {given['task_type']!r} is not CAUSAL_LM."))
    if problems:
        raise ConfigError("peft_config cannot be used:", tuple(problems))
    return {
        "model.lora_rank": peft_config.r,
        "lora.alpha": peft_config.lora_alpha,
        "lora.dropout": float(peft_config.lora_dropout),
        "lora.target_modules": _targets(peft_config.target_modules, model, config),
    }


def _targets(targets: Any, model: str, config: Any) -> str:
    if targets is None:
        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(_model_type(model, config))
        if targets is None:
            raise ConfigError(f"peft_config: PEFT has no target_modules for {model!r}.  Try: 'all-linear'")
    if isinstance(targets, str):
        if targets != "all-linear":
            raise ConfigError(
                f"peft_config: target_modules = {targets!r} is a pattern.  Try: a list of names, or 'all-linear'"
            )
        return targets
    return ",".join(sorted(targets))


def _model_type(model: str, config: Any) -> str:
    with contextlib.suppress(AttributeError):
        return str(config.model_type)
    try:
        return str(AutoConfig.from_pretrained(resolve_model(model)).model_type)
    except (OSError, ValueError) as error:
        raise ConfigError(explain_missing_model(model, error)) from error
