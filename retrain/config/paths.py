"""A rule for paths: the file system can at least be asked about them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from retrain.config.options import options_by_path
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue


def paths_can_be_used(config: TrainConfig) -> Iterator[ConfigIssue]:
    """No path holds a NUL character, leads round in a circle of links, or is longer than a path may be."""
    squeeze = config.squeeze
    paths = {
        "model.model": (config.model.model,),
        "backend.adapter_path": (config.backend.adapter_path,),
        "backend.throttle_dir": (config.backend.throttle_dir,),
        "inference.adapter_dir": (config.inference.adapter_dir,),
        "data.path": (config.data.path,),
        "eval.path": (config.eval.path,),
        "reward.judge_cache": (config.reward.judge_cache,),
        "teaching.student_model": (config.teaching.student_model,),
        "resume.from": (config.resume.from_,),
        "logging.log_dir": (config.logging.log_dir,),
        "plugins.search_paths": config.plugins.search_paths,
        "squeeze.adapter_path": (squeeze.adapter_path,) if squeeze is not None else (),
        "squeeze.output_path": (squeeze.output_path,) if squeeze is not None else (),
    }
    for option, values in paths.items():
        for value in filter(None, values):
            problem = _find_problem(value)
            if problem:
                yield ConfigIssue(options_by_path()[option].where, problem, "Try: another path")


def _find_problem(path: str) -> str:
    if "\0" in path:
        return f"= {path!r} holds a NUL character, which no path can have."
    try:
        os.stat(os.path.expanduser(path))
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"= {path!r} leads round in a circle of symbolic links."
        if error.errno == errno.ENAMETOOLONG:
            return f"= {path[:40] + '...'!r} is longer than a path may be."
    except ValueError:  # characters that the file system cannot spell; another rule says so
        return ""
    return ""
