"""Rotations of the inputs of layers in each forward pass."""

from __future__ import annotations

import fnmatch
import math

import torch

from quark.torch.algorithm.layer_inputs import first_readers
from quark.torch.algorithm.layers import weight_matrix
from quark.torch.algorithm.smoothing import centred, observe_ranges, smoothing_factors
from quark.torch.graph.residency import resident
from quark.torch.graph.structure import ResidualStream
from quark.torch.numerics.hadamard import hadamard, largest_order
from quark.torch.pipeline.accumulators import ChannelRange
from quark.torch.pipeline.context import Context
from quark.torch.quantization.config.algo import RotationConfig

PRESCALE_ALPHA = 0.5  # share of the difficulty that factors move from inputs into weights


def named_layers(context: Context, options: RotationConfig) -> list[str]:
    """Return the layers in ``online_rotation_layers``, names and patterns, each once."""
    online = options.online_config
    linear = [name for name, layer in context.layers.items() if layer.is_linear]
    names: list[str] = []
    for given in (online.online_rotation_layers or ()) if online else ():
        is_name = given in context.layers
        matches = [given] if is_name else [n for n in linear if fnmatch.fnmatchcase(n, given)]
        if not matches:
            raise ValueError(
                f"rotation: online_rotation_layers has {given!r}, which is not a quantized layer."
            )
        names += matches
    return list(dict.fromkeys(names))


def select_online_layers(
    context: Context, options: RotationConfig, stream: ResidualStream
) -> list[str]:
    """Return the quantized layers whose inputs are rotated online: by R4, and by an online R1."""
    readers = stream.readers if options.r1 and options.online_r1_rotation else ()
    names = [weight.parameter.removesuffix(".weight") for weight in readers]
    return [
        n for n in [*names, *(stream.down_projections if options.r4 else ())] if n in context.layers
    ]


def choose_online_size(context: Context, options: RotationConfig, names: list[str]) -> int:
    """Return the size of all online rotations; a checkpoint stores only one."""
    widths = {name: context.layers[name].input_width for name in names}
    size = options.rotation_size or largest_order(math.gcd(*widths.values())) if names else 1
    for name, width in widths.items():
        if width % size:
            raise ValueError(
                f"rotation: rotation_size={size} does not divide the {width} inputs of {name}."
            )
    return size


def rotate_inputs(context: Context, names: list[str], size: int, scales: bool) -> None:
    """Rotate the inputs of layers online, after they are multiplied by factors if asked for.

    The factors are those of SmoothQuant with alpha = 0.5: rotations spread what is left of
    outliers over fewer channels. Layers that read the same tensor have the same.
    """
    factors: dict[str, torch.Tensor] = {}
    first = first_readers(names, context) if scales and names else {}
    if first:
        ranges = observe_ranges(context, dict.fromkeys(first.values()))
        for reader in dict.fromkeys(first.values()):
            readers = [name for name in names if first[name] == reader]
            factors[reader] = _divisors(context, readers, ranges[reader])
    for name in names:
        layer = context.layers[name]
        with resident(context.model, name):
            if scales:
                layer.prescale_input(1 / factors[first[name]])
            layer.rotate_input(hadamard(size))


def _divisors(context: Context, names: list[str], inputs: ChannelRange) -> torch.Tensor:
    """Return the divisors of the inputs of layers that read the same tensor, (inputs,)."""
    weights = []
    for name in names:
        with resident(context.model, name):
            weights.append(weight_matrix(context.layers[name]).abs().amax(0))
    largest = torch.stack(weights).amax(0)
    if inputs.lo is None:  # experts without tokens
        return torch.ones_like(largest)
    factors = smoothing_factors(inputs.amax, largest, PRESCALE_ALPHA, 0.0)
    return centred(factors, inputs.amax > 0)
