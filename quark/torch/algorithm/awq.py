"""AWQ (Lin et al. 2024): scales up the weights that are multiplied by large activations.

Rounding errors of these weights shrink, since a channel's weights are multiplied by s and its
inputs divided by s. The search for s compares the errors of the outputs over all
calibration tokens (section 3.2, equation 4). These errors depend on the tokens only through the
sums of x xᵀ, so data runs once and each candidate is compared exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from quark.torch.algorithm.clipping import clip_weight
from quark.torch.algorithm.layer_inputs import collect_grams
from quark.torch.algorithm.layer_owners import change_layers
from quark.torch.algorithm.layers import (
    block_layers,
    check_weights_quantized,
    group_width,
    has_quantized_weight,
    output_error,
    rounds_rows_apart,
    weight_matrix,
)
from quark.torch.algorithm.rescaling import (
    consumer_edits,
    expand_to_channels,
    fake_quantized_matrix,
    groups_by_unit,
    reduce_to_factors,
    require_groups,
    rescaled_units,
    select_groups,
)
from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.structure import RESCALING, Edit, RescalingGroup
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.runner import run_blocks
from quark.torch.pipeline.shapes import FLOAT32, BlockShape, DataShape, Work, gram_flops
from quark.torch.quantization.config.algo import AWQConfig, RoundingConfig, SVDQuantConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)

EXPONENTS = 20  # strengths of the search: r = 0, 1/20, … 19/20
SAMPLE = 8  # candidates are judged on every eighth output
SAMPLED_ROWS = 64  # but on at least so many
CHUNK = 1 << 21  # weights that are rounded at a time
# Fraction of the loss that a rescaling must remove if an algorithm follows that rounds weights with
# compensation. Measured at 3 and 4 bits: 0 to 10 % without outliers, 14 to 68 % with them.
MIN_GAIN = 0.125


def check(options: AWQConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_weights_quantized(options, layers)


def apply(context: Context, options: AWQConfig) -> None:
    """Rescale and clip weights block by block to minimize the errors of the outputs.

    If an algorithm follows that rounds weights with compensation, it chooses ranges itself: then
    weights are not clipped here, and rescalings of little gain are not applied.

    Raises:
        ValueError: No input of a quantized weight can be rescaled, or ``scaling_layers`` names
            layers that cannot be.
    """
    by_unit = groups_by_unit(context, select_groups(context, options, has_quantized_weight))
    if by_unit.pop("", None):
        logger.info("awq does not rescale layers of different blocks together.")
    others = context.config.algo_config or []
    is_rounded_later = any(isinstance(a, RoundingConfig | SVDQuantConfig) for a in others)
    names = rescaled_units(context, by_unit, not is_rounded_later)
    for block in run_blocks(context.model, names, context.batches, "awq", journal=context.journal):
        layers = block_layers(context, block.name, has_quantized_weight)
        layers = {name: layer for name, layer in layers.items() if layer.has_matrix}
        grams = collect_grams(context, block, layers)
        for group in by_unit.get(block.name, ()):
            _rescale(group, context, grams, MIN_GAIN if is_rounded_later else 0.0)
        if not is_rounded_later:
            _clip_weights(layers, grams)


def candidate_factors(magnitude: torch.Tensor, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Iterate over factors to try, (size,) each: those of section 3.2 and a variant, in turn.

    Args:
        magnitude: Mean |x| of each channel, (size,). Where it is zero, the factor is 1.
        weight: Mean |w| relative to the largest of its group, (size,). The variant divides by
            its power 1 - r, as SmoothQuant does.
    """
    # Masks instead of selections: the number of channels selected would be read from the device.
    used = magnitude > 0
    for step in range(EXPONENTS) if bool(used.any()) else ():
        r = step / EXPONENTS
        scaled = magnitude**r
        for values in (scaled, scaled / weight.clamp(min=1e-4) ** (1 - r)):
            least = values.masked_fill(~used, torch.inf).min()
            centre = (values.masked_fill(~used, 0.0).max() * least).sqrt()
            yield (values / centre).clamp(1e-4, 1e4).masked_fill(~used, 1.0)


