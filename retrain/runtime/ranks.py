"""Rank and world size of this process, from the variables that torchrun, accelerate and `retrain launch` set.

Imports no torch: the command line uses it before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from retrain.errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of a process, over all machines and on its own."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def is_main(self) -> bool:
        """Whether this process runs the training loop and the others serve it."""
        return self.rank == 0


def find_rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """This process's rank, or None in a single-process run."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be integers: {error}.") from error
    if not 0 <= rank < world:
        raise ConfigError(f"RANK = {rank} is not below WORLD_SIZE = {world}.")
    return RankInfo(rank, world, local_rank, local_world) if world > 1 else None
