"""The in-process engine."""

from retrain.inference_engine.pytorch.engine import PyTorchEngine

__all__ = ["PyTorchEngine"]
