"""Weights that compensate for changed inputs, then rounded by GPTQ: shared by Qronos and YAQA.

Rounded weights Q receive inputs x that differ from the inputs r of the float model. The squared
error |W r - Q x|² over all tokens is |W* x - Q x|² plus a term that does not depend on Q, with
W* = W + D, D = W C H⁻¹, C the sum of (r - x) xᵀ and H that of x xᵀ. So W* is rounded instead of W.
GPTAQ (Li et al. 2025) and Qronos (Zhang et al. 2025) minimize the same error column by column.

Three things keep the correction from fitting the calibration data alone. The inputs x are those
before the layer quantizes them: the noise of 4 bits makes the best W* smaller in every direction
with little energy in this data, where other texts have more. For the noise of earlier layers, H is
damped so strongly that the correction keeps to directions with more energy than most. And the
weight goes only the share of the way that fits data which the correction has not seen:
``best_share``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from quark.torch.algorithm.gptq_solver import Solver, inverse_factor, solve_columns
from quark.torch.algorithm.layer_inputs import (
    Comparison,
    TokenWeights,
    collect_input_statistics,
    split_by_input,
)
from quark.torch.algorithm.layer_owners import change_layers
from quark.torch.algorithm.layers import (
    output_error,
    split_rows,
    weight_matrix,
    write_weight_matrix_,
)
from quark.torch.algorithm.weight_rounding import pool_expert_statistics, round_by_input
from quark.torch.numerics.pieces import join_rows
from quark.torch.pipeline.block import Block
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.shapes import (
    FLOAT32,
    BlockShape,
    DataShape,
    Work,
    damping_work,
    gram_flops,
    solver_flops,
    solver_memory,
)
from quark.torch.quantization.config.algo import SolverConfig
from quark.torch.quantization.nn.experts import corresponding_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

DAMPING = 0.01  # of the correction, and of the rounding where the options have no damping
NOISY_DAMPING = 1.0  # of the correction, where inputs are rounded while data runs
REFITS = 3  # of scales to rounded values, before the last rounding


def correct_and_round(
    context: Context,
    block: Block,
    layers: Mapping[str, FakeQuantizedLayer],
    strength: float = 1.0,
    damping: float = DAMPING,
    by_magnitude: bool = True,
    solver_of: Callable[[str], Solver] = lambda name: solve_columns,
    token_weights: TokenWeights = lambda index: None,
    hold_out: bool = False,
    refits: int = REFITS,
) -> None:
    """Correct and round the layers of a decoder block, in the order in which they run.

    Args:
        context: The model.
        block: The block, with the second stream.
        layers: Layers of the block.
        strength: Largest share of the correction, 0 to 1.
        damping: See ``round_layers``.
        by_magnitude: See ``round_layers``.
        solver_of: Returns the function that rounds the weight of a layer, given its name.
        token_weights: See ``collect_input_statistics``.
        hold_out: Whether a stronger damping of the rounding is chosen; see ``round_layers``.
        refits: See ``round_layers``.
    """
    floats = {
        f"{name}.{parameter}": getattr(layer, parameter).detach().clone()
        for name, layer in layers.items()
        for parameter in layer.parameter_quantizers()
    }
    parts = split_by_input(context, layers)
    for part in parts:
        is_last = part is parts[-1]
        grams, comparisons = collect_input_statistics(
            context, block, part, floats, is_last, token_weights, hold_out
        )
        _correct_weights(layers, comparisons, strength)
        comparisons.clear()  # the solver needs the memory
        pool_expert_statistics(corresponding_experts(context.model), grams)
        context.compute_scales(part)
        round_by_input(part, grams, damping, by_magnitude, solver_of, refits)


def _correct_weights(
    layers: Mapping[str, FakeQuantizedLayer],
    comparisons: Mapping[str, list[Comparison]],
    strength: float,
) -> None:
    """Correct the weights of all compared layers in place, those that share an input together."""
    groups: dict[int, list[str]] = {}
    for name, folds in comparisons.items():
        groups.setdefault(id(folds), []).append(name)

    def correct(names: Sequence[str]) -> None:
        correct_weights_([layers[name] for name in names], comparisons[names[0]], strength)

    change_layers(layers, list(groups.values()), correct)


def correction_work(
    options: SolverConfig, block: BlockShape, data: DataShape, refits: int = REFITS
) -> Work:
    """Return what ``correct_and_round`` takes for a block.

    Two passes per set of layers that share an input, which end where the set has received it; for
    each input, sums of (r - x) xᵀ and of x xᵀ in two folds beside that of x xᵀ; and the weights as
    they were.
    """
    memory = (4 + options.choose_damping) * block.grams + block.changed
    # Two folds and their total: sums in both kinds, and the factors.
    corrections = block.largest(lambda x: FLOAT32 * 15 * x.inputs**2)
    solving = block.pooling + solver_memory(block) + corrections
    sets = len({layer.inputs for layer in block.layers}) + 1
    flops = 3 * gram_flops(block, data) + (refits + 1) * solver_flops(block)
    flops += _correction_flops(block)
    if options.choose_damping:
        choice, arithmetic = damping_work(block)
        solving, flops = solving + choice, flops + arithmetic
    return Work(memory, 1.2 * sets + 1, flops, stores=5, solving=solving)


def _correction_flops(block: BlockShape) -> float:
    """Return the arithmetic of ``correct_weights_``; experts have none.

    Both folds and all data have a factor each for an input, and a correction of three products for
    a layer. Two of the corrections are judged by two products.
    """
    widths = {x.shared_input: x.inputs for x in block.layers if x.share == 1}
    products = sum(
        (3 * 3 + 2 * 2) * 2.0 * x.elements * x.inputs for x in block.layers if x.share == 1
    )
    return products + sum(3 * 2.0 * width**3 for width in widths.values())


@torch.no_grad()
def correct_weights_(
    layers: Sequence[FakeQuantizedLayer], folds: Sequence[Comparison], strength: float = 1.0
) -> None:
    """Replace each weight W by W + share · D, with the correction D of all folds.

    A layer has one share: the smaller of ``strength`` and ``best_share``.

    Args:
        layers: Layers that share an input.
        folds: What the input differs from that of the float model by, in parts of the data.
        strength: Largest share, 0 to 1.
    """
    parts = [_input_groups(fold) for fold in folds]
    # For each group of inputs, the inverse factors of each fold and of all data.
    groups = [[*own, _total(own)] for own in zip(*parts, strict=True)]
    damping = NOISY_DAMPING if any(map(_rounds_input, layers)) else DAMPING
    factors = [[inverse_factor(c.square, damping) for c in group] for group in groups]
    for layer in layers:
        matrix = weight_matrix(layer)
        gain = error = matrix.new_zeros(())
        changes = []
        rows = split_rows(len(matrix), len(groups))
        for own, group, inverses in zip(rows, groups, factors, strict=True):
            *tried, change = map(partial(correction, matrix[own]), group, inverses)
            for judge, suggested in zip(group[-2::-1], tried, strict=True):
                gain = gain + held_out_gain(matrix[own], suggested, judge)
                error = error + output_error(suggested, judge.square)
            changes.append(change)
        share = best_share(gain, error).clamp(max=strength) if len(folds) > 1 else 0.0
        changed = join_rows(changes)
        if layer.keeps_zeros:
            changed.masked_fill_(matrix == 0, 0.0)
        write_weight_matrix_(layer, matrix + share * changed)


def _rounds_input(layer: FakeQuantizedLayer) -> bool:
    """Return whether the input of a layer is rounded while data runs; see ``quantize_inputs``."""
    quantizer = layer.input_quantizer
    return quantizer is not None and not quantizer.needs_data


def correction(
    weight: torch.Tensor, compared: Comparison, factor: torch.Tensor | None
) -> torch.Tensor:
    """Return the correction D = W C (H + damping)⁻¹ of a weight, (outputs, inputs).

    Args:
        weight: W, (outputs, inputs).
        compared: H and C.
        factor: U with Uᵀ U = (H + damping)⁻¹; None if H cannot be inverted, then D is zero.
    """
    if factor is None:
        return torch.zeros_like(weight)
    return weight @ compared.cross @ factor.T @ factor


def held_out_gain(weight: torch.Tensor, change: torch.Tensor, held_out: Comparison) -> torch.Tensor:
    """Return tr(W C Dᵀ): half of what a change gains to first order on data held out, []."""
    return (weight @ held_out.cross).mul_(change).sum()


def best_share(gain: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Return the share β of the corrections that fits data best which these have not seen, [].

    The squared error |W r - (W + β D) x|² is a constant - 2 β tr(W C Dᵀ) + β² tr(D H Dᵀ), with C
    and H of the data that is held out. So the best β is tr(W C Dᵀ) / tr(D H Dᵀ), here between 0
    and 1. D comes from one fold, C and H from the other; both folds take their turn, and the sums
    of the two are divided.

    Args:
        gain: Sum of tr(W C Dᵀ) over the folds.
        error: Sum of tr(D H Dᵀ).
    """
    # Example: D from the first half of the data would gain 3 on the second, and cost 4; D from the
    # second gains 1 on the first, and costs 4 -> a share of (3 + 1) / (4 + 4) = 0.5.
    return torch.where(error > 0, gain / error, 0.0).clamp(0, 1)


def _input_groups(compared: Comparison) -> list[Comparison]:
    """Return the sums of each group of inputs, (inputs, inputs) each."""
    shape = (-1, *compared.square.shape[-2:])
    squares, crosses = compared.square.view(shape), compared.cross.view(shape)
    return [Comparison(*pair) for pair in zip(squares, crosses, strict=True)]


def _total(folds: Sequence[Comparison]) -> Comparison:
    """Return the sums over all folds."""
    return Comparison(*(torch.stack(parts).sum(0) for parts in zip(*folds, strict=True)))
