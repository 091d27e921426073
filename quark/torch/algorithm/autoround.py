"""AutoRound (Cheng et al. 2024): rounding and ranges that are learned from the outputs of a block.

Every weight gets an offset of at most half a step before it is rounded, every range a factor for
either end. They follow the signs of their gradients, straight through the rounding, so that the
block gives for the inputs it will see what it gives in the float model (section 3 of the paper). A
step is that of the format where the weight lies: from one integer, or one float, to the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from quark.torch.algorithm.awq import has_quantized_weight
from quark.torch.algorithm.gptq import freeze, resolve, solved_blocks
from quark.torch.algorithm.layer_inputs import rounding_inputs
from quark.torch.algorithm.rescaling import check_served
from quark.torch.numerics.exponents import exponent_of, power_of_two
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import fake_quantize
from quark.torch.numerics.rounding import round_
from quark.torch.numerics.scales import round_scale
from quark.torch.pipeline.batches import sequences
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.runner import Block
from quark.torch.quantization.config.algo import AutoRoundConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.layer import QuantMixin

logger = logging.getLogger(__name__)

LARGEST_OFFSET = 0.5  # steps
SMALLEST_FACTOR = 0.1  # of a range
CHECKS = 4  # times that all data tells how far the learning has come


def check(options: AutoRoundConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot serve these layers.

    Raises:
        ValueError: No weight is quantized, or an option is out of its range.
    """
    for name in ("iters", "lr", "minmax_lr", "batch_size"):
        given, least = getattr(options, name), int(name == "batch_size")
        if not given >= least:
            raise ValueError(f"autoround: {name} must be {least} or more, got {given}.")
    check_served(layers, options.name, has_quantized_weight)


def apply(context: Context, options: AutoRoundConfig) -> None:
    """Learn the rounding of each block in turn; later blocks see what became of earlier ones.

    Layers outside of decoder blocks are left to rounding to the nearest. Each sequence runs alone,
    so that the batches in which data comes do not matter.
    """
    context = replace(context, batches=sequences(context.batches))
    for block, layers in solved_blocks(context, options, compare=True):
        with rounding_inputs(context, block.name, False):
            for index in range(len(block)):
                block.refer(index)
        context.settle(layers)
        learned = {
            f"{name.removeprefix(block.name)[1:]}.weight": Learned(
                layer, options.enable_minmax_tuning
            )
            for name, layer in layers.items()
        }
        before, after = learn(block, learned, options)
        logger.info("%s: squared error %.4g, to nearest %.4g", block.name, after, before)
        for weight in learned.values():
            weight.write()


