"""Weights that compensate for changed inputs, then rounded by GPTQ: shared by Qronos and YAQA.

Rounded weights Q receive inputs x that differ from the inputs r of the float model. The squared
error |W r - Q x|² over all tokens is |W* x - Q x|² plus a term that does not depend on Q, with
W* = W + W C H⁻¹, C the sum of (r - x) xᵀ and H that of x xᵀ. So W* is rounded instead of W.
GPTAQ (Li et al. 2025) and Qronos (Zhang et al. 2025) minimize the same error column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from quark.torch.algorithm.gptq_solver import Solver, inverse_factor, round_columns
from quark.torch.algorithm.layer_inputs import (
    TokenWeights,
    collect_input_statistics,
    split_by_input,
)
from quark.torch.algorithm.layer_owners import change_layers
from quark.torch.algorithm.layers import split_rows, weight_matrix, write_weight_matrix_
from quark.torch.algorithm.weight_rounding import pool_expert_statistics, round_by_input
from quark.torch.numerics.granularity import join_rows
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.block import Block
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.shapes import (
    FLOAT32,
    BlockShape,
    DataShape,
    Work,
    gram_flops,
    solver_flops,
    solver_memory,
)
from quark.torch.quantization.nn.experts import corresponding_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

DAMPING = 0.01  # of the correction, and of the rounding where the options have no damping
REFITS = 3  # of scales to rounded values, before the last rounding


def correct_and_round(
    context: Context,
    block: Block,
    layers: Mapping[str, FakeQuantizedLayer],
    strength: float = 1.0,
    damping: float = DAMPING,
    by_magnitude: bool = True,
    solver_of: Callable[[str], Solver] = lambda name: round_columns,
    token_weights: TokenWeights = lambda index: None,
) -> None:
    """Correct and round the layers of a decoder block, in the order in which they run.

    Args:
        context: The model.
        block: The block, with the second stream.
        layers: Layers of the block.
        strength: See ``correct_weight_``.
        damping: See ``round_layers``.
        by_magnitude: See ``round_layers``.
        solver_of: Returns the function that rounds the weight of a layer, given its name.
        token_weights: See ``collect_input_statistics``.
    """
    floats = {
        f"{name}.{parameter}": getattr(layer, parameter).detach().clone()
        for name, layer in layers.items()
        for parameter in layer.parameter_quantizers()
    }
    parts = split_by_input(context, layers)
    for part in parts:
        is_last = part is parts[-1]
        grams, crosses = collect_input_statistics(
            context, block, part, floats, is_last, token_weights
        )
        pool_expert_statistics(corresponding_experts(context.model), grams)
        _correct_weights(layers, grams, crosses, strength)
        context.compute_scales(part)
        round_by_input(part, grams, damping, by_magnitude, solver_of, REFITS)


def _correct_weights(
    layers: Mapping[str, FakeQuantizedLayer],
    grams: Mapping[str, Gram],
    crosses: Mapping[str, torch.Tensor],
    strength: float,
) -> None:
    """Correct the weights of all layers with cross sums, in place; see ``correct_weight_``."""

    def correct(names: Sequence[str]) -> None:
        for name in names:
            correct_weight_(layers[name], grams[name], crosses[name], strength)

    change_layers(layers, [[name] for name in crosses], correct)


def correction_work(block: BlockShape, data: DataShape) -> Work:
    """Return what ``correct_and_round`` takes for a block.

    Two passes per set of layers that share an input, which end where the set has received it; a
    sum of (r - x) xᵀ beside each of x xᵀ; and the weights as they were.
    """
    memory = 4 * block.grams + block.pooling + block.changed + solver_memory(block)
    memory += block.largest(lambda x: FLOAT32 * 4 * x.inputs**2)
    sets = len({layer.inputs for layer in block.layers}) + 1
    flops = 2 * gram_flops(block, data) + (REFITS + 1) * solver_flops(block)
    return Work(memory, 1.2 * sets + 1, flops, stores=5)


@torch.no_grad()
def correct_weight_(
    layer: FakeQuantizedLayer, gram: Gram, cross: torch.Tensor, strength: float = 1.0
) -> None:
    """Replace a weight W by W + strength · W C (H + damping)⁻¹.

    Args:
        layer: The layer.
        gram: Sum H of x xᵀ over its inputs.
        cross: Sum C of (r - x) xᵀ with the inputs r of the float model, in the shape of H.
        strength: Factor of the correction, 0 to 1.
    """
    assert gram.total is not None
    matrix = weight_matrix(layer)
    inputs = matrix.shape[1]
    hessians, crosses = gram.total.view(-1, inputs, inputs), cross.view(-1, inputs, inputs)
    parts = []
    for rows, h, c in zip(split_rows(len(matrix), len(hessians)), hessians, crosses, strict=True):
        own, factor = matrix[rows], inverse_factor(h, DAMPING)
        if factor is not None:
            own = torch.addmm(own, own @ c @ factor.T, factor, alpha=strength)
        parts.append(own)
    write_weight_matrix_(layer, join_rows(parts))
