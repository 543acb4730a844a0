"""Foreign code kept apart: guarded processes, framed messages, redacted secrets."""
