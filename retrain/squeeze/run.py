"""Runs a [squeeze] table: fetch, analyze, print, compress. Campaigns call it after their first run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.backends.tinker.download import fetch_adapter
from retrain.config.schema import Squeeze
from retrain.errors import ConfigError
from retrain.runtime.text import plural
from retrain.squeeze.adapter import Adapter
from retrain.squeeze.analyze import Analysis, analyze_adapter, choose_ranks
from retrain.squeeze.compress import check_rank, check_target, compress_adapter

REMOTE = "tinker://"


def squeeze(settings: Squeeze, log: Callable[[str], None], trained_rank: int = 0, base_url: str = "") -> Analysis:
    """Analyze the adapter of a [squeeze] table, and compress it where the table names an output.

    `trained_rank` is the rank of the configuration; a note is printed if the adapter's rank differs. `base_url` is the
    service of a `tinker://` path; empty uses the SDK's default.
    """
    if not settings.adapter_path:
        raise ConfigError(
            '[squeeze] adapter_path is empty.  Try: adapter_path = "logs/train/checkpoints/step_000020/adapter"'
        )
    with local_folder(settings.adapter_path, base_url) as folder:
        if settings.output_path:
            check_target(folder, Path(settings.output_path).expanduser())
        with Adapter(folder) as adapter:
            check_ranks(settings, adapter.rank)
        analysis = analyze_adapter(folder, settings.target_ranks, settings.min_variance_retention, settings.device)
        if not settings.source_rank and trained_rank and trained_rank != analysis.source_rank:
            log(f"Note: the adapter has rank {analysis.source_rank}, while [model] lora_rank is {trained_rank}.")
        log(f"{settings.adapter_path}: {plural(analysis.layers, 'layer')}, rank {analysis.source_rank}")
        if analysis.untrained:
            ignored = plural(len(analysis.untrained), "layer")
            log(f"Ignored {ignored} with a zero update, such as {analysis.untrained[0]}.")
        log(analysis.table())
        kept = 100 * settings.min_variance_retention
        if all(row.mean < settings.min_variance_retention for row in analysis.ranks):
            log(f"No evaluated rank keeps {kept:g}% of the variance, so rank {analysis.source_rank} is recommended.")
        else:
            log(f"Recommended rank: {analysis.recommended_rank} (keeps at least {kept:g}% of the variance)")
        if settings.output_path:
            rank = settings.compress_to or analysis.recommended_rank
            written = compress_adapter(folder, settings.output_path, rank, settings.device)
            log(f"Wrote the adapter at rank {rank} to {written}")
    return analysis


def check_ranks(settings: Squeeze, found: int) -> None:
    """Raise for ranks that an adapter of the rank `found` cannot have."""
    if settings.source_rank and settings.source_rank != found:
        raise ConfigError(f"[squeeze] source_rank = {settings.source_rank}, but the adapter has rank {found}.")
    choose_ranks(settings.target_ranks, found)
    if settings.output_path and settings.compress_to:
        check_rank(settings.compress_to, found)


@contextmanager
def local_folder(adapter_path: str, base_url: str = "") -> Iterator[Path]:
    """The adapter's folder; one on Tinker is downloaded and deleted afterwards."""
    if not adapter_path.startswith(REMOTE):
        yield Path(adapter_path).expanduser()
        return
    with tempfile.TemporaryDirectory(prefix="retrain_squeeze_") as scratch:
        yield fetch_adapter(adapter_path, Path(scratch), base_url)
