"""What the service decides by itself: options that are refused because they change the run."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.backends.tinker.service_loss import SERVICE_LOSSES, service_loss
from retrain.config import TrainConfig
from retrain.config.options import options_by_path
from retrain.config.rules import values_of
from retrain.config.toml import format_value
from retrain.errors import ConfigError, ConfigIssue

# What would change the policy or the loss and cannot be asked of the service, and what to say of it.
_REFUSED = {
    "model.init_kwargs": "The service loads the model by itself.",
    "lora.alpha": "The service chooses LoRA's alpha.",
    "lora.dropout": "The service trains without dropout.",
    "lora.target_modules": "The service adapts all attention and MLP layers.",
    "training.min_p": "The service samples with temperature, top_p and top_k alone.",
    "training.repetition_penalty": "The service samples with temperature, top_p and top_k alone.",
    "kl.beta": "The service has no reference policy.",
}


def refuse_unsupported(config: TrainConfig) -> None:
    """Raise one error for every option that Tinker cannot honour."""
    problems = tuple(find_unsupported(config))
    if problems:
        raise ConfigError('this configuration cannot be run with [backend] backend = "tinker":', problems)


def find_unsupported(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A problem for each of them."""
    values, options = values_of(config), options_by_path()
    for path, reason in _REFUSED.items():
        option = options[path]
        if values[path] != option.default:
            hint = f"Leave it at {format_value(option.default)}."
            yield ConfigIssue(
                option.where, f"= {format_value(values[path])} is not possible with Tinker: {reason}", hint
            )
    kind = config.loss.type
    if kind not in SERVICE_LOSSES:
        known = ", ".join(SERVICE_LOSSES)
        yield ConfigIssue(
            "[loss] type", f'= "{kind}" is not possible with Tinker: The service has no such loss.', f"Try: {known}"
        )
    elif _is_uncapped(config) and config.loss.ratio_cap != options["loss.ratio_cap"].default:
        yield ConfigIssue(
            "[loss] ratio_cap",
            f'= {format_value(config.loss.ratio_cap)} is not possible with Tinker and type = "{kind}": The service '
            "clips by clip_low and clip_high.",
            "Try: ratio_cap = 0.0",
        )


def _is_uncapped(config: TrainConfig) -> bool:
    """Whether there is a cap on ratios that the service will not apply."""
    return config.loss.ratio_cap > 0 and not service_loss(config.loss).caps_ratios


def describe_uncapped(config: TrainConfig) -> str:
    """A line of the default cap on ratios where the service does not apply it, or ""."""
    if not _is_uncapped(config):
        return ""
    return (
        f"Ignored with Tinker: [loss] ratio_cap = {config.loss.ratio_cap:g}; its {config.loss.type} clips by "
        "clip_low and clip_high alone."
    )
