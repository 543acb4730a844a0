"""The data source of a run that a Python script began: only that script can go on with it."""

from __future__ import annotations

from retrain.config import schema
from retrain.errors import ConfigError


class Rows:
    """Stands in `config.toml` for prompts and rewards that live in a script; refuses to be made from the file alone."""

    def __init__(self, section: schema.Data) -> None:
        raise ConfigError(
            "this run was begun by a script: its prompts and rewards are there, not in config.toml.  "
            "Try: trainer.train(resume_from_checkpoint=True) in that script"
        )
