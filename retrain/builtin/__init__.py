"""The embedded model: a tiny pre-trained language model inside the package, named `builtin:tiny`."""

from pathlib import Path

from retrain.errors import ConfigError

PREFIX = "builtin:"
MODELS = ("tiny",)


def resolve_model(name: str) -> str:
    """Turn `builtin:tiny` into the folder that holds it; leave any other model name as it is."""
    if not name.startswith(PREFIX):
        return name
    model = name.removeprefix(PREFIX)
    if model not in MODELS:
        known = ", ".join(PREFIX + each for each in MODELS)
        raise ConfigError(f"model: there is no embedded model {name!r}; try one of: {known}")
    return str(Path(__file__).parent / model)
