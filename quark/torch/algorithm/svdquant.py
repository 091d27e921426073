"""SVDQuant (Li et al. 2024): a branch of low rank in float takes what is hard to round in a weight.

Inputs x are divided by factors s, and weights W multiplied by them, so that outliers of inputs move
into the weight (section 4.1). The r largest singular values of the result stay in float, and the
residual R alone is rounded (section 4.2, equations 4 and 5):

    W s = U V + R          U (outputs, r), V (r, inputs)
    x Wᵀ = x̂ Vᵀ Uᵀ + x̂ Rᵀ ≈ x̂ Vᵀ Uᵀ + Q(x̂) Q(R)ᵀ    with x̂ = x / s
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial

import torch

from quark.torch.algorithm.layer_inputs import first_readers, observe_block
from quark.torch.algorithm.layers import (
    block_layers,
    check_weights_quantized,
    has_quantized_weight,
    weight_matrix,
    write_weight_matrix_,
)
from quark.torch.algorithm.named_modules import fits_pattern, warn_of_names
from quark.torch.algorithm.rescaling import fake_quantized_matrix
from quark.torch.algorithm.smoothing import (
    centred,
    fake_quantized_inputs,
    smoothing_factors,
)
from quark.torch.algorithm.weight_rounding import untie
from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import resident
from quark.torch.pipeline.accumulators import InputSample
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.runner import run_blocks
from quark.torch.pipeline.shapes import FLOAT32, BlockShape, DataShape, Work
from quark.torch.quantization.config.algo import SVDQuantConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)

ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9)  # strengths of the search
TOKENS = 128  # size of the sample on which errors are measured, for each of the samples asked for
OVERSAMPLING = 8  # columns of the sketch beside the rank
ITERATIONS = 2  # power iterations of the sketch

Layers = dict[str, FakeQuantizedLayer]


def check(options: SVDQuantConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_weights_quantized(options, layers)


def resolve(context: Context, options: SVDQuantConfig) -> Collection[str]:
    """Raise if the rank does not fit a layer, or no layer is selected; no input is rotated.

    Raises:
        ValueError: A layer has no more inputs or outputs than the rank, or there is no layer.
    """
    warn_of_names(context, "svdquant: exclude_patterns", options.exclude_patterns, fits_pattern)
    selected = _select(context, options)
    if not selected:
        raise ValueError(
            "svdquant: no linear layer with a quantized weight in the blocks of the model has "
            f"min_layer_size={options.min_layer_size} inputs and outputs and is not named by "
            f"exclude_patterns={options.exclude_patterns}. Set a smaller min_layer_size."
        )
    for name, layer in (item for layers in selected.values() for item in layers.items()):
        size = min(layer.input_width, layer.output_width)
        if options.svd_rank >= size:
            raise ValueError(
                f"svdquant: svd_rank={options.svd_rank} does not fit {name} with "
                f"{layer.output_width} outputs and {layer.input_width} inputs: it must be below "
                f"{size}. Set a smaller svd_rank, or leave small layers out by min_layer_size."
            )
    return ()


def apply(context: Context, options: SVDQuantConfig) -> None:
    """Divide the weights of the blocks into branches and residuals, block by block.

    In float, the model computes the same. Residuals are rounded later, to the nearest or by the
    algorithm that follows.

    Raises:
        ValueError: As in ``resolve``.
    """
    selected = _select(context, options)
    untie(context, (name for layers in selected.values() for name in layers))
    for layers in selected.values():
        for name, layer in layers.items():
            with resident(context.model, name):
                layer.add_prescale()
                layer.add_low_rank(options.svd_rank)
    units, blocks = context.structure.units, context.structure.blocks
    last = max(units.index(name) for name in selected)
    needed = [name for name in units[: last + 1] if name in selected or name in blocks]
    size = TOKENS * options.alpha_search_max_samples
    for block in run_blocks(
        context.model, needed, context.batches, "svdquant", journal=context.journal
    ):
        layers = selected.get(block.name, {})
        # Numbers of tokens in different leaves are different: a leaf has fewer than 2²⁴ tokens.
        samples = observe_block(context, block, layers, lambda leaf: InputSample(size, leaf << 24))
        groups: dict[str, Layers] = {}
        for name, first in first_readers(layers, context).items():
            groups.setdefault(first, {})[name] = layers[name]
        for first, group in groups.items():
            factors = _choose_factors(group, samples[first], options)
            for layer in group.values():
                divide_weight_(layer, factors, options.svd_rank)


def low_rank_factors(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return U and V whose product is about the best approximation of a matrix by this rank.

    The singular vectors are those of a sketch with power iterations (Halko et al. 2011, algorithm
    4.4), the same in each call. The singular values are divided evenly between U and V.

    Args:
        matrix: (outputs, inputs) float32.
        rank: Rank of the product.

    Returns:
        U (outputs, rank) and V (rank, inputs).
    """
    width = rank + OVERSAMPLING
    if 2 * width >= min(matrix.shape):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        generator = torch.Generator().manual_seed(0)
        sketch = torch.randn(
            matrix.shape[1], width, generator=generator, dtype=torch.float32, device="cpu"
        ).to(matrix)
        basis = torch.linalg.qr(matrix @ sketch).Q
        for _ in range(ITERATIONS):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
        left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ left
    roots = values[:rank].sqrt()
    return left[:, :rank] * roots, roots.unsqueeze(1) * right[:rank]


