"""The end of training: ranges that followed a model take their final values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from quark.torch.quantization.calibration import (
    compute_parameter_scale,
    share_activation_scales,
    share_scales,
)
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.learned_range import LearnedRangeQuantizer
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.quantization.preparation import quantized_layers


def check_trained(layers: Mapping[str, FakeQuantizedLayer]) -> None:
    """Check that no layer trains, and that every trained range has a value.

    Args:
        layers: Quantized layers by name.

    Raises:
        ValueError: A layer that has trained is in training mode, or a trained range never started.
    """
    for name, layer in layers.items():
        quantizers = [] if layer.frozen else list(layer.quantizers().values())
        if any(q.is_following and _trains(q) for q in quantizers):
            raise ValueError(
                f"{name} is in training mode, in which its ranges still change: call "
                "ModelQuantizer.freeze(model.eval())."
            )
    check_started(layers)


def check_started(layers: Mapping[str, FakeQuantizedLayer]) -> None:
    """Check that every trained range has a value.

    Args:
        layers: Quantized layers by name.

    Raises:
        ValueError: A range never started.
    """
    idle = [
        f"{name}.{tensor}"
        for name, layer in layers.items()
        for tensor, quantizer in layer.quantizers().items()
        if isinstance(quantizer, LearnedRangeQuantizer) and not quantizer.has_range
    ]
    if idle:
        names = ", ".join(idle[:5]) + (" …" if len(idle) > 5 else "")
        raise ValueError(
            f"The trained ranges of {names} have no value: train with data that reaches these "
            "layers, pass a dataloader to quantize_model, or exclude them."
        )


@torch.no_grad()
def fix_ranges(model: nn.Module) -> None:
    """Give ranges that train their final values; from now on they stay as they are.

    The scales of weights that trained are computed from the weights once more. Layers that share a
    scale get the common one. Trained ranges take no gradient any more.
    """
    layers = {name: layer for name, layer in quantized_layers(model) if not layer.frozen}
    quantizers = [q for layer in layers.values() for q in layer.quantizers().values()]
    has_trained = any(map(_trains, quantizers))
    for name, layer in layers.items():
        for tensor, quantizer in layer.parameter_quantizers().items():
            if _trains(quantizer) and not isinstance(quantizer, LearnedRangeQuantizer):
                compute_parameter_scale(f"{name}.{tensor}", getattr(layer, tensor), quantizer)
    config = getattr(model, "quant_config", None)
    if has_trained and isinstance(config, Config):
        share_scales(layers, config, "weight")
        share_activation_scales(model, config)
    for quantizer in quantizers:
        quantizer.fix()


def _trains(quantizer: TensorQuantizer) -> bool:
    """Whether the range of a quantizer has changed, or may have, while the model trained."""
    is_learned = isinstance(quantizer, LearnedRangeQuantizer)
    return not quantizer.is_fixed and (is_learned or quantizer.has_updates)
