"""Keys of services that a configuration uses: whether they are set and look like keys. Their values are not shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from retrain.config import TrainConfig
from retrain.config.reasons import needs_judge
from retrain.errors import ConfigError, ConfigIssue
from retrain.inference_engine.http.client import KEY_VARIABLE, read_api_key
from retrain.plugins import SERVER_ENGINES

WANDB_HINT = "Try: wandb login, WANDB_API_KEY=... in .env, or export WANDB_MODE=offline"

_NOT_IN_PROJECTS = "/\\#?%:"
_LONGEST_PROJECT = 128
_WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")


def missing_keys(config: TrainConfig) -> Iterator[tuple[str, ConfigIssue]]:
    """Keys that the configuration needs and that are missing or invalid, by environment variable."""
    project = config.logging.wandb_project
    if project and not has_wandb_key():
        text = f"= {json.dumps(project)} needs a key, and there is none."
        yield "WANDB_API_KEY", ConfigIssue("[logging] wandb_project", text, WANDB_HINT)
    problem = explain_invalid_tinker_key() if config.backend.backend == "tinker" else ""
    if problem:
        hint = "Try: put TINKER_API_KEY=tml-... into .env"
        yield "TINKER_API_KEY", ConfigIssue("[backend] backend", f'= "tinker" {problem}', hint)
    own_server = config.reward.judge_base_url or os.environ.get("OPENAI_BASE_URL")
    is_judged = not needs_judge(config)
    if is_judged and not own_server and not os.environ.get("OPENAI_API_KEY"):
        hint = "Try: set OPENAI_API_KEY=... in .env, or judge_base_url for a server of your own"
        yield "OPENAI_API_KEY", ConfigIssue("[reward] type", '= "judge" needs a key, and there is none.', hint)
    if config.backend.backend == "local" and config.inference.engine in SERVER_ENGINES:
        try:
            read_api_key()
        except ConfigError as error:
            text, _, hint = str(error).removeprefix(KEY_VARIABLE).partition("  ")
            yield KEY_VARIABLE, ConfigIssue(KEY_VARIABLE, text.strip(), hint)


def find_wandb_issues(config: TrainConfig) -> Iterator[ConfigIssue]:
    """What wandb would refuse. Not a rule of the file: a finished run may have any name."""
    project, mode = config.logging.wandb_project, os.environ.get("WANDB_MODE", "online")
    if project and mode not in _WANDB_MODES:
        hint = f"Try: one of {', '.join(_WANDB_MODES)}"
        yield ConfigIssue("WANDB_MODE", f"= {json.dumps(mode)} is not a mode of wandb.", hint)
    found = sorted(set(project) & set(_NOT_IN_PROJECTS))
    if found or len(project) > _LONGEST_PROJECT:
        team, _, name = project.partition("/")
        is_path = team and name and not set(team + name) & set(_NOT_IN_PROJECTS) and not config.logging.wandb_entity
        hint = f'wandb_entity = "{team}" and wandb_project = "{name}"' if is_path else "another name"
        what = f"contain {' '.join(found)}" if found else f"have more than {_LONGEST_PROJECT} characters"
        text = f"must not {what}, got {json.dumps(project)[:_LONGEST_PROJECT]}."
        yield ConfigIssue("[logging] wandb_project", text, f"Try: {hint}")


def explain_invalid_tinker_key() -> str:
    """Why the Tinker key is invalid, or "". Does not import the SDK, which takes seconds."""
    key = os.environ.get("TINKER_API_KEY", "")
    if os.environ.get("TINKER_CREDENTIAL_CMD"):
        return ""
    if key:
        sound = key.startswith(("tml-", "eyJ"))
        return "" if sound else 'needs a key: TINKER_API_KEY does not look like one, it must start with "tml-".'
    # `tinker auth login` stores keys there; the SDK decides whether one of them is the default.
    stored = Path("~/.tinker/credentials.json").expanduser().is_file()
    return "" if stored else "needs a key, and TINKER_API_KEY is not set."


def has_wandb_key() -> bool:
    """Whether wandb has a key, or needs none. The key itself is not read."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared", "run"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    settings = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")) / "settings"
    netrc = Path(os.environ.get("NETRC", "~/.netrc"))
    return _holds(netrc, host) or any(_holds(file, "mode = ") for file in (settings, Path("wandb/settings")))


def _holds(path: Path, text: str) -> bool:
    try:
        return text in path.expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