def divide_weight_(layer: FakeQuantizedLayer, factors: torch.Tensor, rank: int) -> None:
    """Divide the weight of a layer into a branch and a residual, in place.

    Args:
        layer: A layer with an empty branch.
        factors: Divisors of its inputs, (inputs,).
        rank: Rank of the branch.
    """
    matrix = weight_matrix(layer)
    prescale, up, down = layer.input_prescale, layer.low_rank_up, layer.low_rank_down
    assert prescale is not None and up is not None and down is not None
    if layer.input_rotation is None:
        write_(prescale, 1 / factors)
        matrix = matrix / prescale.detach().float()
    for parameter, values in zip((up, down), low_rank_factors(matrix, rank), strict=True):
        write_(parameter, values)
    # The residual is that of the branch as it is stored, so that it takes the rounding of this.
    write_weight_matrix_(layer, matrix - up.detach().float() @ down.detach().float())


def _select(context: Context, options: SVDQuantConfig) -> dict[str, Layers]:
    """Return the layers that get a branch, by name of their unit and their own.

    Raises:
        ValueError: ``low_rank_layers`` names a layer that cannot have one.
    """
    named = options.low_rank_layers

    def is_selected(name: str, layer: FakeQuantizedLayer) -> bool:
        if named is not None:
            return name in named and layer.is_linear
        return (
            layer.is_linear
            and min(layer.input_width, layer.output_width) >= options.min_layer_size
            and not any(fits_pattern(name, p) for p in options.exclude_patterns)
        )

    selected: dict[str, Layers] = {}
    for unit in context.structure.units:
        layers = block_layers(context, unit, has_quantized_weight)
        layers = {name: layer for name, layer in layers.items() if is_selected(name, layer)}
        if layers:
            selected[unit] = layers
    known = {name for layers in selected.values() for name in layers}
    for name in named or ():
        if name not in known:
            raise ValueError(
                f"svdquant: low_rank_layers has {name!r}, which is not a linear layer with a "
                "quantized weight in a block of the model."
            )
    return selected


def _choose_factors(layers: Layers, sample: InputSample, options: SVDQuantConfig) -> torch.Tensor:
    """Return the divisors of the inputs under which the outputs of layers change least, (inputs,).

    Args:
        layers: Layers that read the same tensor.
        sample: A sample of it.
        options: Options of the algorithm.
    """
    first = next(iter(layers.values()))
    none = torch.ones(first.input_width, device=first.weight.device, dtype=torch.float32)
    if sample.is_empty or first.input_rotation is not None:
        return none  # experts without tokens; rotations spread outliers already
    inputs = sample.range.amax
    weights = torch.stack([weight_matrix(layer).abs().amax(0) for layer in layers.values()])
    alphas = options.alpha_candidates or ALPHAS if options.search_alpha else [options.smooth_alpha]
    candidates = [
        centred(smoothing_factors(inputs, weights.amax(0), alpha, 0.0), inputs > 0)
        for alpha in alphas
    ]
    if not options.search_alpha:
        return candidates[0]
    candidates.append(none)
    losses = processes().measure(
        candidates, partial(_measure_loss, layers=layers, sample=sample, rank=options.svd_rank)
    )
    return candidates[losses.index(min(losses))]


def _measure_loss(factors: torch.Tensor, layers: Layers, sample: InputSample, rank: int) -> float:
    """Return the change of the outputs of layers by rounding, relative to the outputs of each."""
    assert sample.range.lo is not None and sample.range.hi is not None
    tokens = sample.tokens.float()
    x, lo, hi = (t / factors for t in (tokens, sample.range.lo, sample.range.hi))
    loss = 0.0
    for layer in layers.values():
        weight = weight_matrix(layer)
        matrix = weight * factors
        up, down = low_rank_factors(matrix, rank)
        residual = matrix - up @ down
        rounded = fake_quantized_inputs(layer, x, lo, hi)
        change = rounded @ fake_quantized_matrix(layer, residual).T - x @ residual.T
        norm = float((tokens @ weight.T).square().sum())
        loss += float(change.square().sum()) / norm if norm else 0.0
    return loss


def work(options: SVDQuantConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: samples of its inputs, sketches and products of candidates."""
    tokens = min(TOKENS * options.alpha_search_max_samples, data.tokens)
    samples = sum(FLOAT32 * 2 * tokens * width for width in block.input_widths)
    products = block.largest(
        lambda x: FLOAT32 * (8 * x.elements + 4 * tokens * (x.inputs + x.outputs))
    )
    branches = sum(options.svd_rank * (x.inputs + x.outputs) * x.itemsize for x in block.layers)
    candidates = len(options.alpha_candidates or ALPHAS) + 1 if options.search_alpha else 0
    sketch = 4.0 * (ITERATIONS + 2) * (options.svd_rank + OVERSAMPLING)
    flops = sum(
        ((candidates + 1) * (sketch + 50) + candidates * 6.0 * tokens) * x.elements
        for x in block.layers
    )
    return Work(samples + products + branches, 1, flops, stores=3)


ALGORITHM = Algorithm(check, apply, work=work, resolve=resolve)
