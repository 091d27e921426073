"""GPTQ (Frantar et al. 2023): columns are rounded in turn; later ones compensate for the errors.

The mathematics is in ``gptq_solver``.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.torch.algorithm.layer_inputs import collect_input_statistics, split_by_input
from quark.torch.algorithm.layers import check_weights_quantized
from quark.torch.algorithm.weight_rounding import (
    iterate_blocks,
    pool_expert_statistics,
    resolve,
    round_by_input,
)
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.shapes import (
    BlockShape,
    DataShape,
    Work,
    damping_work,
    gram_flops,
    solver_flops,
    solver_memory,
)
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import corresponding_experts


def check(options: GPTQConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_weights_quantized(options, layers)


def apply(context: Context, options: GPTQConfig) -> None:
    """Round the weights of each unit of the model in turn; later ones receive its new outputs.

    Layers outside of units are later rounded to the nearest.
    """
    for block, layers in iterate_blocks(context, options):
        for part in split_by_input(context, layers) if options.true_sequential else [layers]:
            grams, _ = collect_input_statistics(
                context, block, part, hold_out=options.choose_damping
            )
            pool_expert_statistics(corresponding_experts(context.model), grams)
            context.compute_scales(part)
            round_by_input(part, grams, options.damp_percent, options.desc_act)


def work(options: GPTQConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: a pass per set of layers for statistics, and one after it."""
    sets = len(block.input_widths) if options.true_sequential else 1
    flops = gram_flops(block, data) + solver_flops(block)
    solving = block.pooling + solver_memory(block)
    sums = 2
    if options.choose_damping:
        choice, arithmetic = damping_work(block)
        sums, flops, solving = 3, flops + arithmetic, solving + choice
    return Work(sums * block.grams, sets + 1, flops, stores=3, solving=solving)


ALGORITHM = Algorithm(check, apply, resolve=resolve, work=work)