def _rescale(
    group: RescalingGroup, context: Context, grams: dict[str, Gram], min_gain: float
) -> None:
    """Apply the factors under which the outputs of all consumers change least.

    Args:
        group: Parameters that are rescaled together.
        context: The model.
        grams: Statistics of the inputs of layers, which are rescaled too.
        min_gain: Fraction of the loss that the factors must remove.
    """
    edits = [(n, layer, edit) for n, layer, edit in consumer_edits(group, context) if n in grams]
    edits = [e for e in edits if grams[e[0]].total is not None]
    if not edits:
        return
    tokens = sum(grams[n].tokens for n, _, _ in edits)
    magnitude = torch.zeros(group.size, device=edits[0][1].weight.device, dtype=torch.float32)
    for name, _, edit in edits:
        total = grams[name].magnitude
        assert total is not None
        mean = reduce_to_factors(total / grams[name].tokens, edit, group.size, "mean")
        magnitude += mean * (grams[name].tokens / tokens)
    relative = [_measure_magnitude(layer, edit, group.size) for _, layer, edit in edits]
    estimate = _Loss(edits, grams, is_sampled=True)
    best = _search_best(
        [torch.ones_like(magnitude), *candidate_factors(magnitude, torch.stack(relative).mean(0))],
        estimate,
        _Loss(edits, grams, is_sampled=False) if estimate.is_partial else estimate,
        min_gain,
    )
    group.apply_(context.model, best)
    for gram, edit in {id(grams[n]): (grams[n], e) for n, _, e in edits}.values():
        gram.rescale_(expand_to_channels(best, edit))


