"""The rule about paths."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from retrain.config.options import option_issue, paths_where, values_of
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue


def check_paths(config: TrainConfig) -> Iterator[ConfigIssue]:
    """No path contains a NUL character, is a cycle of links, or is too long."""
    for option, value in values_of(config).items():
        if option in paths_where("path"):
            for path in filter(None, (value,) if isinstance(value, str) else value):
                text = _explain_invalid(path)
                if text:
                    yield option_issue(option, text, "Try: another path")


def _explain_invalid(path: str) -> str:
    if "\0" in path:
        return f"= {path!r} holds a NUL character, which no path can have."
    try:
        os.stat(os.path.expanduser(path))
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"= {path!r} is a cycle of symbolic links."
        if error.errno == errno.ENAMETOOLONG:
            return f"= {path[:40] + '...'!r} is longer than a path may be."
    except ValueError:  # text that cannot be encoded; check_toml_values reports it
        return ""
    return ""


RULES = (check_paths,)
