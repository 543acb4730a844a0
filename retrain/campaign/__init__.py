"""Campaigns: one run per condition and seed, with a common folder and manifest."""
