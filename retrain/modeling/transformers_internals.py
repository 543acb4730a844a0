"""APIs of transformers without a stability promise: every use of one is in this module. Tested with 5.22."""

from __future__ import annotations

from torch import nn

from retrain.errors import BackendError

TESTED = "5.22.2"

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError as error:
    raise BackendError(
        "this version of transformers has no modeling_layers.GradientCheckpointingLayer.  "
        f"Try: pip install transformers=={TESTED}"
    ) from error


def compilable_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that are compiled: those that the model lists as units, or else its decoder layers."""
    try:
        kinds = {str(name) for name in model._no_split_modules or ()}  # type: ignore[union-attr]
    except AttributeError:
        return decoder_layers(model)
    return [module for module in model.modules() if type(module).__name__ in kinds]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that support gradient checkpointing, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
