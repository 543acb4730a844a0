"""Whether a YAML run can have its model and data, found out before TRL is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from retrain.checks.preflight import find_missing_model, is_offline, use_cache_if_unreachable
from retrain.config.schema import Data
from retrain.data import build_source
from retrain.data.hub import FromHub, is_on_hub_only
from retrain.errors import ConfigError, ConfigIssue
from retrain.grpo.settings import OWN_SETS, RunSettings
from retrain.modeling.files import find_model


def check_sources(run: RunSettings, log: Callable[[str], None]) -> None:
    """Raise if the model or the data is neither on this machine nor to be had.

    If the Hub cannot be reached, only its cache is used: its libraries would retry for a minute.
    """
    issues = tuple(_find_issues(run))
    from_hub = find_model(run.model_name_or_path).found in ("cache", "download") or bool(_dataset_of_hub(run))
    if not issues and from_hub and use_cache_if_unreachable(log):
        issues = tuple(_find_issues(run))
    if issues:
        raise ConfigError("this configuration cannot be run here:", issues)


def _find_issues(run: RunSettings) -> Iterator[ConfigIssue]:
    yield from find_missing_model("model_name_or_path", run.model_name_or_path)
    dataset = _dataset_of_hub(run)
    if dataset and is_offline() and is_on_hub_only(dataset):
        yield ConfigIssue(
            "dataset_id_or_path",
            f"= {run.dataset_id_or_path!r}: no such folder, {dataset} is not in the cache of the Hugging Face Hub, and "
            "the Hub cannot be reached.",
            "Try: write the rows to a file, one JSON object per line: dataset_id_or_path=rows.jsonl",
        )


def _dataset_of_hub(run: RunSettings) -> str:
    """The id of the dataset, or "" if the data are a file, a folder or generated."""
    name = run.dataset_id_or_path
    if name not in OWN_SETS:
        return "" if Path(name).expanduser().exists() else name
    source = build_source(Data(source=name))
    return source.dataset if isinstance(source, FromHub) else ""
