"""A plugin for pytest, with which TRL's tests run without a GPU and with another version of TRL than their own.

It is copied next to them, and is the same for TRL's trainer and for retrain's.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from trl import import_utils
from trl.trainer import base_config

HOME = Path(__file__).parent
# Token ids of Qwen's vocabulary, or the reliance on a random model not ending its completions.
NEEDS_WHOLE_VOCABULARY = re.compile(r"\b1516\d\d\b|mask_truncated")
prepare = base_config._BaseConfig.__post_init__


def __getattr__(name: str) -> Callable[[], bool]:
    """Functions that versions of TRL before or after the installed one have."""
    if found := re.fullmatch(r"is_(\w+)_available", name):
        return lambda: find_spec(found[1]) is not None
    raise AttributeError(name)


def prepare_for_float32(self: base_config._BaseConfig) -> None:
    """TRL trains in bfloat16 by default, which takes 80 times as long on a CPU that has no instructions for it."""
    if self.bf16 is None:
        self.bf16 = False
    prepare(self)


def pytest_runtest_setup(item: pytest.Function) -> None:
    """Names of models are relative paths: the folder decides which models a test gets."""
    needs_whole = NEEDS_WHOLE_VOCABULARY.search(inspect.getsource(item.function))
    os.chdir(HOME / "whole" if needs_whole else HOME / "small")


import_utils.__getattr__ = __getattr__  # type: ignore[method-assign]
base_config._BaseConfig.__post_init__ = prepare_for_float32
