"""The built-in model `builtin:tiny`, a tiny pre-trained language model inside the package."""

from pathlib import Path

from retrain.errors import ConfigError

PREFIX = "builtin:"
MODELS = ("tiny",)


def resolve_model(name: str) -> str:
    """The folder of `builtin:tiny`; any other name is returned unchanged."""
    if not name.startswith(PREFIX):
        return name
    model = name.removeprefix(PREFIX)
    if model not in MODELS:
        known = ", ".join(PREFIX + each for each in MODELS)
        raise ConfigError(f"[model] model: there is no built-in model {name!r}.  Try: {known}")
    return str(Path(__file__).parent / model)
