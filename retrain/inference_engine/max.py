"""The MAX engine: a client of `max serve`.

MAX in this process could not be trained with. In 26.7.0 offline inference is one private class, LLM in
max._entrypoints.llm: its generate() takes text and a length, gives text, and has no seed, temperature or adapter.
"""

from __future__ import annotations

import importlib.util

from retrain.config.schema import Inference
from retrain.errors import ConfigError
from retrain.inference_engine import Progress
from retrain.inference_engine.http.engine import HttpEngine
from retrain.inference_engine.http.servers import MAX
from retrain.modeling.policy import Policy
from retrain.modeling.tokens import Tokenizer


def build(policy: Policy, inference: Inference, tokenizer: Tokenizer, progress: Progress) -> HttpEngine:
    """A client of the servers at [inference] url, which MAX cannot do without."""
    if inference.url:
        return HttpEngine(MAX, policy, inference, tokenizer, progress)
    there = importlib.util.find_spec("max") is not None
    raise ConfigError(
        '[inference] engine = "max" without url would run MAX in this process, '
        + (
            "where its LLM class (checked in 26.7.0) takes text and gives text: no token ids, log-probs or adapters."
            if there
            else "and the package max is not installed here."
        )
        + '  Try: start `max serve` on a GPU and set url = "http://localhost:8000"'
    )
