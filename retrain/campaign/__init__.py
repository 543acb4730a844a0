"""Campaigns: conditions × seeds, each a run of its own, with one folder and one manifest for all of them."""
