"""Steps that algorithms share which round or prune weights block by block, such as GPTQ."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from quark.torch.algorithm.clipping import weight_with_best_ranges
from quark.torch.algorithm.damping import choose_damping
from quark.torch.algorithm.gptq_solver import Inputs, Solver, inverse_factor, solve_columns
from quark.torch.algorithm.layer_inputs import quantize_inputs
from quark.torch.algorithm.layer_owners import change_layers
from quark.torch.algorithm.layers import (
    block_layers,
    freeze,
    has_quantized_weight,
    split_rows,
    weight_matrix,
    write_weight_matrix_,
)
from quark.torch.algorithm.named_modules import has_end, warn_of_names
from quark.torch.algorithm.scale_refit import round_and_refit
from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import resident
from quark.torch.numerics.column_rounder import ColumnRounding
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.allocator import return_free_memory
from quark.torch.pipeline.block import Block
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.runner import run_blocks
from quark.torch.quantization.config.algo import BlockAlgoConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)


def resolve(context: Context, options: BlockAlgoConfig) -> Collection[str]:
    """Raise if the options select no layer, and warn of names without a match.

    No input is rotated.

    Raises:
        ValueError: As in ``iterate_blocks``.
    """
    select_by_block(context, options)
    what = f"{options.name}: inside_layer_modules"
    warn_of_names(context, what, options.inside_layer_modules, has_end)
    return ()


def iterate_blocks(
    context: Context, options: BlockAlgoConfig, compare: bool = False
) -> Iterator[tuple[Block, dict[str, FakeQuantizedLayer]]]:
    """Iterate over the units to be rounded, with their selected layers and their data.

    Inputs are quantized while data runs, except where that needs static ranges, which are
    calibrated later. See ``run_blocks``.

    Args:
        context: The model.
        options: Options of the algorithm, which select layers.
        compare: Whether to keep a second stream, that of the float model.

    Raises:
        ValueError: As in ``select_by_block``.
    """
    selected = select_by_block(context, options)
    untie(context, (name for layers in selected.values() for name in layers))
    needed = needed_units(context, options)

    def around(name: str) -> AbstractContextManager[None]:
        return quantize_inputs(context, name) if name in selected else nullcontext()

    for block in run_blocks(
        context.model,
        needed,
        context.batches,
        options.name,
        compare=compare,
        journal=context.journal,
        around=around,
    ):
        if block.name in selected:
            yield block, selected[block.name]


def needed_units(context: Context, options: BlockAlgoConfig) -> list[str]:
    """Return the units that data runs through one by one: those to be rounded, and blocks before.

    Other units are left to the passes through the model.

    Raises:
        ValueError: As in ``select_by_block``.
    """
    selected = select_by_block(context, options)
    units, blocks = list(context.structure.units), context.structure.blocks
    last = max(units.index(name) for name in selected)
    return [name for name in units[: last + 1] if name in selected or name in blocks]


def untie(context: Context, names: Iterable[str]) -> None:
    """Give each layer a weight of its own, where several modules share one.

    Each is rounded for its own inputs, by its own scales. Rounding one weight twice would change
    the values of the first layer after its scales and codes were found.
    """
    owners = Counter(id(p) for m in context.model.modules() for p in m._parameters.values())
    for name in names:
        layer = context.layers[name]
        weight = layer.weight
        if owners[id(weight)] > 1:
            owners[id(weight)] -= 1
            with resident(context.model, name):
                layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
            logger.info("%s shares its weight with another module: it gets its own.", name)


def select_by_block(
    context: Context, options: BlockAlgoConfig
) -> dict[str, dict[str, FakeQuantizedLayer]]:
    """Return the layers that the options select, by name of their unit, then by their own name.

    Raises:
        ValueError: There are none.
    """
    units, blocks = context.structure.units, context.structure.blocks
    selected = {
        name: layers for name in units if (layers := select_block_layers(context, name, options))
    }
    if not selected:
        where = f"no linear layer with a quantized weight in the {len(blocks)} decoder blocks"
        if not (options.model_decoder_layers or options.inside_layer_modules):
            raise ValueError(
                f"{options.name}: {where} of the model, and no convolution. Leave {options.name} "
                "out: other layers are rounded to the nearest without it."
            )
        raise ValueError(
            f"{options.name}: {where} of the model, and no convolution, is named by "
            f"model_decoder_layers={options.model_decoder_layers!r} and inside_layer_modules="
            f"{options.inside_layer_modules}. Leave both empty for all layers."
        )
    return selected


def select_block_layers(
    context: Context, block: str, options: BlockAlgoConfig
) -> dict[str, FakeQuantizedLayer]:
    """Return the linear layers and convolutions of a block that the options select, by name."""
    if not block.startswith(options.model_decoder_layers):
        return {}
    layers = block_layers(context, block, has_quantized_weight)
    ends = tuple(f".{end}" for end in options.inside_layer_modules) or ("",)
    return {n: m for n, m in layers.items() if m.has_matrix and f".{n}".endswith(ends)}


def pool_expert_statistics(stacks: Iterable[list[str]], grams: dict[str, Gram]) -> None:
    """Mix the mean statistics of all experts of a layer into those of each expert, in place.

    The pool counts as many tokens as a quarter of the inputs. So an expert that received n tokens
    keeps the share n / (n + inputs / 4) of its own statistics, and one without tokens takes those
    of the pool.

    Args:
        stacks: Names of the corresponding layers of experts, a list for each set.
        grams: Statistics by name of the layer.
    """
    for names in stacks:
        found = {id(grams[n]): grams[n] for n in names if n in grams}  # layers may share one
        own = [gram for gram in found.values() if not gram.is_pooled]
        tokens = sum(gram.tokens for gram in own)
        pool, noise = _sum(gram.total for gram in own), _sum(gram.noise for gram in own)
        if pool is None or not tokens:
            continue
        weight = len(pool) / 4
        pool.mul_(weight / tokens)
        if noise is not None:
            noise.mul_(weight / tokens)
        for gram in own:
            gram.total = pool.clone() if gram.total is None else gram.total.add_(pool)
            if noise is not None:
                gram.noise = noise.clone() if gram.noise is None else gram.noise.add_(noise)
            gram.tokens += weight
            gram.is_pooled = True


def _sum(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of tensors in the memory of one; None if there are none."""
    total = None
    for tensor in tensors:
        if tensor is not None:
            total = tensor.clone() if total is None else total.add_(tensor)
    return total


