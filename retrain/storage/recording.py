"""Recorded rollouts: completions and scores on disk, so that credit can be recomputed without sampling."""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from retrain.errors import CheckpointError
from retrain.storage.checkpoint import explain_write_error
from retrain.types import BoolArray, Completion, Example, Group, Score

FOLDER = "rollouts"


def write_recording(log_dir: Path, step: int, groups: Sequence[Group]) -> None:
    """Store a step as one compressed file of flat arrays with lengths."""
    completions = [completion for group in groups for completion in group.completions_G]
    texts = {
        "groups": [{"prompt": g.example.prompt, "reference": g.example.reference, "id": g.example.id} for g in groups],
        "texts": [completion.text for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "outcomes": [score.outcome for group in groups for score in group.scores_G],
    }
    arrays = {
        "group_sizes": np.array([len(group.completions_G) for group in groups]),
        "prompt_lengths": np.array([len(group.prompt_ids) for group in groups]),
        "prompt_ids": _joined([group.prompt_ids for group in groups], np.int32),
        "lengths": np.array([len(completion.token_ids_T) for completion in completions]),
        "token_ids": _joined([completion.token_ids_T for completion in completions], np.int32),
        "logprobs": _joined([completion.logprobs_T for completion in completions], np.float32),
        "rewards": np.array([score.value for group in groups for score in group.scores_G]),
        "meta": np.frombuffer(json.dumps(texts).encode(), dtype=np.uint8),
    }
    if all(completion.entropies_T is not None for completion in completions):
        arrays["entropies"] = _joined([c.entropies_T for c in completions if c.entropies_T is not None], np.float32)
    if any(completion.sampled_T is not None for completion in completions):
        arrays["sampled"] = _joined([_sampled(completion) for completion in completions], np.bool_)
    target = log_dir / FOLDER / f"step_{step:06d}.npz"
    draft = target.with_name(f".writing_{target.name}")
    try:
        target.parent.mkdir(exist_ok=True)
        np.savez_compressed(draft, allow_pickle=False, **arrays)
        os.replace(draft, target)
    except OSError as error:
        raise explain_write_error(error, target.parent) from error


def read_recordings(log_dir: Path) -> Iterator[tuple[int, list[Group]]]:
    """Every recorded step, in order."""
    for step, path in find_recordings(log_dir).items():
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                groups = _groups({name: arrays[name] for name in arrays.files})
        except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{path} is damaged ({error}).  Try: move it out of {path.parent}") from error
        yield step, groups


def find_recordings(log_dir: Path) -> dict[int, Path]:
    """The files of recorded steps, in order; other files in their folder are none of them."""
    named = ((re.fullmatch(r"step_([0-9]+)\.npz", path.name), path) for path in (log_dir / FOLDER).glob("step_*.npz"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def drop_recordings(log_dir: Path, step: int) -> None:
    """Delete the recordings of `step` and later steps, which a resume will rewrite."""
    for recorded, path in find_recordings(log_dir).items():
        if recorded >= step:
            path.unlink()


def _groups(arrays: dict[str, np.ndarray]) -> list[Group]:
    texts = json.loads(arrays["meta"].tobytes())
    ends = np.cumsum(arrays["lengths"])
    entropies, sampled = arrays.get("entropies"), arrays.get("sampled")
    completions = [
        Completion(
            token_ids_T=arrays["token_ids"][start:end].astype(np.int64),
            logprobs_T=arrays["logprobs"][start:end],
            text=text,
            finish_reason=reason,
            entropies_T=None if entropies is None else entropies[start:end],
            sampled_T=None if sampled is None else sampled[start:end],
        )
        for start, end, text, reason in zip(
            ends - arrays["lengths"], ends, texts["texts"], texts["finish_reasons"], strict=True
        )
    ]
    scores = [Score(float(v), outcome) for v, outcome in zip(arrays["rewards"], texts["outcomes"], strict=True)]
    prompts = np.split(arrays["prompt_ids"].astype(np.int64), np.cumsum(arrays["prompt_lengths"])[:-1])
    groups, at = [], 0
    for size, prompt_ids, entry in zip(arrays["group_sizes"], prompts, texts["groups"], strict=True):
        prompt = entry["prompt"] if isinstance(entry["prompt"], str) else tuple(entry["prompt"])
        example = Example(prompt, entry["reference"], entry["id"])
        groups.append(Group(example, prompt_ids, tuple(completions[at : at + size]), tuple(scores[at : at + size])))
        at += int(size)
    return groups


def _sampled(completion: Completion) -> BoolArray:
    if completion.sampled_T is not None:
        return completion.sampled_T
    return np.ones(len(completion.token_ids_T), dtype=np.bool_)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
