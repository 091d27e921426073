"""Weights that make up for what earlier layers did to their inputs, then rounded by GPTQ.

Rounded weights Q see inputs x that differ from those r of the float model. The squared error
|W r - Q x|² over all tokens is |W* x - Q x|² plus what no Q can change, where
W* = W + W C H⁻¹ with C the sum of (r - x) xᵀ and H that of x xᵀ. So W* is rounded in place of W.
GPTAQ (Li et al. 2025) and Qronos (Zhang et al. 2025) aim at the same error, column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from quark.torch.algorithm.awq import has_quantized_weight
from quark.torch.algorithm.gptq import (
    Solver,
    inverse_factor,
    resolve,
    round_layer,
    shrink_to_pool,
    solve,
    solved_blocks,
)
from quark.torch.algorithm.layer_inputs import TokenWeights, in_turn, observe_inputs
from quark.torch.algorithm.rescaling import as_rows, check_served
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.runner import Block
from quark.torch.quantization.config.algo import GPTAQConfig, QronosConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import counterparts
from quark.torch.quantization.nn.layer import QuantMixin, is_transposed

DAMPING = 0.01  # of W*, and of the rounding where options do not tell
FITS = 3  # of scales to what GPTQ rounds, before the last time


def check(options: GPTAQConfig | QronosConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot serve these layers.

    Raises:
        ValueError: No weight is quantized, or an option is not between 0 and 1.
    """
    for name in ("alpha", "damp_percent") if isinstance(options, GPTAQConfig) else ():
        given = getattr(options, name)
        if not 0 <= given <= 1:
            raise ValueError(f"{options.name}: {name} is a share from 0 to 1, got {given}.")
    check_served(layers, options.name, has_quantized_weight)


def apply(context: Context, options: GPTAQConfig | QronosConfig) -> None:
    """Correct and round weights layer by layer, each on what came of those before.

    Experts are rounded without a correction.
    """
    share = options.alpha if isinstance(options, GPTAQConfig) else 1.0
    damping = options.damp_percent if isinstance(options, GPTAQConfig) else DAMPING
    for block, layers in solved_blocks(context, options, compare=True):
        round_block(context, block, layers, share, damping, options.desc_act)


def round_block(
    context: Context,
    block: Block,
    layers: Mapping[str, QuantMixin],
    share: float = 1.0,
    damping: float = DAMPING,
    by_size: bool = True,
    solver_of: Callable[[str], Solver] = lambda name: solve,
    weights: TokenWeights = lambda index: None,
) -> None:
    """Correct and round the layers of a block.

    Args:
        context: The model.
        block: The block, with the second stream.
        layers: Layers of it.
        share: How far to correct, see ``correct_``.
        damping: See ``round_layer``, as ``by_size``.
        by_size: Whether columns that meet the largest inputs come first.
        solver_of: Returns what rounds the weight of a layer.
        weights: See ``observe_inputs``.
    """
    floats = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    turns = in_turn(context, layers)
    for turn in turns:
        is_last = turn is turns[-1]
        grams, crosses = observe_inputs(context, block, turn, floats, is_last, weights)
        shrink_to_pool(counterparts(context.model), grams)
        for name, cross in crosses.items():
            correct_(layers[name], grams[name], cross, share)
        context.settle(turn)
        for name, layer in turn.items():
            round_layer(name, layer, grams[name], damping, by_size, solver_of(name), FITS)


@torch.no_grad()
def correct_(layer: QuantMixin, gram: Gram, cross: torch.Tensor, share: float = 1.0) -> None:
    """Replace a weight W by W + share · W C (H + damping)⁻¹.

    Args:
        layer: The layer.
        gram: Sum H of x xᵀ over its inputs.
        cross: Sum C of (r - x) xᵀ with the inputs r of the float model, (inputs, inputs).
        share: How much of the way to go.
    """
    assert gram.total is not None
    upper = inverse_factor(gram.total, DAMPING)
    if upper is None:
        return
    axis = 0 if is_transposed(layer.float_class) else 1
    rows = as_rows(layer.weight.detach(), axis).float()
    rows = torch.addmm(rows, rows @ cross @ upper.T, upper, alpha=share)
    layer.weight.data.copy_(rows if axis else rows.T)


ALGORITHM = Algorithm(check, apply, resolve=resolve)
