"""Weights in the order in which oneDNN multiplies bfloat16, in memory that kernels write to.

Torch has such weights for compiled graphs: opaque tensors that ``_reorder_linear_weight`` makes.
Their memory is written anew for each weight. The order is no promise of oneDNN, so it is proved:
for each shape, torch brings a known weight in order, and every number of it must be where
``native_tiles`` would write it. oneDNN brings a weight in rows to this order at each product.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from quark.torch.numerics.native.compilation import array
from quark.torch.quantization.nn.products.native_tiles import PAIR, TILE

logger = logging.getLogger(__name__)

MULTIPLE = 32  # inputs: oneDNN fills up others with zeros
_BATCH = 128  # rows that oneDNN orders a weight for; it takes the same order for any number
_MOST = 1 << 27  # bytes that are kept for all shapes
_LONG = 4096  # calls without use after which the memory of a shape may go to others
_PERIOD = 251  # of the known weight: prime, and exact in bfloat16


class Tiles(NamedTuple):
    """Memory of a weight.

    Attributes:
        weight: The weight as torch multiplies it, (outputs, inputs).
        pairs: Its memory, pairs of bits of bfloat16, int32 (tiles, pairs, 64).
    """

    weight: torch.Tensor
    pairs: Any

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (rows, inputs), bfloat16, and the weight."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, None, "none", [], ""
        )
        return product


class _Kept(threading.local):
    """Memory of this thread by shape, None where the order is another one."""

    def __init__(self) -> None:
        self.shapes: dict[tuple[int, int], Tiles | None] = {}
        self.used: dict[tuple[int, int], int] = {}  # number of the last call for a shape
        self.calls = 0

    def make_room(self, size: int) -> bool:
        """Return whether memory of ``size`` bytes may be added; drop shapes without use for long.

        Those of the layers of one model are used in turn, so none of them is dropped for another.
        """
        total: int = sum(tiles.pairs.nbytes for tiles in self.shapes.values() if tiles)
        for shape, call in [*self.used.items()]:
            tiles = self.shapes[shape]
            if total + size > _MOST and tiles and self.calls - call > _LONG:
                total -= tiles.pairs.nbytes
                del self.shapes[shape], self.used[shape]
        return total + size <= _MOST


_KEPT = _Kept()


def take_tiles(outputs: int, inputs: int) -> Tiles | None:
    """Return memory of a weight of a shape, with any values.

    The next call for the shape returns the same memory.

    Returns:
        The memory; None if torch has no such weights, or too much is kept for other shapes.
    """
    shape, has_onednn = (outputs, inputs), torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()
    if inputs % MULTIPLE or not has_onednn:
        return None
    _KEPT.calls += 1
    if shape not in _KEPT.shapes:
        if not _KEPT.make_room(2 * -(-outputs // TILE) * TILE * inputs):
            return None
        _KEPT.shapes[shape] = _make(outputs, inputs)
    _KEPT.used[shape] = _KEPT.calls
    return _KEPT.shapes[shape]


def _make(outputs: int, inputs: int) -> Tiles | None:
    try:
        with torch.inference_mode(False):  # whoever takes it next may be in another mode
            return _proved(_known_weight(outputs, inputs))
    except (AttributeError, RuntimeError) as error:
        _refuse(str(error).split("\n")[0])
        return None


def _proved(known: torch.Tensor) -> Tiles | None:
    weight = torch.ops.mkldnn._reorder_linear_weight(known, _BATCH)
    outputs, inputs = known.shape
    shape = (-(-outputs // TILE), inputs // PAIR, TILE)
    size, stored = 4 * shape[0] * shape[1] * shape[2], torch.ops.mkldnn._nbytes(weight)
    if weight.layout is not torch._mkldnn or stored != size:  # type: ignore[attr-defined]
        _refuse(f"a weight of {outputs} × {inputs} takes {stored} bytes, and not {size}")
        return None
    memory = (ctypes.c_int32 * (size // 4)).from_address(torch.ops.mkldnn.data_ptr(weight))
    pairs = np.ctypeslib.as_array(memory).reshape(shape)
    for tile, rows in zip(pairs, torch.split(known, TILE), strict=True):
        if not np.array_equal(tile[None], in_tiles(rows)):
            _refuse(f"the order of a weight of {outputs} × {inputs} is another one")
            return None
    return Tiles(weight, pairs)


def _known_weight(outputs: int, inputs: int) -> torch.Tensor:
    """Return a weight whose neighbours differ, with numbers that bfloat16 holds exactly."""
    known = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cpu")
    columns = torch.arange(inputs, device="cpu")
    for start, rows in zip(range(0, outputs, TILE), torch.split(known, TILE), strict=True):
        row = torch.arange(start, start + len(rows), device="cpu")[:, None]
        rows.copy_((row * 7 + columns * 31 + row * columns) % _PERIOD)
    return known


def in_tiles(weight: torch.Tensor) -> Any:
    """Return a weight (outputs, inputs) in bfloat16 as pairs in tiles, filled up with zeros.

    Example: the first number of the second pair of a tile is of its first output and third input.
    """
    outputs, inputs = weight.shape
    tiles = -(-outputs // TILE)
    bits = np.zeros((tiles * TILE, inputs), np.int16)
    bits[:outputs] = array(weight.contiguous())
    pairs = bits.view(np.int32).reshape(tiles, TILE, inputs // PAIR)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1))


def _refuse(problem: str) -> None:
    logger.info("Weights are not multiplied in the order of oneDNN: %s.", problem)
