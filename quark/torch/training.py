"""Training of quantized models: ranges, batch norms, and a loss against the float model.

``ModelQuantizer.quantize_model`` makes a model that trains with any optimizer. Gradients pass
through rounding unchanged (Bengio et al. 2013). In training mode the scales of weights follow the
weights, and static ranges of activations follow moving averages. ``ModelQuantizer.freeze`` ends the
training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from quark.torch.quantization.config.value_types import check_types
from quark.torch.quantization.graph_mode.edges import edge_quantizers
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.following_range import AVERAGING_CONSTANT
from quark.torch.quantization.nn.learned_range import LearnedRangeQuantizer
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.quantization.preparation import quantized_layers
from quark.torch.quantization.trained_ranges import check_started, fix_ranges


def follow_ranges(
    model: nn.Module, steps: int | None = None, averaging_constant: float = AVERAGING_CONSTANT
) -> None:
    """Let ranges follow their tensors in training mode, also after ``freeze_ranges``.

    Ranges follow without this call too; it changes how.

    Args:
        model: A quantized model that is not frozen.
        steps: Number of forward passes after which ranges of activations stay as they are; None
            for no limit. Scales of weights always follow the weights.
        averaging_constant: Weight of a new tensor in the moving averages, above 0, at most 1.

    Raises:
        TypeError: ``steps`` is no integer, or ``averaging_constant`` no number.
        ValueError: The model has no layer that can train, or a value is out of range.
    """
    check_types(int | None, steps=steps)
    check_types(float, averaging_constant=averaging_constant)
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}: give a positive number, or None for no limit.")
    if not 0 < averaging_constant <= 1:
        raise ValueError(f"averaging_constant={averaging_constant}: give a number in (0, 1].")
    for quantizer in _quantizers(model):
        quantizer.is_fixed = False
        quantizer.last_update, quantizer.averaging_constant = steps, averaging_constant
        quantizer.requires_grad_(True)


def freeze_ranges(model: nn.Module) -> None:
    """Let all ranges stay as they are, while weights train on.

    Layers that share a scale, by ``shared_scale_groups`` and such options, get the common one. Call
    this some hundred steps before the end, so that weights adapt to the final ranges.

    Args:
        model: A quantized model that is not frozen.

    Raises:
        ValueError: The model has no layer that can train, or a trained range has not started.
    """
    _quantizers(model)
    check_started(dict(quantized_layers(model)))
    fix_ranges(model)
    for quantizer in edge_quantizers(model).values():
        quantizer.fix()


def range_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained ranges of a model, for a learning rate of their own and no weight decay.

    They are step sizes (LSQ) or logarithms of thresholds to the base 2 (TQT), in the order of
    ``model.parameters()``.
    """
    return [m.learned_range for m in model.modules() if isinstance(m, LearnedRangeQuantizer)]


