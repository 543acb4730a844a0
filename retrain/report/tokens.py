"""Token data of recorded completions: surprisal, entropy, planning mask and advantage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from retrain.analysis.replay import Method, read_lambda
from retrain.analysis.runs import read_rows
from retrain.config import TrainConfig
from retrain.modeling.tokens import load_tokenizer, vocabulary_texts
from retrain.storage.logs import METRICS
from retrain.storage.recording import read_recordings
from retrain.types import BoolArray, Completion, FloatArray, JsonObject

TokenData = JsonObject
DIGITS = 4


def token_data(
    log_dir: Path, config: TrainConfig, steps: Collection[int]
) -> Iterator[tuple[int, list[list[TokenData]]]]:
    """For each given step, the token data of every completion of every group.

    Steps in between are processed as well, because the SEPA schedule depends on them where lambda was not logged.
    """
    tokenizer = load_tokenizer(config.model.model)
    log, _ = read_rows(log_dir / METRICS)
    method = Method(config, vocabulary_texts(tokenizer), log)
    for step, groups in read_recordings(log_dir):
        if step > max(steps):
            return
        masks_PG = method.masks.of(groups)
        advantages = method.advantages(step, groups, masks_PG, read_lambda(log, step))
        if step not in steps:
            continue
        rows_PG: list[list[TokenData]] = []
        at = 0
        for group, masks_G in zip(groups, masks_PG, strict=True):
            rows_PG.append([])
            for completion, mask_T in zip(group.completions_G, masks_G, strict=True):
                count = len(completion.token_ids_T)
                texts = tokenizer.batch_decode([[token] for token in completion.token_ids_T])
                rows_PG[-1].append(_token_data(completion, texts, mask_T, advantages[at : at + count]))
                at += count
        yield step, rows_PG


def _token_data(completion: Completion, texts: Sequence[str], mask_T: BoolArray, advantages_T: FloatArray) -> TokenData:
    data: TokenData = {
        "text": texts,
        "surprisal": _rounded(-completion.logprobs_T),
        "planning": mask_T.astype(int).tolist(),
        "advantage": _rounded(advantages_T),
    }
    if completion.entropies_T is not None:
        data["entropy"] = _rounded(completion.entropies_T)
    if completion.sampled_T is not None:
        data["sampled"] = completion.sampled_T.astype(int).tolist()
    return data


def _rounded(values: FloatArray) -> list[float]:
    return [float(value) for value in np.round(values.astype(np.float64), DIGITS)]
