"""What predictions lose for a relative error of a block's outputs, from a few measured units.

The ratio of both is nearly the same in all blocks: on a language model of 30 blocks it differs by
an eighth (standard deviation) from block to block, and by a fifth from layer to layer in a block.
So it is measured in a few blocks, from the first to the last, for two units of a usual error in
each, and lies on lines between these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

from quark.torch.graph.block_selection import is_inside
from quark.torch.statistics.block_errors import Unit

BLOCKS = 4  # of each module list, in which the ratio is measured
UNITS = 2  # of each of these blocks


def block_of(layer: str, blocks: Sequence[str]) -> str:
    """Return the block that holds a layer, "" if none does."""
    return next((block for block in blocks if is_inside(layer, block)), "")


def choose_units(blocks: Sequence[str], errors: Mapping[Unit, float]) -> list[Unit]:
    """Return the units to measure: those in the middle of the errors of a few blocks.

    Args:
        blocks: The blocks in the order of execution.
        errors: Unit to the relative error of its block, in the order of blocks.
    """
    inside = _units_by_block(blocks, errors)
    chosen = []
    for names in _lists(list(inside)):
        last = len(names) - 1
        for place in dict.fromkeys(round(last * i / (BLOCKS - 1)) for i in range(BLOCKS)):
            units = sorted(inside[names[place]], key=lambda unit: errors[unit])
            first = max(0, (len(units) - UNITS) // 2)
            chosen += units[first : first + UNITS]
    return sorted(chosen, key=list(errors).index)


def divergence_ratios(
    blocks: Sequence[str],
    errors: Mapping[Unit, float],
    measured: Mapping[Unit, float],
) -> dict[str, float]:
    """Return the divergence for a relative error of 1, by block, in nats per token.

    Args:
        blocks: The blocks in the order of execution.
        errors: Unit to the relative error of its block, in the order of blocks.
        measured: Unit to its measured divergence, nats per token, for those of ``choose_units``.
    """
    inside = _units_by_block(blocks, errors)
    ratios: dict[str, float] = {}
    for names in _lists(list(inside)):
        points = []
        for place, name in enumerate(names):
            units = [unit for unit in inside[name] if unit in measured]
            if units:
                total = sum(errors[unit] for unit in units)
                points.append((place, sum(measured[unit] for unit in units) / total))
        ratios |= {name: _between(points, place) for place, name in enumerate(names)}
    return ratios


def _units_by_block(blocks: Sequence[str], errors: Mapping[Unit, float]) -> dict[str, list[Unit]]:
    """Return the units that have an effect, by block."""
    inside: dict[str, list[Unit]] = defaultdict(list)
    for unit, error in errors.items():
        if error > 0:
            inside[block_of(unit[0], blocks)].append(unit)
    return dict(inside)


def _lists(blocks: Sequence[str]) -> list[list[str]]:
    """Return blocks by the module list that holds them, such as an encoder and a decoder."""
    lists: dict[str, list[str]] = defaultdict(list)
    for block in blocks:
        lists[block.rpartition(".")[0]].append(block)
    return list(lists.values())


def _between(points: Sequence[tuple[int, float]], place: int) -> float:
    """Return the value at a place on the lines between points, which are in order."""
    end = bisect_left([x for x, _ in points], place)
    if end == len(points):
        return points[-1][1]
    (x1, y1), (x0, y0) = points[end], points[max(0, end - 1)]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (place - x0) / (x1 - x0)