class Learned:
    """A weight whose rounding is learned.

    Args:
        layer: Its layer, whose scales are settled.
        ranges: Whether to learn ranges too. They stay where scales are powers of two, which moving
            a little leaves as they are, and where a scale is that of a whole tensor, which layers
            that are served together may share.

    Attributes:
        offset: Steps that are added before rounding, in the shape of the weight.
        factors: (2, *scale) of the largest and the smallest value of every range, (1, *scale) where
            it is symmetric, (0, *scale) where ranges stay.
    """

    def __init__(self, layer: QuantMixin, ranges: bool = True) -> None:
        quantizer = layer.weight_quantizer
        assert quantizer is not None
        self._layer, self._quantizer = layer, quantizer
        self._stage = stage = quantizer.last_stage(layer.weight)
        self._scheme = scheme = stage.scheme
        self._blocks = scheme.blocks(stage.values.shape)
        stays = scheme.scales_by_powers or scheme.qscheme is QSchemeType.per_tensor
        ends = 0 if stays or not ranges else 1 if scheme.symmetric or scheme.fmt.is_float else 2
        scale = stage.scale.float()
        self.offset = torch.zeros_like(stage.values, requires_grad=True)
        self.factors = scale.new_ones(ends, *scale.shape).requires_grad_()

    def value(self) -> torch.Tensor:
        """Return the rounded weight, with gradients by offsets and factors."""
        scheme, values = self._scheme, self._stage.values
        scale, zero_point = self._qparams()
        by = self._spread(scale)
        steps = values / by if scheme.divides else values * by.reciprocal()
        # Values beyond the range follow the zero point, others do not: 0 with that gradient.
        shift: torch.Tensor | float = 0.0
        if zero_point is not None and zero_point.requires_grad:
            shift = self._spread(zero_point - zero_point.detach())
        ones = torch.ones_like(scale)
        codes = fake_quantize(self._moved(steps) + shift, ones, zero_point, scheme) - shift
        return (codes * by * self._stage.unit).to(self._layer.weight.dtype)

    @torch.no_grad()
    def write(self) -> None:
        """Give the layer the rounded weight and its scales, and freeze it."""
        scale, zero_point = self._qparams()
        old = self._stage.zero_point
        if zero_point is not None and old is not None:
            zero_point = zero_point.to(old.dtype)
        weight = self.value()
        self._quantizer.settle_last_stage(scale.to(self._stage.scale.dtype), zero_point)
        self._layer.weight.data.copy_(weight)
        freeze(self._layer)

    def _qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point of the ranges times their factors, as they are stored.

        Of a range from (qmin - z) s to (qmax - z) s the share (qmax - z) / (qmax - qmin) is above
        zero.
        """
        scale, zero, fmt = self._stage.scale.float(), self._stage.zero_point, self._scheme.fmt
        if not len(self.factors):
            return scale, zero
        above, below = self.factors[0], self.factors[-1]
        if zero is None or len(self.factors) == 1:
            return self._stored(scale * above), zero
        share = (fmt.qmax - zero.float()) / (fmt.qmax - fmt.qmin)
        found = self._stored(scale * (below + share * (above - below)))
        moved = zero + (zero - fmt.qmin) * (below * scale / found - 1)
        if self._scheme.float_zero_point:
            return found, moved
        return found, _straight(moved, moved.detach().round().clamp(fmt.qmin, fmt.qmax))

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        """Round scales to their format."""
        to, whole = self._scheme.scale, self._stage.tensor_scale
        return _straight(scale, round_scale(scale.detach(), to, whole))

    def _moved(self, steps: torch.Tensor) -> torch.Tensor:
        """Return values in units of the scale, moved by their offsets; floats are rounded already.

        A float next to a power of two would be moved past it, where steps are smaller.
        """
        fmt = self._scheme.fmt
        if not fmt.is_float:
            return steps + self.offset
        exponent = exponent_of(steps.detach()).clamp(fmt.min_exponent, fmt.max_exponent)
        spacing = power_of_two(exponent - fmt.mantissa_bits)
        moved = steps / spacing + self.offset
        return _straight(moved, round_(moved.detach().clone(), self._scheme.rounding)) * spacing

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """Give every weight the number of its block."""
        whole = self._blocks.spread(x).expand(self._blocks.view)
        return self._blocks.join(whole).reshape(self._stage.values.shape)


def learn(
    block: Block, learned: Mapping[str, Learned], options: AutoRoundConfig
) -> tuple[float, float]:
    """Learn the rounding of weights of a block.

    What was best for all data is kept; the first candidate is rounding to the nearest.

    Args:
        block: The block, which the second stream has passed.
        learned: Weights by their names in the block.
        options: Number of steps and their length, which goes down to zero.

    Returns:
        Squared errors of the outputs over all data, by rounding to the nearest and at last.
    """
    rules = [
        *((w.offset, options.lr, -LARGEST_OFFSET, LARGEST_OFFSET) for w in learned.values()),
        *((w.factors, options.minmax_lr, SMALLEST_FACTOR, 1.0) for w in learned.values()),
    ]
    parameters = [parameter for parameter, *_ in rules]
    before = lowest = total_error(block, learned)
    best = [p.detach().clone() for p in parameters]
    picked = _picked(block, options.batch_size)
    every = -(-options.iters // CHECKS)
    for step in range(options.iters):
        gradients = _gradients(block, learned, parameters, next(picked))
        left = 1 - step / options.iters
        with torch.no_grad():
            for (parameter, rate, least, most), g in zip(rules, gradients, strict=True):
                parameter.sub_(g.sign(), alpha=rate * left).clamp_(least, most)
        if (step + 1) % every == 0 or step + 1 == options.iters:
            error = total_error(block, learned)
            if error < lowest:
                lowest, best = error, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, found in zip(parameters, best, strict=True):
            parameter.copy_(found)
    return before, lowest


@torch.no_grad()
def total_error(block: Block, learned: Mapping[str, Learned]) -> float:
    """Return the squared error of the outputs of a block over all data."""
    values = {name: weight.value() for name, weight in learned.items()}
    return sum(float(_error(block, index, values)) for index in range(len(block)))


def _gradients(
    block: Block,
    learned: Mapping[str, Learned],
    parameters: list[torch.Tensor],
    batches: list[int],
) -> list[torch.Tensor]:
    """Return the gradients of the squared error over some batches, 0 of experts that saw none."""
    with torch.enable_grad():
        values = {name: weight.value() for name, weight in learned.items()}
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        for leaf in leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        for index in batches:
            error = _error(block, index, leaves)
            if error.requires_grad:  # not where a router sends all tokens to other experts
                torch.autograd.backward(error, inputs=list(leaves.values()))
        return list(
            torch.autograd.grad(
                list(values.values()),
                parameters,
                [leaf.grad for leaf in leaves.values()],
                allow_unused=True,
                materialize_grads=True,
            )
        )


def _error(block: Block, index: int, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the squared error of the outputs of a block for a batch, padding left out."""
    target, kept = block.target(index)
    change = block.call(index, values).float() - target.float()
    return (change if kept is None else change[kept.to(change.device)]).square().sum()


def _picked(block: Block, sequences: int) -> Iterator[list[int]]:
    """Yield batches for each step, as many as have so many sequences; each has its turn."""
    generator = torch.Generator().manual_seed(0)
    picked: list[int] = []
    count = 0
    while True:
        for index in torch.randperm(len(block), generator=generator).tolist():
            picked.append(index)
            count += len(block.target(index)[0])
            if count >= sequences:
                yield picked
                picked, count = [], 0


def _straight(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return rounded values with the gradient of what they were rounded from."""
    return rounded.float() + (exact - exact.detach())


ALGORITHM = Algorithm(check, apply, resolve=resolve)
