"""Several processes: rank 0 runs the whole program, the others sample and train for it.

Rollouts are shared out over the ranks; rewards, credit, logs and checkpoints are rank 0's alone.
"""
