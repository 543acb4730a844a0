"""Rules about data sources and held-out evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator

from retrain.config.options import option_issue, options_by_path, values_of
from retrain.config.schema import AS_IN_TRAINING, TrainConfig
from retrain.config.toml import show_value
from retrain.errors import ConfigIssue
from retrain.plugins import REGISTRIES

SOURCES = REGISTRIES["data"]
_EXAMPLES = {"path": 'Try: path = "problems.{source}"', "id": 'Try: id = "openai/gsm8k"'}


def check_data_source(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Options that a source requires are set; an environment has its own problems."""
    if config.environment.provider:
        return
    values = values_of(config)
    for section, source in (("data", config.data.source), ("eval", config.eval.source)):
        for key in SOURCES.facts(source).requires:
            path = f"{section}.{key}"
            # Evaluation reads options that [eval] lacks from [data].
            if path in options_by_path() and not values[path]:
                text = f'is empty, but [{section}] source is "{source}".'
                yield option_issue(path, text, _EXAMPLES[key].format(source=source), (section,))


def check_eval_temperature(config: TrainConfig) -> Iterator[ConfigIssue]:
    """The only negative temperature is -1."""
    temperature = config.eval.temperature
    if temperature < 0 and temperature != AS_IN_TRAINING:
        text = f"must be -1 or at least 0, got {temperature}."
        yield option_issue("eval.temperature", text, "Try: temperature = -1.0")


def check_pass_at_k(config: TrainConfig) -> Iterator[ConfigIssue]:
    """pass@k needs at least k samples."""
    if config.eval.every and config.eval.k > config.eval.samples:
        yield option_issue(
            "eval.k",
            f"is {config.eval.k}, more than the {config.eval.samples} samples per problem.",
            f"Try: k = 0, or samples = {config.eval.k}",
            ("eval",),
        )


def check_greedy_samples(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Greedy decoding gives the same completion each time."""
    if config.eval.every and config.eval.temperature == 0 and config.eval.samples > 1:
        yield option_issue(
            "eval.samples",
            f"= {config.eval.samples} would repeat the same completion: [eval] temperature = 0 is greedy.",
            "Try: samples = 1, or temperature = -1.0 for that of training",
            ("eval",),
        )


def check_held_out_file(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A file has no splits, so evaluation needs another one."""
    source = config.data.source
    needs_file = "path" in SOURCES.facts(source).requires and not config.environment.provider
    if config.eval.every and not config.eval.source and needs_file and not config.eval.path:
        yield option_issue(
            "eval.path",
            f'is empty; with [data] source = "{source}" evaluation needs its own file.',
            f'Try: path = "held_out.{source}"',
            ("eval", "data"),
        )


def check_held_out_split(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Evaluation does not use the training problems."""
    data, held_out = config.data, config.eval
    if config.environment.provider:
        # Environments train on their split "train", whatever [data] says.
        if held_out.every and held_out.split == "train":
            text = '= "train" holds the problems that the environment trains on.'
            yield option_issue("eval.split", text, 'Try: split = "test"', ("eval", "environment"))
        return
    if not held_out.every or config.held_out_source != data.source:
        return
    # Without its own source or path, evaluation reads the file of [data], with another split.
    path = held_out.path if held_out.source or held_out.path else data.path
    is_same_file = not SOURCES.reads(data.source, "path") or _is_same_file(path, data.path)
    both_held_out = SOURCES.facts(data.source).two_splits and "train" not in (held_out.split, data.split)
    if not SOURCES.reads(data.source, "split"):
        # check_held_out_file reports an empty path.
        if held_out.path and is_same_file:
            yield option_issue(
                "eval.path", "is the file of [data] path.", f'Try: path = "held_out.{data.source}"', ("eval", "data")
            )
    elif is_same_file and (held_out.split == data.split or both_held_out):
        yield option_issue(
            "eval.split",
            f"= {show_value(held_out.split)} holds the problems of [data] split = {show_value(data.split)}.",
            'Try: split = "test"' if data.split == "train" else 'Try: [data] split = "train"',
            ("eval", "data"),
        )


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.realpath(os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))
    except (OSError, ValueError):
        return one == other  # not a valid file name, which is reported when it is read
