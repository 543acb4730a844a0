"""Campaigns: conditions × seeds, each a run of its own, with one folder and one manifest for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retrain.campaign.plan import Run, plan_runs

if TYPE_CHECKING:
    from retrain.campaign.run import run_campaign

__all__ = ["Run", "plan_runs", "run_campaign"]


def __getattr__(name: str) -> Any:
    # `explain`, `plan` and `status` read campaigns without running one; running loads the statistics' libraries.
    if name != "run_campaign":
        raise AttributeError(f"module 'retrain.campaign' has no attribute {name!r}")
    from retrain.campaign.run import run_campaign  # noqa: PLC0415

    return run_campaign
