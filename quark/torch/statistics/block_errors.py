"""Relative errors of the outputs of a block, under coarse rounding of each of its units.

A unit is a layer, or all experts of a layer. Blocks add to the hidden states that pass through the
model, and norms read these relative to their size. So what predictions lose is nearly proportional
to the error of a block's outputs, relative to the outputs, whichever layer of the block made it::

    mean over tokens of |y' - y|² / |y|²        y, y': outputs of the block, before and after

It takes a pass of a few tokens through the block for each unit, while the block is in memory.
Weights are rounded to two bits and to four: an error of queries and keys that changes which tokens
attention chooses does not grow with the error of these layers for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from quark.torch.algorithm.layers import output_error, to_matrix
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.block import Block
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.padding import padding, without_padding
from quark.torch.quantization.nn.quantizer import TensorQuantizer

COARSE, FINE = 2, 4  # bits
GROUP = 64  # group size of the rounding

Unit = tuple[str, ...]


class BlockError(NamedTuple):
    """The effect on its block of rounding the weights of one unit.

    Attributes:
        relative: Mean over tokens of the squared error of the outputs of the block, divided by the
            squares of these outputs.
        error: Squared error of the outputs of the unit itself, summed over all tokens of the data.
    """

    relative: float
    error: float


class BlockErrors(NamedTuple):
    """The effect of rounding a unit to two bits, and to four."""

    coarse: BlockError
    fine: BlockError


@torch.no_grad()
def measure_block_errors(
    block: Block,
    units: Iterable[Unit],
    layers: Mapping[str, FakeQuantizedLayer],
    grams: Mapping[str, Gram],
    tokens: int,
) -> dict[Unit, BlockErrors]:
    """Return the effect of rounding each unit of a block alone.

    Args:
        block: The block, whose data has run. Quantizers are switched off.
        units: Units of the block.
        layers: Layers of the block, with float weights.
        grams: Sums over the inputs of each layer, by name.
        tokens: Number of tokens of the block's data that are enough; chunks are not divided.
    """
    plain = dict(_first_outputs(block, tokens))

    def measure(unit: Unit, bits: int) -> BlockError:
        rounded = {name: round_coarsely(layers[name], bits) for name in unit}
        error = sum(weight_error(layers[n], weight, grams[n]) for n, weight in rounded.items())
        parameters = {f"{n[len(block.name) + 1 :]}.weight": w for n, w in rounded.items()}
        relative = [
            _relative_error(y, _own_tokens(block, index, block.call(index, parameters)))
            for index, y in plain.items()
        ]
        return BlockError(float(torch.cat(relative).mean()), error)

    return {unit: BlockErrors(measure(unit, COARSE), measure(unit, FINE)) for unit in units}


def _first_outputs(block: Block, tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Iterate over what the block returned for its first chunks, until they have enough tokens."""
    seen = 0
    for index in range(len(block)):
        y = _own_tokens(block, index, block.outputs(index))
        yield index, y
        seen += len(y)
        if seen >= tokens:
            return


def _own_tokens(block: Block, index: int, y: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a block without padding, (tokens, channels)."""
    with padding(block.masks(index)):
        return without_padding(y).reshape(-1, y.shape[-1])


def _relative_error(y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return |other - y|² / |y|² of each token, float64; 0 where both are 0."""
    before, after = y.double(), other.double()
    error = (after - before).square().sum(-1)
    return error / before.square().sum(-1).clamp_min(torch.finfo(torch.float64).tiny)


def coarse_spec(inputs: int, bits: int) -> QuantizationSpec:
    """Return how a weight with some inputs is rounded to a few bits."""
    size = GROUP if inputs % GROUP == 0 else inputs
    return QuantizationSpec(
        f"int{bits}",  # type: ignore[arg-type]
        qscheme="per_group",  # type: ignore[arg-type]
        ch_axis=-1,
        group_size=size,
        symmetric=True,
        is_dynamic=False,
    )


def round_coarsely(layer: FakeQuantizedLayer, bits: int) -> torch.Tensor:
    """Return the weight of a layer, rounded to a few bits."""
    weight = layer.weight.detach()
    rows = to_matrix(weight, layer.input_axis).clone(memory_format=torch.contiguous_format)
    quantizer = TensorQuantizer(coarse_spec(rows.shape[1], bits)).to(rows.device).eval()
    quantizer.observer(rows)
    quantizer.compute_scales(rows)
    moved = weight.movedim(layer.input_axis, -1)
    return quantizer.freeze_(rows).view(moved.shape).movedim(-1, layer.input_axis)


def round_to_nearest(layer: FakeQuantizedLayer) -> torch.Tensor:
    """Return the weight of a layer with final scales, rounded to the nearest values."""
    assert layer.weight_quantizer is not None
    return layer.weight_quantizer.freeze_(layer.weight.detach().clone())


def weight_error(layer: FakeQuantizedLayer, weight: torch.Tensor, gram: Gram) -> float:
    """Return the squared error of the outputs of a layer under another weight, over all tokens."""
    if gram.total is None:
        return 0.0
    change = weight.float() - layer.weight.detach().float()
    rows = to_matrix(change, layer.input_axis)
    return float(output_error(rows, gram.total.to(rows.device)))
