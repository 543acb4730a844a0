"""What a run keeps on disk: its folder, checkpoints, recorded rollouts and published adapters."""
