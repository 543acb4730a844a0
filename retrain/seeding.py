"""All random numbers of a run depend on (seed, purpose, step).

A resume therefore needs no generator state: step n draws the same numbers.
"""

from __future__ import annotations

import hashlib
import random
import secrets


def derive_seed(seed: int, purpose: str, step: int = 0) -> int:
    """An independent seed for a purpose and step, in the range of numpy's and torch's generators."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "big")


def fresh_seed() -> int:
    """A random seed for a run without one."""
    return secrets.randbelow(2**31)


def seed_everything(seed: int, step: int) -> None:
    """Seed the global generators, for dropout and for plugins that draw from them."""
    import numpy as np  # noqa: PLC0415  (the configuration side imports this module too)

    value = derive_seed(seed, "global", step)
    random.seed(value)
    np.random.seed(value)
    try:
        import torch  # noqa: PLC0415  (absent on machines that train remotely)
    except ImportError:
        return
    torch.manual_seed(value)
