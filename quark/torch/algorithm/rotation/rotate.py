"""Rotations that spread outliers: QuaRot (Ashkboos et al. 2024), SpinQuant (Liu et al. 2024).

The rotations are those of SpinQuant, section 3.1:

- R1 rotates the residual stream, and R2 the values of each attention head. Both are merged into the
  weights.
- R3 rotates queries and keys after rotary embedding, and R4 the inputs of down projections. Both
  are computed online, in each forward pass.

If layer norms normalize the stream, R1 preserves the mean. Then LayerNorm(x R) = LayerNorm(x) R,
and the architecture stays the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import nn

from quark.torch.algorithm.rotation.config_file import stream_from_config
from quark.torch.algorithm.rotation.weight_edits import (
    STREAM,
    RotationEdits,
    add_stream_rotation,
    add_value_rotation,
    untie,
)
from quark.torch.graph.residency import residency_of, resident
from quark.torch.graph.structure import ROTATION, ResidualStream
from quark.torch.numerics.hadamard import hadamard, largest_order, random_hadamard
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.processes import describe, processes
from quark.torch.pipeline.shapes import FLOAT32, FLOAT64, BlockShape, DataShape, Work
from quark.torch.quantization.config.algo import RotationConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.attention import key_routes

logger = logging.getLogger(__name__)

_SEED = 0


def check(options: RotationConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the options contradict each other or are not supported.

    Raises:
        ValueError: No rotation is selected, an option is not supported, or ``rotation_size`` is
            not the order of a known Hadamard matrix.
    """
    online = options.online_config
    wanted = (options.r1, options.r2, options.r3, options.r4)
    if not (any(wanted) or (online and online.online_rotation_layers)):
        raise ValueError("rotation: no rotation is selected. Set r1, r2, r3 or r4.")
    if options.train_smooth or options.smooth_positions:
        raise ValueError(
            "rotation: train_smooth is not supported. Add smoothing to the algorithms instead."
        )
    if online is not None and online.use_input_prescale:
        raise ValueError("rotation: use_input_prescale is not supported. Leave it out.")
    if options.rotation_size is not None:
        hadamard(options.rotation_size)


class _Plan(NamedTuple):
    """The rotations of a model, before anything is changed.

    Attributes:
        stream: The residual stream, or None if no option needs it.
        edits: Edits of the parameters for R1 and R2.
        rotations: The rotations by name.
        online: Names of the layers whose inputs are rotated online.
        size: Size of the online rotations.
    """

    stream: ResidualStream | None
    edits: RotationEdits
    rotations: dict[str, torch.Tensor]
    online: list[str]
    size: int


def resolve(context: Context, options: RotationConfig) -> Collection[str]:
    """Return the names of the layers whose inputs ``apply`` will rotate online.

    Raises:
        ValueError: As in ``apply``.
    """
    if options.trainable and residency_of(context.model) is not None:
        raise ValueError(
            "rotation: trainable=True learns from the whole model, which must be in memory. "
            "Use fixed rotations, or load the model without max_memory (--max_memory)."
        )
    return _make_plan(context, options).online


def apply(context: Context, options: RotationConfig) -> None:
    """Rotate a model in place. In float it computes the same.

    Raises:
        ValueError: The structure of the model does not allow a rotation, or a size does not divide
            a width. The model is then unchanged.
    """
    plan = _make_plan(context, options)
    stream, rotations = plan.stream, plan.rotations
    if options.r3:
        _rotate_keys(context.model)
    if stream is not None and STREAM in rotations:
        untie(context.model, stream)
    for name in plan.online:
        with resident(context.model, name):
            context.layers[name].rotate_input(hadamard(plan.size))
    if options.trainable and stream is not None:
        from quark.torch.algorithm.rotation.spinquant import learn_rotations

        rotations = learn_rotations(context, plan.edits, rotations, _subtracts_mean(stream))
        rotations = _shared(rotations)
    plan.edits.apply_(context.model, rotations)


