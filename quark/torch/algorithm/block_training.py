"""Training of the weights of a block until it returns what it returns in the float model.

Each sequence is a batch of its own, and gradients are summed by a fixed tree over batches, so the
result does not depend on the number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

from quark.torch.algorithm.layers import freeze
from quark.torch.graph.parameter_writes import write_
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import fake_quantize
from quark.torch.pipeline.accumulators import Sum
from quark.torch.pipeline.block import Block
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.reducer import Reducer
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer


class TrainedWeight(ABC):
    """A rounded weight that depends on parameters.

    Ranges stay fixed where scales are powers of two, which small changes do not reach, and where
    one scale belongs to the whole tensor, which layers that are served together may share.

    Args:
        layer: Its layer, with the scales to start from.
    """

    def __init__(self, layer: FakeQuantizedLayer) -> None:
        quantizer = layer.weight_quantizer
        assert quantizer is not None
        self._layer, self._quantizer = layer, quantizer
        self._stage = stage = quantizer.last_stage(layer.weight)
        self._scheme = scheme = stage.scheme
        self._blocks = scheme.blocks(stage.values.shape)
        self._zeros = stage.values == 0 if layer.keeps_zeros else None
        self._fixes_ranges = scheme.scales_by_powers or scheme.qscheme is QSchemeType.per_tensor

    @abstractmethod
    def _values(self) -> torch.Tensor:
        """Return the weight before it is rounded, with its gradient if it trains."""

    @abstractmethod
    def _qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point, rounded to their stored types, with gradients."""

    def _move(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the values that are rounded, given those in units of the scale."""
        return steps

    def value(self) -> torch.Tensor:
        """Return the rounded weight, with gradients with respect to the parameters."""
        scheme, values = self._scheme, self._values()
        scale, zero_point = self._qparams()
        by = self._expand(scale)
        steps = values / by if scheme.divides else values * by.reciprocal()
        # Values outside of the range move with the zero point, values inside do not. `shift` is 0
        # and has the gradient of the zero point. Clamped values have no gradient with respect to
        # `steps + shift`, so `- shift` remains; elsewhere both cancel.
        # Example: codes 0 … 15, zero point 3, steps -5 -> code clamped to 0, value 0 - 3 = -3,
        # whose derivative with respect to the zero point is -1.
        shift: torch.Tensor | float = 0.0
        if zero_point is not None and zero_point.requires_grad:
            shift = self._expand(zero_point - zero_point.detach())
        ones = torch.ones_like(scale)
        codes = fake_quantize(self._move(steps) + shift, ones, zero_point, scheme) - shift
        return (codes * by * self._stage.unit).to(self._layer.weight.dtype)

    @torch.no_grad()
    def write(self) -> None:
        """Write the rounded weight and its scales to the layer, and freeze it."""
        scale, zero_point = self._qparams()
        old = self._stage.zero_point
        if zero_point is not None and old is not None:
            zero_point = zero_point.to(old.dtype)
        weight = self.value()
        self._quantizer.set_last_stage_scale(scale.to(self._stage.scale.dtype), zero_point)
        write_(self._layer.weight, weight)
        freeze(self._layer)

    def _expand(self, x: torch.Tensor) -> torch.Tensor:
        """Expand values of scale blocks to the shape of the weight."""
        whole = self._blocks.spread(x).expand(self._blocks.view)
        return self._blocks.join(whole).reshape(self._stage.values.shape)


@torch.no_grad()
def total_error(block: Block, weights: Mapping[str, TrainedWeight]) -> float:
    """Return the squared error of the outputs of a block over all data."""
    values = {name: weight.value() for name, weight in weights.items()}
    errors = [float(_measure_error(block, index, values)) for index in range(len(block))]
    return sum(_gather(block, errors).values())


def compute_gradients(
    block: Block,
    weights: Mapping[str, TrainedWeight],
    parameters: list[torch.Tensor],
    batches: list[int],
) -> list[torch.Tensor]:
    """Return the gradients of the squared error over batches; 0 for experts without tokens."""
    # Two steps, so that memory holds the graph of one batch: errors -> rounded weights, summed
    # over batches in `leaves`; then rounded weights -> offsets and factors, once.
    reducer = Reducer(weights, lambda leaf: Sum())
    with torch.enable_grad():
        values = {name: weight.value() for name, weight in weights.items()}
        for indices in block.reduce(reducer):
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            counts = {index: batches.count(block.number(index)) for index in indices}
            for index in (index for index, n in counts.items() for _ in range(n)):
                error = _measure_error(block, index, leaves)
                if error.requires_grad:  # False if a router sends all tokens to other experts
                    torch.autograd.backward(error, inputs=list(leaves.values()))
            for name, leaf in leaves.items():
                reducer.parts[name].total = leaf.grad
        gradients = [
            torch.zeros_like(value) if (total := reducer.totals[name].total) is None else total
            for name, value in values.items()
        ]
        return list(
            torch.autograd.grad(
                list(values.values()),
                parameters,
                gradients,
                allow_unused=True,
                materialize_grads=True,
            )
        )


def _measure_error(block: Block, index: int, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the squared error of the outputs of a block for a batch, without padding."""
    target, mask = block.reference_output(index)
    change = block.call(index, values).float() - target.float()
    return (change if mask is None else change[mask.to(change.device)]).square().sum()


def _gather(block: Block, values: list[float]) -> dict[int, float]:
    """Return the values of the batches of all processes by their number in the data, in order."""
    own = {block.number(index): value for index, value in enumerate(values)}
    every = [(int(n), value) for other in processes().exchange(own) for n, value in other.items()]
    return dict(sorted(every))


def count_elements(block: Block) -> dict[int, int]:
    """Return the number of compared values of each batch of all processes, by its number."""
    counts = []
    for index in range(len(block)):
        target, mask = block.reference_output(index)
        counts.append(float((target if mask is None else target[mask.to(target.device)]).numel()))
    return {number: int(count) for number, count in _gather(block, counts).items()}


def _count_rows(block: Block) -> dict[int, int]:
    """Return the number of sequences of each batch of all processes, by its number in the data."""
    counts = [float(len(block.reference_output(index)[0])) for index in range(len(block))]
    return {number: int(count) for number, count in _gather(block, counts).items()}


def sample_batches(block: Block, sequences: int) -> Iterator[list[int]]:
    """Yield numbers of batches with at least so many sequences together, epoch after epoch."""
    generator = torch.Generator().manual_seed(0)
    rows, sample = _count_rows(block), list[int]()
    numbers = list(rows)
    count = 0
    while True:
        for place in torch.randperm(len(numbers), generator=generator, device="cpu").tolist():
            sample.append(numbers[place])
            count += rows[numbers[place]]
            if count >= sequences:
                yield sample
                sample, count = [], 0


def straight_through(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return rounded values with the gradient of the exact ones (straight-through estimator)."""
    return rounded.float() + (exact - exact.detach())
