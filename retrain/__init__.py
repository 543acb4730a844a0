"""RLVR training for language models: one TOML, one command."""

__all__: list[str] = []
