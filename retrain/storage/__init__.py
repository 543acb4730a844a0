"""Files of a run: folder, logs, checkpoints, recorded rollouts and published adapters."""
