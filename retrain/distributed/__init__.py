"""Multi-process runs: rank 0 runs the program, the other ranks sample and train for it.

Prompts and datums are split over the ranks; rewards, credit, logs and checkpoints stay on rank 0.
"""
