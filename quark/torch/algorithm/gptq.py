"""GPTQ (Frantar et al. 2023): each column is rounded, and those after it make up for the error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from quark.torch.algorithm.awq import has_quantized_weight
from quark.torch.algorithm.clipping import clipped
from quark.torch.algorithm.layer_inputs import in_turn, observe_inputs, rounding_inputs
from quark.torch.algorithm.rescaling import as_rows, block_layers, check_served
from quark.torch.algorithm.scale_refit import round_and_fit
from quark.torch.numerics.qdq import ColumnRounding
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.runner import Block, run_blocks
from quark.torch.quantization.config.algo import GPTQConfig, RoundingConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import counterparts
from quark.torch.quantization.nn.layer import QuantMixin, is_transposed

logger = logging.getLogger(__name__)

Solver = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, ColumnRounding], tuple[torch.Tensor, torch.Tensor]
]

LEAF = 16  # columns below which they are taken one by one
LEAST_DAMPING = 1e-6  # what rounding in float32 leaves of the smallest eigenvalues


def inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor | None:
    """Return upper triangular U with Uᵀ U = (H + damping · mean diagonal · I)⁻¹, or None.

    The damping grows until float32 can tell that the sum is positive definite; None if nothing
    helps.

    Args:
        hessian: Sum of x xᵀ, (inputs, inputs).
        damping: Share of the mean of its diagonal.
    """
    unit = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    mean = hessian.diagonal().mean()
    share = first = max(damping, LEAST_DAMPING)
    while share <= 1:
        lower, failed = torch.linalg.cholesky_ex(hessian + share * mean * unit)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and bool(upper.isfinite().all()):
                if share > first:
                    logger.warning("A Hessian is ill-conditioned: damped by %g.", share)
                found: torch.Tensor = upper
                return found
        share *= 10
    return None


def solve(
    weight: torch.Tensor, upper: torch.Tensor, order: torch.Tensor, rounding: ColumnRounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight column by column; what a column loses goes to those that follow.

    Algorithm 1 of the paper, with its blocks halved again and again, which changes nothing but
    the speed.

    Args:
        weight: (outputs, inputs) float32.
        upper: What ``inverse_factor`` returns for the columns in ``order``.
        order: (inputs,) int64: the column to take first, second, …
        rounding: Rounds a column.

    Returns:
        The rounded weight, and the errors e of the columns, (outputs, inputs): the sum of their
        squares is the damped error of the outputs.
    """
    rest = weight.T[order].contiguous()  # (inputs, outputs): columns lie together
    done, errors = torch.empty_like(rest), torch.empty_like(rest)
    columns = _Columns(rest, done, errors, upper.diagonal().unbind(), order.tolist())
    _run(columns, upper, rounding, 0, len(rest))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return done[back].T.contiguous(), errors[back].T.contiguous()


class _Columns(NamedTuple):
    """Columns of a weight in the order in which they are rounded, each (inputs, outputs)."""

    rest: torch.Tensor
    done: torch.Tensor
    errors: torch.Tensor
    steps: tuple[torch.Tensor, ...]  # what an error counts in, for each column
    places: list[int]  # of the columns in the weight


def _run(
    columns: _Columns, upper: torch.Tensor, rounding: ColumnRounding, start: int, end: int
) -> None:
    """Round columns from ``start`` to ``end``, which have made up for all before ``start``."""
    rest, done, errors, steps, places = columns
    if end - start > LEAF:
        middle = (start + end) // 2
        _run(columns, upper, rounding, start, middle)
        rest[middle:end].addmm_(upper[start:middle, middle:end].T, errors[start:middle], alpha=-1)
        _run(columns, upper, rounding, middle, end)
        return
    for i in range(start, end):
        column, error = rest[i], errors[i]
        rounded = rounding(column, places[i])
        done[i] = rounded
        torch.sub(column, rounded, out=error).div_(steps[i])
        if i + 1 < end:
            rest[i + 1 : end].addr_(upper[i, i + 1 : end], error, alpha=-1)