def _shared(rotations: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the rotations that the first process has learned; all learn on the whole data."""
    state = list(rotations.values())
    shared = processes().broadcast(state, describe(state), 0)
    return {n: r for n, r in zip(rotations, shared, strict=True) if r is not None}


def _rotate_keys(model: nn.Module) -> None:
    """Rotate queries and keys where keys are quantized after rotary embedding."""
    routes = key_routes(model)
    for route in routes:
        route.rotates = True
    if not routes:
        logger.warning(
            "rotation: r3 is skipped. It rotates queries and keys after rotary embedding, but "
            "nothing is quantized there: set kv_cache_post_rope=True and kv_cache_quant_config."
        )


def preserve_ones(rotation: torch.Tensor) -> torch.Tensor:
    """Return a rotation followed by a reflection, which together preserve the vector of ones.

    Args:
        rotation: (n, n) int8 +-1 with orthogonal rows.

    Returns:
        (n, n) float64, orthogonal; its rows and columns sum to 1.
    """
    n = len(rotation)
    unit = rotation.double() / math.sqrt(n)
    # With u = 1/√n · (1, …, 1), the Householder reflection along d = u R - u maps u R to u.
    # R preserves the mean of every vector then: the mean of x is x uᵀ / √n.
    difference = unit.sum(0) / math.sqrt(n) - 1 / math.sqrt(n)
    if float(difference.norm()) < 1e-12:
        return unit
    return unit - 2 * torch.outer(unit @ difference, difference) / difference.square().sum()


def _select_stream(context: Context, options: RotationConfig) -> ResidualStream:
    """Return the residual stream that the options name, or the discovered one."""
    if options.scaling_layers:
        return stream_from_config(context.model, options)
    structure = context.structure
    if structure.stream is not None:
        return structure.stream
    if options.r1:
        raise ValueError(
            f"rotation: the stream of this model cannot be rotated: {structure.obstacle}. Set "
            "r1=False to apply the other rotations, or name the modules of the stream in "
            "scaling_layers."
        )
    values, downs = structure.value_heads, structure.down_projections
    return ResidualStream(0, (), (), (), (), (), "", False, values, downs)


def _make_plan(context: Context, options: RotationConfig) -> _Plan:
    """Return the plan of all rotations; the model is unchanged.

    Raises:
        ValueError: As in ``apply``.
    """
    online = _check_named_layers(context, options)
    needs_stream = options.r1 or options.r2 or (options.r4 and not online)
    stream = _select_stream(context, options) if needs_stream else None
    edits, rotations = RotationEdits(), {}
    if stream is not None:
        rotations = _plan_merged_rotations(edits, context.model, stream, options)
        online = online or _select_online_layers(context, options, stream)
    for name in online:
        layer = context.layers[name]
        if not layer.is_linear or layer.input_rotation is not None or name in context.rotated:
            raise ValueError(
                f"rotation: the inputs of {name} cannot be rotated: it must be a linear layer "
                "whose inputs are not rotated yet."
            )
    return _Plan(stream, edits, rotations, online, _choose_online_size(context, options, online))


def _plan_merged_rotations(
    edits: RotationEdits, model: nn.Module, stream: ResidualStream, options: RotationConfig
) -> dict[str, torch.Tensor]:
    """Add the edits of R1 and R2, and return the rotations by name."""
    generator = torch.Generator().manual_seed(_SEED)
    rotations: dict[str, torch.Tensor] = {}
    if options.r1 and not options.online_r1_rotation:
        rotations[STREAM] = _make_stream_rotation(stream, options, generator)
        add_stream_rotation(edits, model, stream)
    for heads in stream.value_heads if options.r2 else ():
        name = f"values of {heads.block}"
        size = _choose_size(heads.rows.shape[1], options)
        rotations[name] = _make_hadamard(size, options.random_r2, generator)
        add_value_rotation(edits, heads, name)
    return rotations


def _subtracts_mean(stream: ResidualStream) -> bool:
    return any(norm.kind == "layer" for norm in stream.norms)


def _make_stream_rotation(
    stream: ResidualStream, options: RotationConfig, generator: torch.Generator
) -> torch.Tensor:
    size = options.rotation_size or largest_order(stream.size)
    if stream.size % size:
        raise ValueError(
            f"rotation: rotation_size={size} does not divide the width {stream.size} of the "
            "residual stream."
        )
    if _subtracts_mean(stream):
        return preserve_ones(_make_hadamard(size, True, generator))
    return _make_hadamard(size, options.random_r1, generator)


def _choose_size(width: int, options: RotationConfig) -> int:
    """Return ``rotation_size`` if it divides a width, else the largest Hadamard order that does."""
    size = options.rotation_size
    return size if size and width % size == 0 else largest_order(width)


def _make_hadamard(size: int, is_random: bool, generator: torch.Generator) -> torch.Tensor:
    return random_hadamard(size, generator) if is_random else hadamard(size)


def _check_named_layers(context: Context, options: RotationConfig) -> list[str]:
    """Return the layers in ``online_rotation_layers``."""
    online = options.online_config
    names = list(online.online_rotation_layers or ()) if online else []
    for name in names:
        if name not in context.layers:
            raise ValueError(
                f"rotation: online_rotation_layers has {name!r}, which is not a quantized layer."
            )
    return names


def _select_online_layers(
    context: Context, options: RotationConfig, stream: ResidualStream
) -> list[str]:
    """Return the quantized layers whose inputs are rotated online: by R4, and by an online R1."""
    readers = stream.readers if options.r1 and options.online_r1_rotation else ()
    names = [weight.parameter.removesuffix(".weight") for weight in readers]
    return [
        n for n in [*names, *(stream.down_projections if options.r4 else ())] if n in context.layers
    ]


def _choose_online_size(context: Context, options: RotationConfig, names: list[str]) -> int:
    """Return the size of all online rotations; a checkpoint stores only one."""
    widths = {name: context.layers[name].input_width for name in names}
    size = options.rotation_size or largest_order(math.gcd(*widths.values())) if names else 1
    for name, width in widths.items():
        if width % size:
            raise ValueError(
                f"rotation: rotation_size={size} does not divide the {width} inputs of {name}."
            )
    return size


def work(options: RotationConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: its largest weight in float64, and what learning takes.

    A learned rotation runs the model and a copy with rotated weights, forward, again for the
    gradients and backward, for every step; nothing of it is done block by block.
    """
    memory = block.largest(lambda x: 3 * FLOAT64 * x.elements)
    flops = sum(2.0 * x.elements * (x.inputs + x.outputs) for x in block.layers)
    if not options.trainable:
        return Work(memory, flops=flops)
    from quark.torch.algorithm.rotation.spinquant import STEPS

    logits = 6 * FLOAT32 * data.batch * data.labels
    graph = FLOAT32 * data.batch * (16 * data.hidden + 4 * sum(x.outputs for x in block.layers))
    memory += logits + graph + 4 * FLOAT32 * block.elements
    passes = 5.0 * STEPS * data.batch / max(data.tokens, 1)
    return Work(memory, passes, (STEPS + 1) * flops, is_local=False)


ALGORITHM = Algorithm(
    check,
    apply,
    lambda options: bool(options.trainable),
    resolve,
    proves=(ROTATION,),
    work=work,
)
