"""Finished runs: reading them back, comparing them, and recomputing credit on their rollouts."""
