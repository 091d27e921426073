"""Joint tuning of weights and ranges, block by block (EfficientQAT, arXiv 2407.11062, section 3.2).

The weights of a block, and the scales and zero points that round them, follow the gradient of the
squared error of its outputs, straight through the rounding, under AdamW. A scale has the gradient
of LSQ (arXiv 1902.08153): rounded minus exact steps inside of the range, the last code outside.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from quark.torch.algorithm.block_training import (
    TrainedWeight,
    compute_gradients,
    count_elements,
    sample_batches,
    straight_through,
    total_error,
)
from quark.torch.algorithm.layer_inputs import quantize_inputs
from quark.torch.algorithm.layers import check_weights_quantized
from quark.torch.algorithm.named_modules import has_part, warn_of_names
from quark.torch.algorithm.weight_rounding import iterate_blocks, select_by_block
from quark.torch.algorithm.weight_rounding import resolve as select_layers
from quark.torch.numerics.scales import round_scale, round_zero_point
from quark.torch.pipeline.block import Block, constant
from quark.torch.pipeline.chunks import Chunks
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.shapes import FLOAT32, BlockShape, DataShape, Work
from quark.torch.quantization.config.algo import BlockwiseJointTuningConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)

_SMALLEST = 2.0**-23  # share of a scale at the start that it keeps at least


def check(options: BlockwiseJointTuningConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized, or both learning rates are 0.
    """
    if not options.weight_lr and not options.qparam_lr:
        raise ValueError(f"{options.name}: weight_lr and qparam_lr are both 0, so nothing trains.")
    check_weights_quantized(options, layers)


def resolve(context: Context, options: BlockwiseJointTuningConfig) -> Collection[str]:
    """Raise if the options select no layer, or none of whose weights or ranges train.

    No input is rotated.

    Raises:
        ValueError: As in ``select_by_block``, or a list of parts of names selects no layer.
    """
    select_layers(context, options)
    layers = [name for block in select_by_block(context, options).values() for name in block]
    for field in ("trainable_modules", "quant_trainable_modules"):
        parts = getattr(options, field)
        warn_of_names(context, f"{options.name}: {field}", parts, has_part)
        if not any(_selects(parts, name) for name in layers):
            raise ValueError(
                f"{options.name}: {field}={parts} selects none of the layers to tune, such as "
                f"{layers[0]}. Leave it empty for all layers."
            )
    return ()


def apply(context: Context, options: BlockwiseJointTuningConfig) -> None:
    """Tune each unit of the model in turn; later ones receive its new outputs.

    Layers outside of units, and layers of which nothing trains, are later rounded to the nearest.
    Each sequence runs alone, so the batch size of the data does not change the result.
    """
    context = replace(context, batches=Chunks(context.batches, sequences=1))
    for block, layers in iterate_blocks(context, options, compare=True):
        with quantize_inputs(context, block.name, False):
            for index in range(len(block)):
                block.run_reference(index)
        context.compute_scales(layers)
        weights = {
            f"{name}.weight".removeprefix(f"{block.name}."): weight
            for name, layer in layers.items()
            if (weight := TunedWeight(name, layer, options)).parameters()
        }
        if not weights:
            continue
        with constant(block.module):
            before, after = tune(block, weights, options)
        logger.info("%s: squared error %.4g, to nearest %.4g", block.name, after, before)
        for weight in weights.values():
            weight.write()