def _search_best(
    candidates: list[torch.Tensor],
    estimate: Callable[[torch.Tensor], float],
    loss: Callable[[torch.Tensor], float],
    min_gain: float,
) -> torch.Tensor:
    """Return the candidate with the lowest loss, by a coarse search and a finer one around it.

    Args:
        candidates: No rescaling, followed by ``candidate_factors``.
        estimate: Returns the loss of a candidate on a sample of the outputs.
        loss: Returns the loss of a candidate; the same function if there is no sample.
        min_gain: Fraction of the loss that a candidate must remove to be better than the first.
    """

    # Candidates 1, 2 have exponent 0, candidates 3, 4 exponent 1/20, …: odd ones are those of the
    # paper, even ones the variant. The coarse search takes exponents 0, 4/20, 8/20, … of both. The
    # finer one goes one and two exponents up and down: ±2 and ±4 candidates, of the same kind.
    def measure(numbers: list[int], loss: Callable[[torch.Tensor], float]) -> dict[int, float]:
        values = processes().measure([candidates[i] for i in numbers], loss)
        return dict(zip(numbers, values, strict=True))

    coarse = [i for i in range(1, len(candidates)) if (i - 1) // 2 % 4 == 0]
    losses = measure([0, *coarse], estimate)
    near = min(coarse, key=lambda i: losses[i], default=0)
    fine = [near - 4, near - 2, near + 2, near + 4] if near else []
    fine = [i for i in fine if 0 < i < len(candidates) and i not in losses]
    losses |= measure(fine, estimate)
    if loss is not estimate:  # the two best and no rescaling are compared on all outputs
        final = sorted(losses, key=lambda i: losses[i])[:2]
        losses = measure(list(dict.fromkeys([*final, 0])), loss)
    best = min(losses, key=lambda i: losses[i])
    return candidates[best if losses[best] <= (1 - min_gain) * losses[0] else 0]


class _Loss:
    """The sum over layers of the squared error of the outputs, relative to their squares.

    Args:
        edits: Name, layer and edit of each consumer of the factors.
        grams: Statistics of the inputs of layers.
        is_sampled: Whether a part of the outputs is enough.
    """

    def __init__(
        self,
        edits: list[tuple[str, FakeQuantizedLayer, Edit]],
        grams: Mapping[str, Gram],
        is_sampled: bool,
    ) -> None:
        self._edits, self._grams, self._is_sampled = edits, grams, is_sampled
        self._squares = [
            output_error(self._rows(layer), self._gram(name)).double().clamp(min=1e-30)
            for name, layer, _ in edits
        ]

    def __call__(self, factors: torch.Tensor) -> float:
        """Return the loss under factors, (size,)."""
        loss = torch.zeros((), dtype=torch.float64, device=factors.device)
        for (name, layer, edit), squares in zip(self._edits, self._squares, strict=True):
            matrix, by = self._rows(layer), expand_to_channels(factors, edit)
            step = max(1, CHUNK // matrix.shape[1]) if rounds_rows_apart(layer) else len(matrix)
            for rows in torch.split(matrix, step):
                change = fake_quantized_matrix(layer, rows * by).div_(by).sub_(rows)
                loss += output_error(change, self._gram(name)).double() / squares
        return float(loss)

    @property
    def is_partial(self) -> bool:
        """Whether outputs are left out."""
        return any(self._step(layer) > 1 for _, layer, _ in self._edits)

    def _step(self, layer: FakeQuantizedLayer) -> int:
        """Return the distance of the rows of a layer that count."""
        rows = layer.to_matrix(layer.weight).shape[0]
        is_sampled = self._is_sampled and rounds_rows_apart(layer)
        return max(1, min(SAMPLE, rows // SAMPLED_ROWS)) if is_sampled else 1

    def _rows(self, layer: FakeQuantizedLayer) -> torch.Tensor:
        """Return the weight of a layer as a float32 matrix, or a sample of its rows."""
        return layer.to_matrix(layer.weight.detach())[:: self._step(layer)].float()

    def _gram(self, name: str) -> torch.Tensor:
        total = self._grams[name].total
        assert total is not None
        return total


def _measure_magnitude(layer: FakeQuantizedLayer, edit: Edit, size: int) -> torch.Tensor:
    """Return mean |w| of the columns of each factor, relative to the largest in the group, (size,).

    The last group of a row is padded with zeros if groups do not divide it.
    """
    matrix = weight_matrix(layer).abs()
    assert layer.weight_quantizer is not None
    width = group_width(layer.weight_quantizer.scheme, matrix.shape[1])
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % width))
    groups = padded.view(len(matrix), -1, width)
    relative = groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)
    mean = relative.flatten(1)[:, : matrix.shape[1]].mean(0)
    return reduce_to_factors(mean, edit, size, "mean")


def _clip_weights(layers: Mapping[str, FakeQuantizedLayer], grams: Mapping[str, Gram]) -> None:
    """Clip the weights of all layers that data reached, in place."""

    def clip(names: Sequence[str]) -> None:
        for name in names:
            total = grams[name].total
            assert total is not None
            clip_weight_(layers[name], total)

    change_layers(layers, [[n] for n in layers if grams[n].total is not None], clip)


@torch.no_grad()
def clip_weight_(layer: FakeQuantizedLayer, gram: torch.Tensor) -> None:
    """Clip the weights of each group where that reduces the error of the outputs, in place.

    Args:
        layer: A layer with a quantized weight.
        gram: Sum of x xᵀ over its inputs, (inputs, inputs).
    """
    weight = clip_weight(layer, gram)
    if weight is not None:
        write_(layer.weight, weight)


def work(options: AWQConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: sums over its inputs, and candidates of weights."""
    candidates = block.largest(lambda x: FLOAT32 * (16 * x.elements + 2 * x.inputs**2))
    searched = sum(16 * (2.0 * x.elements * x.inputs + 100 * x.elements) for x in block.layers)
    flops = gram_flops(block, data) + searched
    return Work(2 * block.grams + candidates, 1, flops, stores=3)


ALGORITHM = Algorithm(
    check,
    apply,
    work=work,
    resolve=partial(require_groups, predicate=has_quantized_weight),
    proves=lambda options: (RESCALING,),
)
