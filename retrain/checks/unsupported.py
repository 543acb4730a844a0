"""Valid choices that the selected backend or engine does not support; reported before a run starts."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.config.options import all_options, option_issue, options_by_path, rejected_on_tinker, values_of
from retrain.config.schema import TrainConfig
from retrain.config.toml import format_value, show_value
from retrain.errors import ConfigError, ConfigIssue
from retrain.losses import build_loss
from retrain.plugins import REGISTRIES, SERVER_ENGINES


def find_unsupported(config: TrainConfig) -> list[ConfigIssue]:
    """Options that the backend or the engine of this configuration cannot honor."""
    if config.kind == "squeeze":
        return []
    engine = config.inference.engine
    if config.backend.backend == "tinker":
        return [*_on_tinker(config), *_without_entropies(config, "Tinker: The service")]
    if config.backend.backend == "local" and engine in SERVER_ENGINES:
        return list(_without_entropies(config, f'[inference] engine = "{engine}": A server'))
    return list(_in_engine(config)) if engine == "pytorch" else []


def check_supported(config: TrainConfig) -> None:
    """Raise one error for all of them, if there are any."""
    issues = find_unsupported(config)
    if issues:
        raise ConfigError("this configuration cannot be run:", tuple(issues))


def _in_engine(config: TrainConfig) -> Iterator[ConfigIssue]:
    values = values_of(config)
    for option in all_options():
        unsupported, value = option.facets.unsupported or {}, values.get(option.path)
        if isinstance(value, str) and value in unsupported:
            supported = ", ".join(str(choice) for choice in option.choices if choice not in unsupported)
            text = f"= {show_value(value)} is not supported by the pytorch engine: {unsupported[value]}."
            yield option_issue(option.path, text, f"Try: {supported}")


def _without_entropies(config: TrainConfig, where: str) -> Iterator[ConfigIssue]:
    """An uncertainty that needs entropies, where there are none; that of a plugin is seen once it is loaded."""
    kinds = REGISTRIES["uncertainty"].builtins
    if config.algorithm.uncertainty_kind not in kinds:
        return
    from retrain.advantages.uncertainty import needs_entropies  # noqa: PLC0415  (loads numpy)

    if needs_entropies(config.algorithm.uncertainty_kind):
        text = f"= {show_value(config.algorithm.uncertainty_kind)} is not possible with {where} returns no entropies."
        others = ", ".join(kind for kind in kinds if not needs_entropies(kind))
        yield option_issue("algorithm.uncertainty_kind", text, f"Try: {others}")


def _on_tinker(config: TrainConfig) -> Iterator[ConfigIssue]:
    values = values_of(config)
    for option in all_options():
        reason = rejected_on_tinker(option)
        if reason and values[option.path] != option.default:
            text = f"= {format_value(values[option.path])} is not possible with Tinker: {reason}"
            yield option_issue(option.path, text, f"Leave it at {format_value(option.default)}.")
    yield from _loss_on_tinker(config)


def _loss_on_tinker(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A loss that the service lacks, or a cap that it does not apply, unless it is the default."""
    settings, cap = config.loss, options_by_path()["loss.ratio_cap"]
    on_tinker = build_loss(settings, config.plugins.search_paths).on_tinker()
    if on_tinker is None:
        others = (settings.model_copy(update={"type": name}) for name in REGISTRIES["loss"].parts)
        known = ", ".join(other.type for other in others if build_loss(other).on_tinker() is not None)
        text = f'= "{settings.type}" is not possible with Tinker: The service has no such loss.'
        yield option_issue("loss.type", text, f"Try: {known}")
    elif settings.ratio_cap not in (0.0, cap.default) and not on_tinker.caps_ratios:
        yield option_issue(
            cap.path,
            f'= {format_value(settings.ratio_cap)} is not possible with Tinker and type = "{settings.type}": The '
            "service clips by clip_low and clip_high.",
            "Try: ratio_cap = 0.0",
        )
