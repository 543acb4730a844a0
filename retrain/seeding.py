"""Every random draw of a run is a function of (seed, what for, step).

So a resume needs no generator state: step n draws the same whether or not the run was cut before it.
"""

from __future__ import annotations

import hashlib
import random
import secrets


def derive_seed(seed: int, purpose: str, step: int = 0) -> int:
    """A seed for one purpose in one step, unrelated to every other one. It fits numpy's and torch's generators."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "big")


def fresh_seed() -> int:
    """A seed for a run that did not ask for one."""
    return secrets.randbelow(2**31)


def seed_everything(seed: int, step: int) -> None:
    """Seed the global generators, for dropout and for plug-ins that draw from them."""
    import numpy as np  # noqa: PLC0415  (the configuration side imports this module too)

    value = derive_seed(seed, "global", step)
    random.seed(value)
    np.random.seed(value)
    try:
        import torch  # noqa: PLC0415  (absent on machines that train remotely)
    except ImportError:
        return
    torch.manual_seed(value)
