"""The in-process engine."""

from retrain.inference_engine.pytorch.engine import PyTorchEngine, ServingEngine, build

__all__ = ["PyTorchEngine", "ServingEngine", "build"]
