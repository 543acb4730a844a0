"""The in-process engine."""

from retrain.inference_engine.pytorch.engine import PyTorchEngine, StreamingPyTorchEngine, build

__all__ = ["PyTorchEngine", "StreamingPyTorchEngine", "build"]
