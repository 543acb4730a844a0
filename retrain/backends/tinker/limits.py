"""What the service decides by itself: options that are refused because they change the run, or named as ignored."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.config import TrainConfig
from retrain.config.options import options_by_path
from retrain.config.rules import values_of
from retrain.config.toml import format_value
from retrain.errors import ConfigError, Problem

# Where and how fast this machine would compute. The same file then runs on either backend.
_IGNORED = ("inference.", "backend.devices", "backend.adapter_path", "model.dtype", "memory.")

# What would change the policy or the loss and cannot be asked of the service, and what to say of it.
_REFUSED = {
    "model.init_kwargs": "The service loads the model by itself.",
    "lora.alpha": "The service chooses LoRA's alpha.",
    "lora.dropout": "The service trains without dropout.",
    "lora.target_modules": "The service adapts all attention and MLP layers.",
    "training.min_p": "The service samples with temperature, top_p and top_k alone.",
    "training.repetition_penalty": "The service samples with temperature, top_p and top_k alone.",
    "kl.beta": "The service has no reference policy.",
    "kl.sync_ref_model": "The service has no reference policy.",
    "distributed.zero_stage": "The service distributes by itself.",
}
# The service clips these losses by itself and has no further cap. Its cispo with bounds 0 and ratio_cap is capped
# importance sampling; see losses.py.
_UNCAPPED = ("ppo", "gspo", "dr_grpo")


def refuse_unsupported(config: TrainConfig) -> None:
    """Raise one error for every option that Tinker cannot honour."""
    problems = tuple(_find_problems(config))
    if problems:
        raise ConfigError('this configuration cannot be run with [backend] backend = "tinker":', problems)


def _find_problems(config: TrainConfig) -> Iterator[Problem]:
    values, options = values_of(config), options_by_path()
    for path, reason in _REFUSED.items():
        option = options[path]
        if values[path] != option.default:
            hint = f"Leave it at {format_value(option.default)}."
            yield Problem(option.where, f"= {format_value(values[path])} is not possible: {reason}", hint)
    cap, kind = config.loss.ratio_cap, config.loss.type
    if kind in _UNCAPPED and cap not in (0.0, options["loss.ratio_cap"].default):
        yield Problem(
            "[loss] ratio_cap",
            f'= {format_value(cap)} is not possible with type = "{kind}": The service clips by clip_low and clip_high.',
            "Try: ratio_cap = 0.0",
        )


def describe_ignored(config: TrainConfig) -> str:
    """One line that names what was set and does nothing here, or ""."""
    values, options = values_of(config), options_by_path()
    names = [
        options[path].where
        for path in options
        if path.startswith(_IGNORED) and path in values and values[path] != options[path].default
    ]
    return f"Ignored with Tinker, which samples and trains by itself: {', '.join(names)}." if names else ""
