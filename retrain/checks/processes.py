"""Whether a configuration can run in the processes and on the devices that it is started with."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping

from retrain.config import TrainConfig
from retrain.config.options import option_issue, options_by_path, values_of
from retrain.errors import ConfigError, ConfigIssue
from retrain.runtime.devices import check_gpus, device_names, has_gpu

LAUNCH_NOTE = "fsdp needs several processes: start it with retrain launch --processes N"


def check_devices(config: TrainConfig) -> None:
    """Raise for missing GPUs of a local run, before anything is loaded."""
    if _names_gpu(config):
        import torch  # noqa: PLC0415  (slow to import)

        check_gpus(config.backend.devices, torch.cuda.device_count())


def lacks_gpu(config: TrainConfig) -> bool:
    """Whether a run on this machine names a GPU where the system has none; does not import PyTorch."""
    is_elsewhere = config.campaign is not None and config.campaign.executor != "local"
    return _names_gpu(config) and not is_elsewhere and not has_gpu()


def _names_gpu(config: TrainConfig) -> bool:
    names = device_names(config.backend.devices)
    return config.backend.backend == "local" and any(name.startswith("gpu:") for name in names)


def check_multi_process(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Raise one error for everything that a multi-process run does not support."""
    problems = tuple(_problems(config, environment))
    if problems:
        raise ConfigError("this configuration cannot be run by several processes:", problems)


def check_single_process(config: TrainConfig) -> None:
    """Raise if weights are to be sharded in a single-process run."""
    if needs_launch(config):
        what = f"--resume {shlex.quote(config.resume.from_)}" if config.resume.from_ else "FILE"
        raise ConfigError(
            f"[distributed] fsdp = true needs several processes.  Try: retrain launch --processes 2 {what}"
        )


def needs_launch(config: TrainConfig) -> bool:
    """Whether a run shards its weights, for which it must be started with several processes."""
    return config.kind != "squeeze" and config.backend.backend == "local" and config.distributed.fsdp


def _problems(config: TrainConfig, environment: Mapping[str, str]) -> Iterator[ConfigIssue]:
    if config.kind == "campaign":
        yield ConfigIssue("[campaign]", "starts its own processes.", "Try: retrain config.toml, without a launcher")
    if config.kind == "squeeze":
        yield ConfigIssue("[squeeze]", "analyzes an adapter in one process.", "Try: retrain config.toml")
    if config.backend.backend != "local":
        yield ConfigIssue(
            "[backend] backend",
            f"= {config.backend.backend!r} trains elsewhere; one process is enough for it.",
            "Try: retrain config.toml, without a launcher",
        )
    for path, value in values_of(config).items():
        option = options_by_path()[path]
        if option.facets.multi_process and value != option.default:
            text = f"is not supported with several processes: {option.facets.multi_process}"
            yield option_issue(path, text, f"Try: {option.key} = {option.default}")
    yield from _contradictions(config, environment)


def _contradictions(config: TrainConfig, environment: Mapping[str, str]) -> Iterator[ConfigIssue]:
    """Settings of `accelerate launch` that contradict the configuration."""
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1"):
        if not config.distributed.fsdp:
            text = "does not ask for FSDP, but accelerate's configuration does."
            yield ConfigIssue("[distributed]", text, "Try: fsdp = true")
        elif environment.get("FSDP_VERSION", "2") != "2":
            yield ConfigIssue("[distributed] fsdp", "is FSDP2, but accelerate's configuration asks for fsdp_version 1.")
    for variable, harmless, what, hint in (
        ("FSDP_OFFLOAD_PARAMS", ("", "false"), "fsdp_offload_params", ""),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("", "1"), "gradient_accumulation_steps", ""),
        ("ACCELERATE_USE_DEEPSPEED", ("", "false", "0"), "DeepSpeed", "Try: fsdp = true, or `retrain grpo` for ZeRO"),
        ("ACCELERATE_USE_MEGATRON_LM", ("", "false", "0"), "Megatron-LM", ""),
    ):
        if environment.get(variable, "").lower() not in harmless:
            text = f"does not support {what}, which accelerate's configuration sets."
            yield ConfigIssue("[distributed]", text, hint)
    mixed = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed != "no":
        yield ConfigIssue(
            "[model] dtype",
            f"sets the precision of the weights, but accelerate's configuration has mixed_precision {mixed!r}.",
            "Try: mixed_precision: 'no'",
        )
