"""Parses `[backend] devices` and checks that the devices exist."""

from __future__ import annotations

import os
from pathlib import Path

from retrain.errors import ConfigError

AUTO = "auto"
"""The first GPU, or the CPU if there is none."""

# Files with the memory limit of a container, of both versions of control groups.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# NVIDIA, AMD, Windows' subsystem for Linux, and NVIDIA Jetson.
_GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg", "nvmap")


def device_names(devices: str) -> list[str]:
    """The listed devices: `cpu`, `gpu:N`, or only `auto`."""
    return [part.strip() for part in devices.split(",")]


def is_on_cpu(devices: str) -> bool:
    """Whether no GPU is used; `auto` is resolved without importing PyTorch."""
    names = device_names(devices)
    return not has_gpu() if names == [AUTO] else set(names) == {"cpu"}


def has_gpu() -> bool:
    """Whether the system has a GPU that PyTorch might use."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and any(path for pattern in _GPU_FILES for path in Path("/dev").glob(pattern))


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container if that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(int(text) for path in _MEMORY_LIMITS if (text := _read(path)).isdecimal())])


def cache_memory() -> int:
    """Bytes that sampling on a CPU plans its KV cache for: not what is free, on which no result may depend."""
    return machine_memory() // 2


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def check_gpus(devices: str, count: int) -> None:
    """Raise for the first GPU beyond the `count` existing ones."""
    for name in device_names(devices):
        if name.startswith("gpu:") and int(name[4:]) >= count:
            found = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
            raise ConfigError(
                f'[backend] devices = "{devices}", but PyTorch finds {found} here.  '
                + ('Try: devices = "gpu:0"' if count else 'Try: devices = "cpu", or devices = "auto"')
            )