def round_by_input(
    layers: Mapping[str, FakeQuantizedLayer],
    grams: Mapping[str, Gram],
    damping: float,
    by_magnitude: bool,
    solver_of: Callable[[str], Solver] = lambda name: solve_columns,
    refits: int = 0,
) -> None:
    """Round layers in all processes, those that share statistics in one; see ``round_layers``.

    Args:
        layers: The layers by name.
        grams: Statistics of their inputs by name; one object for layers that share an input. Their
            sums are forgotten, since the solver needs the memory.
        damping: See ``round_layers``.
        by_magnitude: See ``round_layers``.
        solver_of: Returns the function that rounds the weight of a layer, given its name.
        refits: See ``round_layers``.
    """
    groups: dict[int, list[str]] = {}
    for name in layers:
        groups.setdefault(id(grams[name]), []).append(name)

    def change(names: Sequence[str]) -> None:
        part, gram = {name: layers[name] for name in names}, grams[names[0]]
        held_out, gram.held_out = gram.held_out, None
        tokens, hessian = max(gram.tokens, 1), gram.take_mean()
        held_out = None if held_out is None else held_out.div_(tokens)
        noise = gram.mean_noise()
        round_layers(part, hessian, damping, by_magnitude, solver_of, refits, held_out, noise)

    change_layers(layers, list(groups.values()), change)


def round_layer(
    name: str,
    layer: FakeQuantizedLayer,
    gram: Gram,
    damping: float,
    by_magnitude: bool,
    solver: Solver = solve_columns,
    refits: int = 0,
) -> None:
    """Round the weight of one layer; see ``round_layers``."""
    round_layers({name: layer}, gram.mean(), damping, by_magnitude, lambda _: solver, refits)


