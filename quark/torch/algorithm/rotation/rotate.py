"""Rotations that spread outliers: QuaRot (Ashkboos et al. 2024), SpinQuant (Liu et al. 2024).

R1 rotates the residual stream and R2 the values of each attention head, both within the weights.
R3 rotates queries and keys after rotary embedding, R4 the inputs of down projections, as they pass.
Where the stream is normalized by layer
norms, R1 keeps the mean: then LayerNorm(x R) = LayerNorm(x) R, and the architecture stays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import nn

from quark.torch.algorithm.rotation.config_file import written_stream
from quark.torch.algorithm.rotation.edits import STREAM, Turns, rotate_stream, rotate_values, untie
from quark.torch.graph.structure import ResidualStream
from quark.torch.numerics.hadamard import hadamard, largest_order, random_hadamard
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.quantization.config.algo import RotationConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.attention import key_routes

logger = logging.getLogger(__name__)

_SEED = 0


def check(options: RotationConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the options ask for what cannot be done.

    Raises:
        ValueError: Nothing is to be rotated, an option is not supported, or ``rotation_size`` is
            not the order of a Hadamard matrix.
    """
    online = options.online_config
    wanted = (options.r1, options.r2, options.r3, options.r4)
    if not (any(wanted) or (online and online.online_rotation_layers)):
        raise ValueError("rotation: nothing is to be rotated. Set r1, r2, r3 or r4.")
    if options.train_smooth or options.smooth_positions:
        raise ValueError("rotation: train_smooth is not supported. Use smoothing as well instead.")
    if online is not None and online.use_input_prescale:
        raise ValueError("rotation: use_input_prescale is not supported. Leave it out.")
    if options.rotation_size is not None:
        hadamard(options.rotation_size)


class _Plan(NamedTuple):
    """What is to be done.

    Attributes:
        stream: The residual stream, or None if no option asks for it.
        turns: Changes of its parameters.
        rotations: The rotations by name.
        online: Names of the layers whose inputs are rotated as they pass.
        size: Size of the rotation of these.
    """

    stream: ResidualStream | None
    turns: Turns
    rotations: dict[str, torch.Tensor]
    online: list[str]
    size: int


def resolve(context: Context, options: RotationConfig) -> Collection[str]:
    """Return the names of the layers whose inputs are to be rotated as they pass.

    Raises:
        ValueError: As of ``apply``.
    """
    return _plan(context, options).online


def apply(context: Context, options: RotationConfig) -> None:
    """Rotate a model in place. What it computes in float stays the same.

    Raises:
        ValueError: The model has a structure that cannot be rotated, or a size does not divide a
            width. The model is then unchanged.
    """
    plan = _plan(context, options)
    stream, rotations = plan.stream, plan.rotations
    if options.r3:
        _rotate_keys(context.model)
    if stream is not None and STREAM in rotations:
        untie(context.model, stream)
    for name in plan.online:
        context.layers[name].rotate_input(hadamard(plan.size))
    if options.trainable and stream is not None:
        from quark.torch.algorithm.rotation.spinquant import learn

        rotations = learn(context, plan.turns, rotations, _takes_mean(stream))
    plan.turns.apply_(context.model, rotations)


def _rotate_keys(model: nn.Module) -> None:
    """Rotate queries and keys where keys are quantized after rotary embedding."""
    routes = key_routes(model)
    for route in routes:
        route.rotates = True
    if not routes:
        logger.warning(
            "rotation: r3 is skipped. It rotates queries and keys after rotary embedding, where "
            "nothing is quantized: set kv_cache_post_rope=True and kv_cache_quant_config."
        )


def keeping_ones(rotation: torch.Tensor) -> torch.Tensor:
    """Return a rotation times the reflection that brings the vector of ones back to itself.

    Args:
        rotation: (n, n) int8 +-1 with orthogonal rows.

    Returns:
        (n, n) float64, orthogonal; its rows and columns sum to 1.
    """
    n = len(rotation)
    unit = rotation.double() / math.sqrt(n)
    apart = unit.sum(0) / math.sqrt(n) - 1 / math.sqrt(n)
    if float(apart.norm()) < 1e-12:
        return unit
    return unit - 2 * torch.outer(unit @ apart, apart) / apart.square().sum()


