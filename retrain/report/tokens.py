"""The token microscope's numbers: what each token of a recorded completion was worth, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.analysis.replay import Method
from retrain.config import TrainConfig
from retrain.modeling.tokens import load_tokenizer, vocabulary_texts
from retrain.storage.recording import read_recordings
from retrain.types import BoolArray, Completion, FloatArray

Numbers = dict[str, Any]
DIGITS = 4


def token_numbers(
    log_dir: Path, config: TrainConfig, steps: Collection[int]
) -> Iterator[tuple[int, list[list[Numbers]]]]:
    """For each wanted step, the numbers of every completion of every group.

    The steps between are gone through as well: the SEPA schedule remembers all it has seen.
    """
    tokenizer = load_tokenizer(config.model.model)
    method = Method(config, vocabulary_texts(tokenizer))
    for step, groups in read_recordings(log_dir):
        if step > max(steps):
            return
        masks_PG = method.masks.of(groups)
        advantages = method.advantages(step, groups, masks_PG)
        if step not in steps:
            continue
        rows_PG: list[list[Numbers]] = []
        at = 0
        for group, masks_G in zip(groups, masks_PG, strict=True):
            rows_PG.append([])
            for completion, mask_T in zip(group.completions_G, masks_G, strict=True):
                count = len(completion.token_ids_T)
                texts = tokenizer.batch_decode([[token] for token in completion.token_ids_T])
                rows_PG[-1].append(_numbers(completion, texts, mask_T, advantages[at : at + count]))
                at += count
        yield step, rows_PG


def _numbers(completion: Completion, texts: Sequence[str], mask_T: BoolArray, advantages_T: FloatArray) -> Numbers:
    numbers: Numbers = {
        "text": texts,
        "surprisal": _rounded(-completion.logprobs_T),
        "planning": mask_T.astype(int).tolist(),
        "advantage": _rounded(advantages_T),
    }
    if completion.entropies_T is not None:
        numbers["entropy"] = _rounded(completion.entropies_T)
    if completion.sampled_T is not None:
        numbers["sampled"] = completion.sampled_T.astype(int).tolist()
    return numbers


def _rounded(values: FloatArray) -> list[float]:
    return [float(value) for value in np.round(values.astype(np.float64), DIGITS)]
