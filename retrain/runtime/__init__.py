"""The process a run lives in: devices, ranks, signals, version."""