class TunedWeight(TrainedWeight):
    """A weight that trains with the scales and zero points that round it.

    Args:
        name: Name of its layer.
        layer: The layer, with the scales to start from.
        options: Which parts train.

    Attributes:
        weight: The weight, float32; None if it does not train.
        scale: Scales, float32; None if ranges do not train.
        start: Value of the first code of each range, (qmin - zero point) · scale, in the unit of
            weights; None if ranges do not train or have no zero point.
    """

    def __init__(
        self, name: str, layer: FakeQuantizedLayer, options: BlockwiseJointTuningConfig
    ) -> None:
        super().__init__(layer)
        self.weight = self.scale = self.start = None
        if options.weight_lr and _selects(options.trainable_modules, name):
            self.weight = self._stage.values.clone().requires_grad_()
        trains = options.qparam_lr and _selects(options.quant_trainable_modules, name)
        if trains and not self._fixes_ranges:
            scale, zero_point = self._stage.scale.float(), self._stage.zero_point
            self.scale = scale.clone().requires_grad_()
            if zero_point is not None and not self._scheme.symmetric:
                start = (self._scheme.fmt.qmin - zero_point.float()) * scale
                self.start = start.requires_grad_()

    def parameters(self) -> list[torch.Tensor]:
        """Return what trains: the weight first, then its ranges."""
        return [x for x in (self.weight, *self.ranges()) if x is not None]

    def ranges(self) -> list[torch.Tensor]:
        """Return scales and starts, if they train."""
        return [x for x in (self.scale, self.start) if x is not None]

    def _values(self) -> torch.Tensor:
        values = self._stage.values if self.weight is None else self.weight
        return values if self._zeros is None else values.masked_fill(self._zeros, 0.0)

    def _qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point as they are stored, with their gradients."""
        first, zero, fmt = self._stage.scale.float(), self._stage.zero_point, self._scheme.fmt
        if self.scale is None:
            return first, zero
        sign = torch.where(first < 0, -1, 1)
        nonzero = sign * torch.maximum(sign * self.scale, first.abs() * _SMALLEST)
        to, axis, tensor_scale = self._scheme.scale, self._scheme.axis, self._stage.tensor_scale
        rounded = round_scale(nonzero.detach(), to, tensor_scale, axis, signs=first)
        scale = straight_through(nonzero, rounded)
        if self.start is None:
            return scale, zero
        exact = fmt.qmin - self.start / scale
        if self._scheme.float_zero_point:
            whole = round_zero_point(exact.detach(), scale.detach(), self._scheme)
        else:
            whole = exact.detach().round().clamp(fmt.qmin, fmt.qmax)
        return scale, straight_through(exact, whole)


def tune(
    block: Block, weights: Mapping[str, TunedWeight], options: BlockwiseJointTuningConfig
) -> tuple[float, float]:
    """Train weights and ranges of a block on the mean squared error of its outputs.

    Learning rates fall to ``1 / min_lr_factor`` of their start along a half cosine. The best epoch
    over all data is kept, or the start if none is better.

    Args:
        block: The block, whose second stream has passed it.
        weights: Weights by their names in the block.
        options: Number of epochs, learning rates and decay.

    Returns:
        Squared errors of the outputs over all data: rounded to the nearest, and tuned.
    """
    trained = weights.values()
    own = [w.weight for w in trained if w.weight is not None]
    ranges = [x for w in trained for x in w.ranges()]
    given: list[dict[str, Any]] = [
        {"params": own, "lr": options.weight_lr, "weight_decay": options.weight_decay},
        {"params": ranges, "lr": options.qparam_lr, "weight_decay": options.qparam_weight_decay},
    ]
    groups = [group for group in given if group["params"]]
    rates = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    parameters = [*own, *ranges]
    before = lowest = total_error(block, weights)
    best = [p.detach().clone() for p in parameters]
    elements = count_elements(block)
    per_epoch = max(1, len(elements) // options.batch_size)
    steps, batches = options.epochs * per_epoch, sample_batches(block, options.batch_size)
    for step in range(steps):
        chosen = next(batches)
        gradients = compute_gradients(block, weights, parameters, chosen)
        count = max(1, sum(elements[number] for number in chosen))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient / count
        torch.nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
        decay = (1 + math.cos(math.pi * step / steps)) / 2
        share = 1 / options.min_lr_factor
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (share + (1 - share) * decay)
        optimizer.step()
        if (step + 1) % per_epoch == 0:
            error = total_error(block, weights)
            if error < lowest:
                lowest, best = error, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, best, strict=True):
            parameter.copy_(value)
    return before, lowest


def _selects(filters: list[str], name: str) -> bool:
    """Whether a layer is selected: its name has one of the parts, or there are none."""
    return not filters or any(has_part(name, part) for part in filters)


def work(options: BlockwiseJointTuningConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: the graph of its weights and of a sequence, and the steps.

    Twenty tensors of the size of the weights: the trained ones, the best ones, gradients, two
    moments, rounded values, and the steps of rounding that the graph keeps.
    """
    graph = FLOAT32 * data.length * (16 * data.hidden + 4 * sum(x.outputs for x in block.layers))
    sequences = max(data.tokens / max(data.length, 1), 1)
    flops = 100.0 * options.epochs * max(1.0, sequences / options.batch_size) * block.elements
    passes = 3 + 4.0 * options.epochs
    return Work(20 * FLOAT32 * block.elements + graph, passes, flops, stores=5)


ALGORITHM = Algorithm(check, apply, resolve=resolve, work=work)
