"""LoRA-Squeeze (arXiv 2602.10993): find the rank that a trained adapter needs, and compress it to that rank."""

from retrain.squeeze.analyze import Analysis, RankVariance, analyze_adapter
from retrain.squeeze.compress import compress_adapter
from retrain.squeeze.run import squeeze

__all__ = ["Analysis", "RankVariance", "analyze_adapter", "compress_adapter", "squeeze"]
