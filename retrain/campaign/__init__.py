"""Campaigns: conditions × seeds, each a run of its own, with one folder and one manifest for all of them."""

from __future__ import annotations

from retrain.campaign.plan import Run, plan_runs
from retrain.campaign.run import run_campaign

__all__ = ["Run", "plan_runs", "run_campaign"]
