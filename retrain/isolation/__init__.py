"""Isolation of third-party code: guarded processes, framed messages, redacted secrets."""
