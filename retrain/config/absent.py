"""Documented choices that load and are checked although nothing here can honour them: refused before a run starts."""

from __future__ import annotations

from retrain.config.rules import values_of
from retrain.config.schema import TrainConfig
from retrain.config.toml import show_value
from retrain.errors import ConfigError, ConfigIssue

_SOURCES = "are C++ sources, built for one generation of GPUs where they run"
# Of the engine in this process; others may have them.
UNBUILT = (
    ("attention_kernel", "tk", f"ThunderKittens {_SOURCES}", "default, flash, triton"),
    ("attention_kernel", "cutlass", f"CUTLASS kernels {_SOURCES}", "default, flash, triton"),
    ("dtype", "fp4", "only Blackwell GPUs have 4-bit products, and it does not use them", "auto, bf16, fp8"),
)


def find_absent_parts(config: TrainConfig) -> list[ConfigIssue]:
    """What this configuration asks for that cannot be had."""
    values = values_of(config)
    if config.kind != "squeeze" and config.backend.backend == "tinker":
        from retrain.backends.tinker.limits import find_unsupported  # noqa: PLC0415  (only a run on Tinker needs it)

        return list(find_unsupported(config))
    if config.kind == "squeeze" or values["inference.engine"] != "pytorch":
        return []
    return [
        ConfigIssue(
            f"[inference] {key}", f"= {show_value(value)} is not for the pytorch engine: {reason}.", f"Try: {others}"
        )
        for key, value, reason, others in UNBUILT
        if values[f"inference.{key}"] == value
    ]


def refuse_absent_parts(config: TrainConfig) -> None:
    """Raise one error for all of them, if there are any."""
    problems = find_absent_parts(config)
    if problems:
        raise ConfigError("this configuration cannot be run:", tuple(problems))
