"""The slow, obvious version of sampling: the whole sequence through Hugging Face's own model for every token."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoModelForCausalLM

from retrain.modeling.policy import Policy
from retrain.types import IntArray, Sampling

Floats = NDArray[np.float64]


def plain_model(model: Path, policy: Policy, folder: Path) -> torch.nn.Module:
    """The same weights, base and adapter, as Hugging Face and PEFT load and run them."""
    policy.save_adapter(folder)
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(base, str(folder)).eval()


@torch.no_grad()
def plain_logits(model: torch.nn.Module, prompt: IntArray, completion: IntArray) -> Floats:
    """The logits that each completion token is drawn from, (tokens, vocabulary)."""
    ids = torch.as_tensor(np.concatenate([prompt, completion]))[None]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return logits[len(prompt) - 1 : -1].double().numpy()


def plain_distribution(logits: Floats, before: IntArray, sampling: Sampling) -> Floats:
    """Probabilities of one token: penalty, temperature, then top-k, top-p and min-p, each renormalized."""
    logits = logits.copy()
    for token in set(before.tolist()):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits = logits / sampling.temperature
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    if sampling.top_k:
        probabilities[order[sampling.top_k :]] = 0.0
        probabilities /= probabilities.sum()
    mass, kept = 0.0, []
    for token in order:
        if mass >= sampling.top_p:
            break
        kept.append(token)
        mass += probabilities[token]
    probabilities[np.setdiff1d(order, kept)] = 0.0
    probabilities /= probabilities.sum()
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0.0
    return probabilities / probabilities.sum()


def plain_distributions(
    model: torch.nn.Module, prompt: IntArray, completion: IntArray, sampling: Sampling
) -> list[Floats]:
    logits = plain_logits(model, prompt, completion)
    sequence = np.concatenate([prompt, completion])
    return [plain_distribution(row, sequence[: len(prompt) + at], sampling) for at, row in enumerate(logits)]
