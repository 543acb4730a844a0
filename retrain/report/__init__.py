"""Reports: an HTML page on runs and campaigns, read from their folders."""

from __future__ import annotations

from retrain.report.contents import collect
from retrain.report.page import build_page

__all__ = ["build_page", "collect"]