def check(options: GPTQConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot serve these layers.

    Raises:
        ValueError: No weight is quantized, or ``damp_percent`` is not between 0 and 1.
    """
    if not 0 <= options.damp_percent <= 1:
        raise ValueError(f"gptq: damp_percent is a share from 0 to 1, got {options.damp_percent}.")
    check_served(layers, "gptq", has_quantized_weight)


def resolve(context: Context, options: RoundingConfig) -> Collection[str]:
    """Raise if the options leave no layer.

    Raises:
        ValueError: As of ``solved_blocks``.
    """
    _solved(context, options)
    return ()


def apply(context: Context, options: GPTQConfig) -> None:
    """Round the weights of each block in turn; later blocks see what became of earlier ones.

    Layers outside of decoder blocks are left to rounding to the nearest.
    """
    for block, layers in solved_blocks(context, options):
        for turn in in_turn(context, layers) if options.true_sequential else [layers]:
            grams, _ = observe_inputs(context, block, turn)
            shrink_to_pool(counterparts(context.model), grams)
            context.settle(turn)
            for name, layer in turn.items():
                round_layer(name, layer, grams[name], options.damp_percent, options.desc_act)


def solved_blocks(
    context: Context, options: RoundingConfig, compare: bool = False
) -> Iterator[tuple[Block, dict[str, QuantMixin]]]:
    """Iterate over the blocks to be solved for, with their layers and the data; see ``run_blocks``.

    The data meets what inputs are rounded to, where that needs no settled ranges.

    Raises:
        ValueError: No layer is left by the options.
    """
    names, found = context.structure.blocks, _solved(context, options)
    last = list(found)[-1]
    needed = names[: names.index(last) + 1]
    blocks = run_blocks(context.model, needed, context.batches, options.name, compare=compare)
    with ExitStack() as stack:
        for block in blocks:
            if block.name in found:
                stack.enter_context(rounding_inputs(context, block.name))
                yield block, found[block.name]
            if block.name == last:
                return  # what it gives is of no interest


def _solved(context: Context, options: RoundingConfig) -> dict[str, dict[str, QuantMixin]]:
    """Return the layers to be solved for, by name of their block and their own.

    Raises:
        ValueError: There is none.
    """
    names = context.structure.blocks
    found = {name: layers for name in names if (layers := solved_layers(context, name, options))}
    if not found:
        raise ValueError(
            f"{options.name}: no linear layer with a quantized weight in the {len(names)} decoder "
            f"blocks that were found is named by model_decoder_layers="
            f"{options.model_decoder_layers!r} and inside_layer_modules="
            f"{options.inside_layer_modules}. Leave both empty for all."
        )
    return found


def solved_layers(context: Context, block: str, options: RoundingConfig) -> dict[str, QuantMixin]:
    """Return the linear layers of a block to be solved for, by name: all that options leave."""
    if not block.startswith(options.model_decoder_layers):
        return {}
    layers = block_layers(context, block, has_quantized_weight)
    ends = tuple(f".{end}" for end in options.inside_layer_modules) or ("",)
    return {n: m for n, m in layers.items() if m.is_linear and n.endswith(ends)}


def shrink_to_pool(peers: Iterable[list[str]], grams: dict[str, Gram]) -> None:
    """Mix into the statistics of each expert those of all experts beside it.

    An expert that saw n tokens counts them n / (n + inputs / 4).
    """
    for names in peers:
        seen = [grams[n] for n in names if n in grams and grams[n].total is not None]
        tokens = sum(gram.tokens for gram in seen)
        if not tokens:
            continue
        pool = torch.stack([g.total for g in seen if g.total is not None]).sum(0) / tokens
        weight = len(pool) / 4
        for name in names:
            gram = grams.get(name)
            if gram is None or gram.is_pooled:
                continue
            gram.total = weight * pool + (0 if gram.total is None else gram.total)
            gram.tokens += weight
            gram.is_pooled = True


def round_layer(
    name: str,
    layer: QuantMixin,
    gram: Gram,
    damping: float,
    by_size: bool,
    solver: Solver = solve,
    fits: int = 0,
) -> None:
    """Replace the weight of a layer by its rounded values, under scales fitted to these.

    Args:
        name: Its name, for messages.
        layer: A layer whose scales are settled. It is frozen, unless nothing can be done.
        gram: Statistics of its inputs.
        damping: Share of the mean square of inputs that is added to all.
        by_size: Whether columns that meet the largest inputs come first.
        solver: Rounds the weight: ``solve``, or what takes the same.
        fits: How often to fit scales to what ``solve`` rounds before that.
    """
    quantizer = layer.weight_quantizer
    weight = layer.weight.detach()
    axis = 0 if is_transposed(layer.float_class) else 1
    rows = as_rows(weight, axis).float()
    if gram.total is None:
        logger.warning("No data reached %s: it is rounded to the nearest.", name)
        return
    assert quantizer is not None
    hessian = gram.total / max(gram.tokens, 1)
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = diagonal[~dead].mean() if bool((~dead).any()) else 1.0
    narrowed = clipped(layer, hessian)
    if narrowed is not None:
        quantizer.narrow(narrowed)
    order = torch.arange(len(hessian), device=weight.device)
    if by_size:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    upper = inverse_factor(hessian[order][:, order], damping)
    if upper is None:
        logger.warning("%s: its Hessian cannot be inverted: rounded to the nearest.", name)
        return

    def attempt(rounding: ColumnRounding, by: Solver = solve) -> torch.Tensor:
        return by(rows, upper, order, rounding)[0]

    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    rounded = round_and_fit(layer, rows, hessian, [attempt] * fits + [partial(attempt, by=solver)])
    layer.weight.data.copy_(rounded if axis else rounded.T)
    freeze(layer)


def freeze(layer: QuantMixin) -> None:
    """Mark a layer whose weight is rounded as frozen, its bias too."""
    quantizer = layer.bias_quantizer
    if quantizer is not None:
        quantizer.observer(layer.bias)
        quantizer.settle(layer.bias)
        quantizer.bake_(layer.bias.data)
    layer.frozen = True


ALGORITHM = Algorithm(check, apply, resolve=resolve)