def round_layers(
    layers: Mapping[str, FakeQuantizedLayer],
    hessian: torch.Tensor | None,
    damping: float,
    by_magnitude: bool,
    solver_of: Callable[[str], Solver] = lambda name: solve_columns,
    refits: int = 0,
    held_out: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> None:
    """Replace weights of layers by rounded values, and scales by those that fit these best.

    Args:
        layers: Layers that share their input, with final scales. They are frozen, unless they
            cannot be rounded.
        hessian: Mean of x xᵀ over this input, which is changed; None if no data reached it.
        damping: Fraction of the mean square of the inputs that is added to each square.
        by_magnitude: Whether to round the columns with the largest inputs first (act order).
        solver_of: Returns the function that rounds the weight of a layer, given its name:
            ``solve_columns``, or a function of the same signature.
        refits: How many times to refit the scales to values of ``solve_columns`` before that.
        held_out: Share in the mean of one fold of the tokens; a stronger damping is chosen if that
            of the other fold rounds it better. None: ``damping`` is final.
        noise: Mean of what rounding adds to the inputs, (inputs,). What it adds to the outputs
            leaves the biases. None: biases stay.
    """
    if hessian is None:
        for name in layers:
            logger.warning("No data reached %s: it is rounded to the nearest.", name)
        return
    hessians = hessian.view(-1, *hessian.shape[-2:])  # one for each group of inputs
    for own in hessians:
        _fill_unused_(own.diagonal())
    for layer in layers.values():
        ranges = weight_with_best_ranges(layer, hessian)
        if ranges is not None:
            assert layer.weight_quantizer is not None
            layer.weight_quantizer.compute_block_scales(ranges)
    dampings = _choose_dampings(hessians, held_out, damping)
    ordered = [
        _order_columns(own, fraction, by_magnitude)
        for own, fraction in zip(hessians, dampings, strict=True)
    ]
    if any(factor is None for _, factor in ordered):
        for name in layers:
            logger.warning("%s: its Hessian cannot be inverted: rounded to the nearest.", name)
        return
    for own, fraction in zip(hessians, dampings, strict=True):
        own.diagonal().add_(fraction * own.diagonal().mean())
    groups = [
        Inputs(own, factor, order)
        for own, (order, factor) in zip(hessians, ordered, strict=True)
        if factor is not None
    ]
    for name, layer in layers.items():
        matrix = weight_matrix(layer)
        attempt = partial(_round_groups, matrix, groups)
        attempts = [attempt] * refits + [partial(attempt, solve=solver_of(name))]
        rounded = round_and_refit(layer, matrix, hessian, attempts)
        _finish_layer(layer, rounded, noise)


def _finish_layer(
    layer: FakeQuantizedLayer, rounded: torch.Tensor, noise: torch.Tensor | None
) -> None:
    """Write rounded values, take the mean of rounded inputs from the bias, and freeze both."""
    write_weight_matrix_(layer, rounded)
    if noise is not None and layer.bias is not None:
        write_(layer.bias, layer.bias.detach().float() - rounded @ noise)
    freeze(layer)
    return_free_memory()


def _choose_dampings(
    hessians: torch.Tensor, held_out: torch.Tensor | None, least: float
) -> list[float]:
    """Return the damping of each group of inputs; see ``round_layers``."""
    if held_out is None:
        return [least] * len(hessians)
    folds = held_out.view_as(hessians)
    return [
        choose_damping(own, own - fold, fold, least)
        for own, fold in zip(hessians, folds, strict=True)
    ]


def _fill_unused_(diagonal: torch.Tensor) -> None:
    """Give inputs that are always zero the mean square of the others, in place."""
    unused = diagonal == 0
    if bool(unused.any()):
        diagonal[unused] = diagonal[~unused].mean() if bool((~unused).any()) else 1.0


def _order_columns(
    hessian: torch.Tensor, damping: float, by_magnitude: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the order in which to round columns, and the inverse factor in that order."""
    order = torch.arange(len(hessian), device=hessian.device)
    if by_magnitude:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    ordered = hessian.index_select(0, order).index_select(1, order) if by_magnitude else hessian
    return order, inverse_factor(ordered, damping)


def _round_groups(
    matrix: torch.Tensor,
    groups: Sequence[Inputs],
    rounding: ColumnRounding,
    solve: Solver = solve_columns,
) -> torch.Tensor:
    """Return a matrix rounded, each group of rows by its own inputs."""
    if len(groups) == 1:
        return solve(matrix, groups[0], rounding)
    parts = []
    for rows, inputs in zip(split_rows(len(matrix), len(groups)), groups, strict=True):
        numbers = torch.arange(rows.start, rows.stop, device=matrix.device)
        parts.append(solve(matrix[rows], inputs, rounding.select_rows(numbers)))
    return torch.cat(parts)
