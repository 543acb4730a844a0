"""The installed version, read from the package's metadata."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed


def version() -> str:
    """Version of the installed package, or a marker for a bare source tree."""
    try:
        return _installed("retrain")
    except PackageNotFoundError:
        return "0+source"
