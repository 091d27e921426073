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
from quark.torch.algorithm.rotation.online import (
    choose_online_size,
    named_layers,
    rotate_inputs,
    select_online_layers,
)
from quark.torch.algorithm.rotation.weight_edits import (
    STREAM,
    RotationEdits,
    add_smoothing,
    add_stream_rotation,
    add_value_rotation,
    untie,
)
from quark.torch.graph.residency import residency_of
from quark.torch.graph.structure import RESCALING, ROTATION, ResidualStream
from quark.torch.numerics.hadamard import hadamard, largest_order, random_hadamard
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.processes import describe, processes
from quark.torch.pipeline.shapes import (
    FLOAT32,
    FLOAT64,
    PASS_READS,
    BlockShape,
    DataShape,
    Work,
)
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
    if options.train_smooth and not options.trainable:
        raise ValueError(
            "rotation: train_smooth=True learns factors together with rotations: set "
            "trainable=True too."
        )
    if options.smooth_positions is not None and not options.train_smooth:
        raise ValueError("rotation: smooth_positions needs train_smooth=True.")
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

    def is_edited(self, context: Context, name: str) -> bool:
        """Whether edits change the columns of a layer, so that its inputs are rotated after them.

        Inputs x R1 are rotated online as x R1 R, and the weight becomes W R1 R.
        """
        axis = context.layers[name].input_axis
        return any(edit.axis == axis for edit in self.edits.edits.get(f"{name}.weight", ()))


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
    edited = [name for name in plan.online if plan.is_edited(context, name)]
    scales = options.online_config is not None and options.online_config.use_input_prescale
    rotate_inputs(context, [n for n in plan.online if n not in edited], plan.size, scales)
    if options.trainable and stream is not None:
        from quark.torch.algorithm.rotation.spinquant import learn_rotations

        rotations = learn_rotations(context, plan.edits, rotations, _subtracts_mean(stream))
        rotations = _shared(rotations)
    plan.edits.apply_(context.model, rotations)
    rotate_inputs(context, edited, plan.size, scales)


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
    online = named_layers(context, options)
    needs_stream = options.r1 or options.r2 or (options.r4 and not online)
    stream = _select_stream(context, options) if needs_stream else None
    edits, rotations = RotationEdits(), {}
    if stream is not None:
        rotations = _plan_merged_rotations(edits, context.model, stream, options)
        online = online or select_online_layers(context, options, stream)
    rotations |= _plan_smoothing(edits, context, options, online)
    for name in online:
        layer = context.layers[name]
        if not layer.is_linear or layer.input_rotation is not None or name in context.rotated:
            raise ValueError(
                f"rotation: the inputs of {name} cannot be rotated: it must be a linear layer "
                "whose inputs are not rotated yet."
            )
    size = choose_online_size(context, options, online)
    plan = _Plan(stream, edits, rotations, online, size)
    edited = [name for name in online if options.trainable and plan.is_edited(context, name)]
    if edited:
        raise ValueError(
            f"rotation: trainable=True cannot learn rotations of the inputs of {edited[0]} that "
            "are merged into its weight, beside one online: leave it out of "
            "online_rotation_layers, or set r1=False and r2=False."
        )
    return plan


def _plan_smoothing(
    edits: RotationEdits, context: Context, options: RotationConfig, online: list[str]
) -> dict[str, torch.Tensor]:
    """Add the edits of learned factors, and return the logarithms of the initial ones by name.

    Raises:
        ValueError: ``smooth_positions`` names a module whose outputs cannot be rescaled.
    """
    if not options.train_smooth:
        return {}
    groups = [
        group
        for group in context.structure.groups
        if not any(name in online or name in context.rotated for name in group.consumers)
    ]
    positions = options.smooth_positions
    ends = {f".{group.producer}".rpartition(".")[2] for group in groups}
    for position in positions or ():
        if not any(f".{group.producer}".endswith(f".{position}") for group in groups):
            raise ValueError(
                f"rotation: smooth_positions has {position!r}, whose outputs cannot be rescaled "
                f"before they are read (others: {', '.join(sorted(ends)) or 'none'})."
            )
    starts = tuple(f".{position}" for position in positions or ()) or ("",)
    return {
        add_smoothing(edits, group): torch.zeros(group.size, dtype=torch.float64, device="cpu")
        for group in groups
        if f".{group.producer}".endswith(starts)
    }


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


def needs_data(options: RotationConfig) -> bool:
    """Whether the options learn from data, or take factors from it."""
    online = options.online_config
    return bool(options.trainable or (online is not None and online.use_input_prescale))


def work(options: RotationConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: its largest weight in float64, and what learning takes.

    A learned rotation runs the model and a copy with rotated weights, forward, again for the
    gradients and backward, for every step; nothing of it is done block by block.
    """
    memory = block.largest(lambda x: 3 * FLOAT64 * x.elements)
    flops = sum(2.0 * x.elements * (x.inputs + x.outputs) for x in block.layers)
    if not options.trainable:
        observes = needs_data(options)
        reads = _reads(options) + observes * (PASS_READS + 1)
        return Work(memory, float(observes), flops, reads=reads, runs_model=observes)
    from quark.torch.algorithm.rotation.spinquant import STEPS

    logits = 6 * FLOAT32 * data.batch * data.labels
    graph = FLOAT32 * data.batch * (16 * data.hidden + 4 * sum(x.outputs for x in block.layers))
    memory += logits + graph + 4 * FLOAT32 * block.elements
    passes = 5.0 * STEPS * data.batch / max(data.tokens, 1)
    return Work(memory, passes, (STEPS + 1) * flops, is_local=False)


def _reads(options: RotationConfig) -> int:
    """Return the times that a block is brought into memory for fixed rotations."""
    in_stream = options.r1 and not options.online_r1_rotation
    named = options.online_config is not None and options.online_config.online_rotation_layers
    is_online = options.r4 or options.online_r1_rotation or bool(named)
    # Each of two plans reads the gains of norms; weights are edited; inputs are rotated.
    return 2 * in_stream + 1 + is_online


ALGORITHM = Algorithm(
    check,
    apply,
    needs_data,
    resolve,
    proves=lambda options: (ROTATION, *((RESCALING,) if options.train_smooth else ())),
    work=work,
)