def _stream(context: Context, options: RotationConfig) -> ResidualStream:
    """Return the residual stream as the options name it, or as it was found."""
    if options.scaling_layers:
        return written_stream(context.model, options)
    found = context.structure
    if found.stream is not None:
        return found.stream
    if options.r1:
        raise ValueError(
            f"rotation: the stream of this model cannot be rotated: {found.obstacle}. Set r1=False "
            "for what else can be, or name its modules in scaling_layers if you know better."
        )
    return ResidualStream(0, (), (), (), (), (), "", False, found.values, found.downs)


def _plan(context: Context, options: RotationConfig) -> _Plan:
    """Return what is to be done, and change nothing.

    Raises:
        ValueError: It cannot be done.
    """
    online = _listed(context, options)
    is_read = options.r1 or options.r2 or (options.r4 and not online)
    stream = _stream(context, options) if is_read else None
    turns, rotations = Turns(), {}
    if stream is not None:
        rotations = _plan_stream(turns, context.model, stream, options)
        online = online or _online_layers(context, options, stream)
    for name in online:
        layer = context.layers[name]
        if not layer.is_linear or layer.input_rotation is not None or name in context.rotated:
            raise ValueError(
                f"rotation: the inputs of {name} cannot be rotated: only those of linear layers "
                "can, once."
            )
    return _Plan(stream, turns, rotations, online, _online_size(context, options, online))


def _plan_stream(
    turns: Turns, model: nn.Module, stream: ResidualStream, options: RotationConfig
) -> dict[str, torch.Tensor]:
    """Plan R1 and R2, and return the rotations."""
    generator = torch.Generator().manual_seed(_SEED)
    rotations: dict[str, torch.Tensor] = {}
    if options.r1 and not options.online_r1_rotation:
        rotations[STREAM] = _stream_rotation(stream, options, generator)
        rotate_stream(turns, model, stream)
    for heads in stream.values if options.r2 else ():
        name = f"values of {heads.block}"
        size = _size(heads.rows.shape[1], options)
        rotations[name] = _matrix(size, options.random_r2, generator)
        rotate_values(turns, heads, name)
    return rotations


def _takes_mean(stream: ResidualStream) -> bool:
    return any(norm.kind == "layer" for norm in stream.norms)


def _stream_rotation(
    stream: ResidualStream, options: RotationConfig, generator: torch.Generator
) -> torch.Tensor:
    size = options.rotation_size or largest_order(stream.size)
    if stream.size % size:
        raise ValueError(
            f"rotation: rotation_size={size} does not divide the width {stream.size} of the "
            "residual stream."
        )
    if _takes_mean(stream):
        return keeping_ones(_matrix(size, True, generator))
    return _matrix(size, options.random_r1, generator)


def _size(width: int, options: RotationConfig) -> int:
    """Return ``rotation_size`` where it divides a width, else the largest order that does."""
    size = options.rotation_size
    return size if size and width % size == 0 else largest_order(width)


def _matrix(size: int, is_random: bool, generator: torch.Generator) -> torch.Tensor:
    return random_hadamard(size, generator) if is_random else hadamard(size)


def _listed(context: Context, options: RotationConfig) -> list[str]:
    """Return the layers that the options name, whose inputs are rotated as they pass."""
    online = options.online_config
    names = list(online.online_rotation_layers or ()) if online else []
    for name in names:
        if name not in context.layers:
            raise ValueError(
                f"rotation: online_rotation_layers has {name!r}, which is no quantized layer."
            )
    return names


def _online_layers(context: Context, options: RotationConfig, stream: ResidualStream) -> list[str]:
    """Return the quantized layers whose inputs are rotated as they pass: R4, and R1 if online."""
    readers = stream.readers if options.r1 and options.online_r1_rotation else ()
    names = [weight.parameter.removesuffix(".weight") for weight in readers]
    return [n for n in [*names, *(stream.downs if options.r4 else ())] if n in context.layers]


def _online_size(context: Context, options: RotationConfig, names: list[str]) -> int:
    """Return the one size of all online rotations, which a checkpoint tells once."""
    widths = {name: context.layers[name].input_width for name in names}
    size = options.rotation_size or largest_order(math.gcd(*widths.values())) if names else 1
    for name, width in widths.items():
        if width % size:
            raise ValueError(
                f"rotation: rotation_size={size} does not divide the {width} inputs of {name}."
            )
    return size


ALGORITHM = Algorithm(check, apply, lambda options: bool(options.trainable), resolve)
