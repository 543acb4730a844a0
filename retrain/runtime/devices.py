"""The devices that `[backend] devices` names, and whether they are there."""

from __future__ import annotations

import os
from pathlib import Path

from retrain.config import TrainConfig
from retrain.errors import ConfigError

AUTO = "auto"
"""The first GPU where there is one, else the CPU."""


def device_names(devices: str) -> list[str]:
    """Each device on its own: `cpu`, `gpu:N`, or `auto` alone."""
    return [part.strip() for part in devices.split(",")]


def is_on_cpu(devices: str) -> bool:
    """Whether no GPU is used; of `auto`, whether none is to be seen, which is found out without PyTorch."""
    names = device_names(devices)
    return not has_gpu() if names == [AUTO] else set(names) == {"cpu"}


def has_gpu() -> bool:
    """Whether the system shows a GPU that PyTorch might use."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and (Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*")))


def check_devices(config: TrainConfig) -> None:
    """Refuse a local run whose GPUs are not all there, before anything is loaded."""
    names_a_gpu = any(name.startswith("gpu:") for name in device_names(config.backend.devices))
    if config.backend.backend == "local" and names_a_gpu:
        import torch  # noqa: PLC0415  (slow to import, and a run on the CPU may yet be refused for less)

        find_missing(config.backend.devices, torch.cuda.device_count())


def find_missing(devices: str, count: int) -> None:
    """Raise for the first GPU that is named and not among the `count` that there are."""
    for name in device_names(devices):
        if name.startswith("gpu:") and int(name[4:]) >= count:
            found = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
            raise ConfigError(
                f'[backend] devices = "{devices}", but PyTorch finds {found} here.  '
                + ('Try: devices = "gpu:0"' if count else 'Try: devices = "cpu", or devices = "auto" for a GPU if any')
            )
