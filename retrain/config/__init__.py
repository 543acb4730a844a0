"""Configuration: one TOML file, validated before anything heavy is imported."""

from retrain.config.load import build_config, dump_config, find_notes, load_config
from retrain.config.schema import TrainConfig

__all__ = ["TrainConfig", "build_config", "dump_config", "find_notes", "load_config"]
