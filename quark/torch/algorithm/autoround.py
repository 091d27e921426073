"""AutoRound (Cheng et al. 2024): learns rounding and ranges from the outputs of a block.

Each weight gets an offset V of at most half a step before it is rounded, and each range a factor
for either end (section 3). Both follow the signs of their gradients, straight
through the rounding, until the block returns for its new inputs what it returns in the float model.
A step is the distance between neighbouring values of the format at the weight, of integers or
floats.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from quark.torch.algorithm.block_training import (
    TrainedWeight,
    compute_gradients,
    sample_batches,
    straight_through,
    total_error,
)
from quark.torch.algorithm.layer_inputs import quantize_inputs
from quark.torch.algorithm.layers import check_weights_quantized
from quark.torch.algorithm.weight_rounding import iterate_blocks, resolve
from quark.torch.numerics.rounding import round_, steps_around
from quark.torch.numerics.scales import round_scale, round_zero_point
from quark.torch.pipeline.block import Block, constant
from quark.torch.pipeline.chunks import Chunks
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.shapes import FLOAT32, BlockShape, DataShape, Work
from quark.torch.quantization.config.algo import AutoRoundConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)

MAX_OFFSET = 0.5  # steps
MIN_FACTOR = 0.1  # of a range
EVALUATIONS = 4  # times that the error over all data is measured while learning


def check(options: AutoRoundConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_weights_quantized(options, layers)


def apply(context: Context, options: AutoRoundConfig) -> None:
    """Learn the rounding of each unit of the model in turn; later ones receive its new outputs.

    Layers outside of units are later rounded to the nearest. Each sequence runs alone, so the batch
    size of the data does not change the result.
    """
    context = replace(context, batches=Chunks(context.batches, sequences=1))
    for block, layers in iterate_blocks(context, options, compare=True):
        with quantize_inputs(context, block.name, False):
            for index in range(len(block)):
                block.run_reference(index)
        context.compute_scales(layers)
        weights = {
            f"{name}.weight".removeprefix(f"{block.name}."): LearnedWeight(
                layer, options.enable_minmax_tuning
            )
            for name, layer in layers.items()
        }
        with constant(block.module):
            before, after = learn_rounding(block, weights, options)
        logger.info("%s: squared error %.4g, to nearest %.4g", block.name, after, before)
        for weight in weights.values():
            weight.write()


class LearnedWeight(TrainedWeight):
    """A weight whose rounding is learned.

    Args:
        layer: Its layer, with final scales.
        ranges: Whether to learn ranges too, where they are not fixed.

    Attributes:
        offset: Steps that are added before rounding, in the shape of the weight.
        factors: (2, *scale) of the largest and the smallest value of each range; (1, *scale) for
            symmetric ranges; (0, *scale) for fixed ranges.
    """

    def __init__(self, layer: FakeQuantizedLayer, ranges: bool = True) -> None:
        super().__init__(layer)
        is_symmetric = self._scheme.symmetric or self._scheme.fmt.is_float
        ends = 0 if self._fixes_ranges or not ranges else 1 if is_symmetric else 2
        scale = self._stage.scale.float()
        self.offset = torch.zeros_like(self._stage.values, requires_grad=True)
        self.factors = scale.new_ones(ends, *scale.shape).requires_grad_()

    def _values(self) -> torch.Tensor:
        return self._stage.values

    def _qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point of the ranges times their factors, as they are stored."""
        scale, zero, fmt = self._stage.scale.float(), self._stage.zero_point, self._scheme.fmt
        if not len(self.factors):
            return scale, zero
        above, below = self.factors[0], self.factors[-1]
        if zero is None or len(self.factors) == 1:
            return self._round_scale(scale * above), zero
        # The range goes from (qmin - z) s to (qmax - z) s, and `share` of it lies above zero.
        # Example: codes 0 … 15, z = 3, s = 1 -> range -3 … 12, share 0.8. Factors 0.5 above and 1
        # below give -3 … 6, a scale of 1 + 0.8 (0.5 - 1) = 0.6 and a zero point of 3 / 0.6 = 5.
        share = (fmt.qmax - zero.float()) / (fmt.qmax - fmt.qmin)
        new_scale = self._round_scale(scale * (below + share * (above - below)))
        new_zero = zero + (zero - fmt.qmin) * (below * scale / new_scale - 1)
        if self._scheme.float_zero_point:
            rounded = round_zero_point(new_zero.detach(), new_scale.detach(), self._scheme)
            return new_scale, straight_through(new_zero, rounded)
        rounded = new_zero.detach().round().clamp(fmt.qmin, fmt.qmax)
        return new_scale, straight_through(new_zero, rounded)

    def _round_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Round scales to their format."""
        tensor_scale = self._stage.tensor_scale
        to, axis = self._scheme.scale, self._scheme.axis
        rounded = round_scale(scale.detach(), to, tensor_scale, axis, signs=self._stage.scale)
        return straight_through(scale, rounded)

    def _move(self, steps: torch.Tensor) -> torch.Tensor:
        """Add offsets to values in units of the scale; values of float formats come out rounded.

        Float formats have smaller steps below each power of two. A value that an offset moves below
        one would be rounded in smaller steps than its own, so values are rounded here.
        """
        fmt = self._scheme.fmt
        offset = self.offset
        if self._zeros is not None:  # zeros stay zero
            offset = offset.masked_fill(self._zeros, 0.0)
        if not fmt.is_float:
            return steps + offset
        # Example: fp4_e2m1 has steps of 1 from 2 to 4 and of 0.5 from 1 to 2. The value 2.2 with
        # the offset -0.5 becomes 1.7, which rounds to 2 in steps of 1, not to 1.5.
        begin, spacing = steps_around(steps.detach(), fmt)
        exact = (steps if begin is None else steps - begin) / spacing + offset
        rounded = round_(exact.detach().clone(), self._scheme.rounding)
        moved = straight_through(exact, rounded) * spacing
        return moved if begin is None else moved + begin


def learn_rounding(
    block: Block, weights: Mapping[str, LearnedWeight], options: AutoRoundConfig
) -> tuple[float, float]:
    """Learn the rounding of the weights of a block by signed gradient descent.

    The best parameters over all data are kept, starting from rounding to the nearest.

    Args:
        block: The block, whose second stream has passed it.
        weights: Weights by their names in the block.
        options: Number of steps and learning rates, which decrease linearly to zero.

    Returns:
        Squared errors of the outputs over all data: rounded to the nearest, and learned.
    """
    bounds = [
        *((w.offset, options.lr, -MAX_OFFSET, MAX_OFFSET) for w in weights.values()),
        *((w.factors, options.minmax_lr, MIN_FACTOR, 1.0) for w in weights.values()),
    ]
    parameters = [parameter for parameter, *_ in bounds]
    before = lowest = total_error(block, weights)
    best = [p.detach().clone() for p in parameters]
    batches = sample_batches(block, options.batch_size)
    interval = -(-options.iters // EVALUATIONS)
    for step in range(options.iters):
        gradients = compute_gradients(block, weights, parameters, next(batches))
        decay = 1 - step / options.iters
        with torch.no_grad():
            for (parameter, rate, lowest_value, highest), g in zip(bounds, gradients, strict=True):
                parameter.sub_(g.sign(), alpha=rate * decay).clamp_(lowest_value, highest)
        if (step + 1) % interval == 0 or step + 1 == options.iters:
            error = total_error(block, weights)
            if error < lowest:
                lowest, best = error, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, best, strict=True):
            parameter.copy_(value)
    return before, lowest


def work(options: AutoRoundConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: the graph of its weights and of a sequence, and the steps.

    Twenty tensors of the size of the weights: offsets, the best ones, gradients, rounded values,
    and the steps of rounding that the graph keeps.
    """
    graph = FLOAT32 * data.length * (16 * data.hidden + 4 * sum(x.outputs for x in block.layers))
    learned = 3.0 * options.iters * options.batch_size * data.length / max(data.tokens, 1)
    flops = 100.0 * options.iters * block.elements
    passes = 3 + EVALUATIONS + learned
    return Work(20 * FLOAT32 * block.elements + graph, passes, flops, stores=5)


ALGORITHM = Algorithm(check, apply, resolve=resolve, work=work)