def freeze_batch_norm(model: nn.Module) -> None:
    """Let batch norms use and keep their running statistics, also in training mode.

    Their factors and biases train on. Call this in the last epochs: inference uses the running
    statistics, and quantized weights adapt to them.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            module.eval()
            if _keep_statistics not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_keep_statistics)


def unfreeze(model: nn.Module) -> None:
    """Let layers train whose weights an algorithm or ``ModelQuantizer.freeze`` has rounded.

    Training starts from the quantized values. Scales of weights stay as they are, unless they are
    trained themselves or ``follow_ranges`` is called.

    Args:
        model: A model from ``quantize_model``.

    Raises:
        ValueError: No layer is frozen, or the rounded values of a layer are not those that its
            scales give, so that training would not start from them.
    """
    layers = {name: layer for name, layer in quantized_layers(model) if layer.frozen}
    if not layers:
        raise ValueError("No layer is frozen: the model trains already.")
    for name, layer in layers.items():
        _check_values(name, layer)
    for layer in layers.values():
        layer.frozen = False
        for quantizer in layer.quantizers().values():
            quantizer.is_fixed = False
            quantizer.requires_grad_(True)
        for tensor, quantizer in layer.parameter_quantizers().items():
            quantizer.is_fixed = not isinstance(quantizer, LearnedRangeQuantizer)
            getattr(layer, tensor).requires_grad_(True)
    for quantizer in edge_quantizers(model).values():
        quantizer.is_fixed = False
        quantizer.requires_grad_(True)


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    temperature: float = 1.0,
    mask: torch.Tensor | None = None,
    hidden_states: Sequence[torch.Tensor] | None = None,
    teacher_hidden_states: Sequence[torch.Tensor] | None = None,
    hidden_weight: float = 1.0,
) -> torch.Tensor:
    """Return the divergence of predictions from those of the float model, [] float32.

    The mean over positions of KL(softmax(teacher / T) || softmax(student / T)) * T² (Hinton et al.
    2015), plus ``hidden_weight`` times the mean squared difference of hidden states. No gradient
    goes to the teacher.

    Args:
        logits: (..., classes) of the quantized model.
        teacher_logits: Likewise, of the float model.
        temperature: T, above 0.
        mask: (...) bool, positions that count; None for all. Example: ``labels != -100``.
        hidden_states: (..., width) of some layers of the quantized model, or None.
        teacher_hidden_states: Likewise, of the float model.
        hidden_weight: Weight of the hidden states.

    Raises:
        TypeError: ``temperature`` or ``hidden_weight`` is no number.
        ValueError: Shapes differ, or the temperature is not positive.
    """
    check_types(float, temperature=temperature, hidden_weight=hidden_weight)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: give a positive number.")
    rows = _masked(logits, mask, "mask")
    target = _masked(teacher_logits.detach(), mask, "mask")
    _check_alike("teacher_logits", logits, teacher_logits)
    student, teacher = (F.log_softmax(x.float() / temperature, -1) for x in (rows, target))
    total = F.kl_div(student, teacher, reduction="sum", log_target=True)
    loss = total * (temperature**2 / max(1, len(rows)))
    pairs = list(_pairs(hidden_states, teacher_hidden_states))
    for own, other in pairs:
        _check_alike("teacher_hidden_states", own, other)
        own, other = _masked(own, mask, "mask"), _masked(other.detach(), mask, "mask")
        squares = F.mse_loss(own.float(), other.float(), reduction="sum")
        loss = loss + squares * (hidden_weight / len(pairs) / max(1, own.numel()))
    return loss


def _quantizers(model: nn.Module) -> list[TensorQuantizer]:
    """Return the quantizers of layers that can train, and of the edges of a graph.

    Raises:
        ValueError: There is none.
    """
    layers = [layer for _, layer in quantized_layers(model) if not layer.frozen]
    if not layers:
        raise ValueError(
            "No layer can train: call ModelQuantizer.quantize_model first, or "
            "quark.torch.training.unfreeze for a model that is frozen."
        )
    quantizers = [q for layer in layers for q in layer.quantizers().values()]
    return [*quantizers, *edge_quantizers(model).values()]


def _check_values(name: str, layer: FakeQuantizedLayer) -> None:
    """Check that the values of a frozen layer are those that its quantizers give them.

    Raises:
        ValueError: They are not.
    """
    for tensor, quantizer in layer.parameter_quantizers().items():
        value = getattr(layer, tensor).detach()
        again = quantizer.freeze_(value.clone())
        if not torch.allclose(again.float(), value.float(), rtol=2**-7, atol=0):
            raise ValueError(
                f"{name}.{tensor} cannot train: rounding it again changes its values. Export the "
                "model, load it with dequantize=True, and quantize that."
            )


def _keep_statistics(module: nn.Module, args: object) -> None:
    module.training = False


def _masked(x: torch.Tensor, mask: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return the rows (positions, width) of a tensor that count."""
    if mask is None:
        return x.flatten(0, -2)
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"{name}: expected {tuple(x.shape[:-1])}, got {tuple(mask.shape)}.")
    return x[mask.bool()]


def _check_alike(name: str, own: torch.Tensor, other: torch.Tensor) -> None:
    if own.shape != other.shape:
        raise ValueError(f"{name}: expected {tuple(own.shape)}, got {tuple(other.shape)}.")


def _pairs(
    own: Sequence[torch.Tensor] | None, other: Sequence[torch.Tensor] | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if (own is None) != (other is None) or len(own or ()) != len(other or ()):
        raise ValueError("hidden_states and teacher_hidden_states: give as many of both.")
    yield from zip(own or (), other or (), strict=True)
