"""Whether Triton runs, and how it builds the C code that launches a kernel. Tested with Triton 3.6 (GPU) and 3.9."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device, and what PyTorch compiles for a GPU with them."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def build_launchers_quickly() -> None:
    """Build it without optimization: 0.1 s instead of 0.5 s per kernel, of which a first step has a dozen.

    The time of a launch does not matter: short kernels are recorded in CUDA graphs.
    """
    # A Triton that is absent, or has no such setting, builds as it always does.
    with suppress(ImportError, AttributeError):
        from triton import knobs  # noqa: PLC0415  (comes with CUDA builds of torch)

        knobs.build.impl = knobs.build.impl or _build


def _build(
    name: str, source: str, folder: str, library_folders: list[str], include_folders: list[str], libraries: list[str]
) -> str:
    built = Path(folder, name + str(sysconfig.get_config_var("EXT_SUFFIX")))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"
    command = [compiler, source, "-O0", "-shared", "-fPIC", "-o", str(built)]
    command += [f"-l:{library}" if re.search(r"\.(so|a)\b", library) else f"-l{library}" for library in libraries]
    command += [f"-L{path}" for path in library_folders]
    command += [f"-I{path}" for path in (*include_folders, folder, _python_headers())]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return _build_by_triton(name, source, folder, library_folders, include_folders, libraries)
    return str(built)


def _python_headers() -> str:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme is for packages that are installed by hand; the headers are elsewhere.
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)


def _build_by_triton(name: str, source: str, folder: str, *rest: list[str]) -> str:
    from triton import knobs  # noqa: PLC0415
    from triton.runtime.build import _build as build  # noqa: PLC0415

    knobs.build.impl = None
    built: str = build(name, source, folder, *rest, [])
    return built
