"""Credit assignment: from the rewards of a group to one advantage per token."""

from retrain.advantages.episode import AdvantageFn, grpo, maxrl
from retrain.advantages.method import (
    GTPO,
    GTPO_HICRA,
    GTPO_SEPA,
    NONE,
    AlgorithmContext,
    TransformContext,
    TransformSpec,
)
from retrain.advantages.pipeline import AdvantageResult, Credit, CreditAssigner, compute_advantages
from retrain.advantages.uncertainty import (
    Uncertainty,
    UncertaintyContext,
    predictive_variance,
    shannon_entropy,
    surprisal,
)

__all__ = [
    "GTPO",
    "GTPO_HICRA",
    "GTPO_SEPA",
    "NONE",
    "AdvantageFn",
    "AdvantageResult",
    "AlgorithmContext",
    "Credit",
    "CreditAssigner",
    "TransformContext",
    "TransformSpec",
    "Uncertainty",
    "UncertaintyContext",
    "compute_advantages",
    "grpo",
    "maxrl",
    "predictive_variance",
    "shannon_entropy",
    "surprisal",
]
