"""How the objectives of tokens are averaged over a step: a weight for each token, and a denominator for their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.losses.batch import TokenBatch


class Average(Protocol):
    """An average over the tokens of a step, which is computed in micro-batches."""

    def weights(self, batch: TokenBatch) -> Tensor:
        """The weight of each token in the sum."""
        ...

    def denominator(self, tokens: int, rows: int, max_tokens: int) -> float:
        """The divisor of the sum, from the numbers of tokens and rows of the step and `[training] max_tokens`."""
        ...


class TokenMean:
    """The mean over all tokens of a step."""

    def weights(self, batch: TokenBatch) -> Tensor:
        """1 for each token that takes part."""
        return batch.mask

    def denominator(self, tokens: int, rows: int, max_tokens: int) -> float:
        """The number of tokens."""
        return float(max(tokens, 1))


class SequenceMean:
    """The mean over the tokens of each sequence, then over sequences (GRPO, arXiv 2402.03300)."""

    def weights(self, batch: TokenBatch) -> Tensor:
        """The reciprocal of the number of tokens in the sequence."""
        return batch.mask / batch.per_token(batch.row_counts())

    def denominator(self, tokens: int, rows: int, max_tokens: int) -> float:
        """The number of sequences."""
        return float(max(rows, 1))


class ConstantLength:
    """The sum over tokens over a constant, so that long answers are not discounted (Dr. GRPO, arXiv 2503.20783)."""

    def weights(self, batch: TokenBatch) -> Tensor:
        """1 for each token that takes part."""
        return batch.mask

    def denominator(self, tokens: int, rows: int, max_tokens: int) -> float:
        """The maximum number of tokens."""
        return float(rows * max_tokens)


TOKEN_MEAN, SEQUENCE_MEAN, CONSTANT_LENGTH = TokenMean(), SequenceMean(), ConstantLength()
