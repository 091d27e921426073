"""Pruning: the weights that matter least become zero, before the others are rounded.

SparseGPT (Frantar and Alistarh 2023) weighs a weight by the error that its zero causes after all
compensation, (w / U_ii)² with Uᵀ U = H⁻¹, and later columns compensate for it (``gptq_solver``).
Wanda (Sun et al. 2024) weighs it by |w| · |x|, with the norm |x| of its input over all tokens, and
leaves the other weights as they are. Later steps keep the zeros: ``keeps_zeros`` of a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from quark.torch.algorithm.gptq_solver import inverse_factor, prune_columns
from quark.torch.algorithm.layer_inputs import collect_input_statistics
from quark.torch.algorithm.layer_owners import change_layers
from quark.torch.algorithm.layers import (
    check_weights_quantized,
    split_rows,
    weight_matrix,
    write_weight_matrix_,
)
from quark.torch.algorithm.weight_rounding import (
    iterate_blocks,
    pool_expert_statistics,
    select_by_block,
)
from quark.torch.algorithm.weight_rounding import resolve as select_layers
from quark.torch.numerics.pieces import join_rows
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.shapes import (
    FLOAT32,
    BlockShape,
    DataShape,
    Work,
    gram_flops,
    solver_memory,
)
from quark.torch.quantization.config.algo import PruningConfig, SparseGPTConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import corresponding_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)


def check(options: PruningConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized, or a format has no zero.
    """
    check_weights_quantized(options, layers)
    for name, config in layers.items():
        if config.weight is not None and config.weight.scheme.float_zero_point:
            raise ValueError(
                f"{options.name}: {name} is quantized with zero points in float, so a zero does "
                "not stay zero. Choose a scheme with integer zero points or none."
            )


def resolve(context: Context, options: PruningConfig) -> Collection[str]:
    """Raise if the options select no layer, or their structure does not fit; none is rotated.

    Raises:
        ValueError: The message names the layer.
    """
    select_layers(context, options)
    for layers in select_by_block(context, options).values():
        for name, layer in layers.items():
            width = layer.to_matrix(layer.weight).shape[1]
            if options.group is not None and width % options.group[1]:
                raise ValueError(
                    f"{options.name}: {name} has {width} inputs, which groups of "
                    f"{options.group[1]} (mask_structure={options.mask_structure!r}) do not "
                    "divide. Choose another structure, or select layers by inside_layer_modules."
                )
    return ()


def apply(context: Context, options: PruningConfig) -> None:
    """Prune the layers of each unit in turn; later ones receive the outputs of pruned ones."""
    for layers in select_by_block(context, options).values():
        for layer in layers.values():
            layer.keeps_zeros = True
    for block, layers in iterate_blocks(context, options):
        grams, _ = collect_input_statistics(context, block, layers)
        pool_expert_statistics(corresponding_experts(context.model), grams)
        _prune_layers(layers, grams, options)


def _prune_layers(
    layers: Mapping[str, FakeQuantizedLayer], grams: Mapping[str, Gram], options: PruningConfig
) -> None:
    """Prune layers in all processes, those that share statistics together."""
    groups: dict[int, list[str]] = {}
    for name in layers:
        groups.setdefault(id(grams[name]), []).append(name)

    def prune(names: Sequence[str]) -> None:
        hessian = grams[names[0]].take_mean()
        if hessian is None:
            for name in names:
                logger.warning("No data reached %s: it is pruned by magnitude.", name)
        for name in names:
            matrix = weight_matrix(layers[name])
            write_weight_matrix_(layers[name], _prune_matrix(matrix, hessian, options))

    change_layers(layers, list(groups.values()), prune)


def _prune_matrix(
    matrix: torch.Tensor, hessian: torch.Tensor | None, options: PruningConfig
) -> torch.Tensor:
    """Return a weight with zeros, each group of rows by the statistics of its own inputs.

    Args:
        matrix: (outputs, inputs) float32.
        hessian: Mean of x xᵀ, (..., inputs, inputs); None if no data reached the layer.
        options: How to prune.
    """
    if hessian is None:
        return prune_by_norm(matrix, matrix.new_ones(matrix.shape[1]), options)
    hessians = hessian.view(-1, *hessian.shape[-2:])
    rows = split_rows(len(matrix), len(hessians))
    return join_rows(
        [_prune_rows(matrix[r], own, options) for r, own in zip(rows, hessians, strict=True)]
    )


def _prune_rows(
    matrix: torch.Tensor, hessian: torch.Tensor, options: PruningConfig
) -> torch.Tensor:
    """Return the rows that meet one group of inputs with zeros, by the algorithm of the options."""
    if isinstance(options, SparseGPTConfig):
        factor = inverse_factor(hessian, options.damp_percent)
        if factor is not None:
            return prune_by_hessian(matrix, factor, options)
        logger.warning("A Hessian cannot be inverted: its layer is pruned as by Wanda.")
    return prune_by_norm(matrix, hessian.diagonal().sqrt(), options)


def prune_by_norm(
    weight: torch.Tensor, norms: torch.Tensor, options: PruningConfig
) -> torch.Tensor:
    """Return a weight whose least |w| · |x| are zero: in each group, or in each row (Wanda, 3).

    Args:
        weight: (outputs, inputs).
        norms: Norm |x| of each input, (inputs,), up to a positive factor.
        options: How many weights become zero.
    """
    scores = weight.abs() * norms
    if options.group is None:
        zeros = select_smallest(scores, int(options.fraction * scores.shape[1]))
    else:
        zeros = _select_in_groups(scores, *options.group)
    return weight.masked_fill(zeros, 0.0)


def prune_by_hessian(
    weight: torch.Tensor, factor: torch.Tensor, options: SparseGPTConfig
) -> torch.Tensor:
    """Return a weight with zeros for which the columns after them compensate (SparseGPT).

    Args:
        weight: (outputs, inputs) float32.
        factor: ``inverse_factor`` of the Hessian.
        options: How many weights become zero. Without a structure, the zeros of ``block_size``
            columns are chosen together, over all rows.
    """

    def select(scores: torch.Tensor) -> torch.Tensor:
        if options.group is not None:
            return _select_in_groups(scores, *options.group)
        zeros = select_smallest(scores.flatten(), int(options.fraction * scores.numel()))
        return zeros.view_as(scores)

    width = options.block_size if options.group is None else options.group[1]
    return prune_columns(weight, factor, width, select)


def _select_in_groups(scores: torch.Tensor, kept: int, size: int) -> torch.Tensor:
    """Return which scores are not among the ``kept`` largest of their group, in the same shape."""
    groups = scores.reshape(*scores.shape[:-1], -1, size)
    return select_smallest(groups, size - kept).flatten(-2)


def select_smallest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return which scores are the ``count`` smallest along the last axis, bool; first ones at ties.

    Example: scores (3, 1, 1, 1) and a count of 2 -> (False, True, True, False).
    """
    order = scores.argsort(dim=-1, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def work(options: PruningConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: a pass for statistics, and the solver for SparseGPT."""
    flops = gram_flops(block, data)
    if isinstance(options, SparseGPTConfig):
        flops += sum(2.0 * x.inputs**3 + x.outputs * x.inputs**2 for x in block.layers)
        solving = solver_memory(block)
    else:  # values, scores and their order in int64
        solving = block.largest(lambda x: FLOAT32 * (2 * x.inputs**2 + 8 * x.elements))
    return Work(2 * block.grams, 2, flops, stores=3, solving=block.pooling + solving)


ALGORITHM = Algorithm(check, apply, resolve=resolve, work=work)
