"""Checks of values that were read from a quantized checkpoint: floats, float codes, scales."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import torch
from torch import fx, nn

from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.numerics.codec import decode
from quark.torch.numerics.finite import check_finite, is_finite
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.tensor_names import PARAMETERS, SHORT_NAMES
from quark.torch.quantization.nn.attention import PROBABILITIES
from quark.torch.quantization.nn.packed import PackedLayer
from quark.torch.quantization.nn.quantizer import TensorQuantizer


def check_values(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Check the values of packed layers, and that all other parameters in float are finite.

    See ``check_layer_values``. Tensors on the meta device are left out.

    Args:
        modules: Modules by name. Those inside of a packed layer belong to it.

    Raises:
        ValueError: A value is not sound. The message names its tensor.
    """
    for name, module in modules:
        if isinstance(module, PackedLayer):
            check_layer_values(module, name)
            continue
        for parameter_name, parameter in module.named_parameters(name, recurse=False):
            if not parameter.is_meta:
                check_finite(parameter_name, parameter)
        probabilities = module._modules.get(PROBABILITIES)
        if isinstance(probabilities, TensorQuantizer):
            _check_probabilities(probabilities.scale, name)


def check_graph_values(graph: fx.GraphModule) -> None:
    """Check the values of a graph that was read from an archive: weights, scales, factors.

    Parameters and scales are finite, and other buffers are no NaN: masks may hold infinity. Numbers
    by which the graph multiplies are finite: they are the scales of integers.

    Args:
        graph: The graph, in operators of torch and of this package.

    Raises:
        ValueError: A value is not sound. The message names its tensor or node.
    """
    for name, parameter in graph.named_parameters():
        check_finite(name, parameter)
    for name, buffer in graph.named_buffers():
        is_scale = name.rpartition(".")[2].startswith("scale")
        is_bad = not is_finite(buffer) if is_scale else bool(buffer.isnan().any())
        if is_bad:
            raise ValueError(
                f"{name} has NaN or infinite values: the archive is damaged. Export it again."
            )
    for node in graph.graph.nodes:
        is_product = node.target is torch.ops.aten.mul.Tensor
        if is_product and not all(isfinite(x) for x in node.args if isinstance(x, float)):
            raise ValueError(
                f"{node.name} multiplies by {node.args[1]}, expected a finite scale: the archive "
                "is damaged. Export it again."
            )


def _check_probabilities(scale: torch.Tensor | None, name: str) -> None:
    """Check the scale of the probabilities of an attention module.

    Raises:
        ValueError: It is not positive and finite.
    """
    if scale is not None and not scale.is_meta and not (scale.isfinite() & (scale > 0)).all():
        raise ValueError(
            f"{name}.prob_output_scale is {float(scale)}, expected a positive number: the "
            "checkpoint is damaged. Export it again."
        )


def check_layer_values(layer: PackedLayer, name: str) -> None:
    """Check that the scales, floats and float codes of a packed layer are sound.

    Scales are finite and positive. Only weights in integers and in tables may have scales that are
    zero or negative: the blocks of GGUF files do. Everything else in float is finite: zero points,
    parameters, factors and rotations of inputs. No code is NaN or infinite, such as 0x7F of E4M3.

    Args:
        layer: The layer.
        name: Its name, for the message.

    Raises:
        ValueError: A value is not sound. The message names its tensor.
    """
    _check_layer_scales(layer, name)
    for part, tensor in layer.state_dict(keep_vars=True).items():
        if tensor.is_meta or "_quantizer." in part:
            continue
        if part in layer.packed and not is_finite(tensor):
            raise ValueError(
                f"{name}.{part} has NaN or infinity among its codes: the checkpoint is damaged. "
                "Export it again."
            )
        check_finite(f"{name}.{part}", tensor)


def _check_layer_scales(layer: PackedLayer, name: str) -> None:
    for tensor, spec in layer.quant_config.specs():
        short = SHORT_NAMES[tensor]
        quantizer = getattr(layer, f"{short}_quantizer")
        if quantizer is None:
            continue
        may_be_signed = tensor in PARAMETERS and spec.fmt.takes_signed_scales
        for part, scale in (
            ("scale", quantizer.scale),
            ("scale_2", getattr(layer, f"{short}_scale_2")),
        ):
            if scale is None or scale.is_meta:
                continue
            if isinstance(layer.layout, PackedLayout):
                scale = layer.layout.biased_exponents(spec, scale)
            values = _scale_values(scale, quantizer.scheme)
            sound = values.isfinite() if may_be_signed else values.isfinite() & (values > 0)
            if not sound.all():
                worst = float(values[~sound].flatten()[0])
                raise ValueError(
                    f"{name}.{short}_{part}: {int((~sound).sum())} of {values.numel()} scales of "
                    f"its {tensor} are not sound, such as {worst}: the checkpoint is damaged. "
                    "Export it again."
                )
        _check_zero_point(quantizer.zero_point, f"{name}.{short}_zero_point")


def _check_zero_point(zero_point: torch.Tensor | None, name: str) -> None:
    """Check that float zero points are finite.

    Raises:
        ValueError: One is not. The message names it.
    """
    if zero_point is None or zero_point.is_meta or not zero_point.is_floating_point():
        return
    if not zero_point.isfinite().all():
        raise ValueError(
            f"{name}: {int((~zero_point.isfinite()).sum())} of {zero_point.numel()} zero points "
            "are not finite: the checkpoint is damaged. Export it again."
        )


def _scale_values(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return stored scales in float32, and stored exponents as 1, or NaN for the byte 255."""
    if scale.is_floating_point():
        return scale.float()
    if scheme.shares_exponents:
        exponents = scale[..., 0] if scheme.fmt.sub_block else scale  # shifts follow, any bits
        values = torch.ones(exponents.shape, device=scale.device, dtype=torch.float32)
        return values.masked_fill(exponents == 255, torch.nan)
    if scheme.scale.fmt is not None:
        return decode(scale, scheme.scale.fmt)
    return torch.ones(scale.shape, device=scale.device, dtype=torch.float32)
