"""The tables of a configuration, by theme. `retrain.config.schema` puts them together."""
