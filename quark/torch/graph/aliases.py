"""Parameters as operations see them: transposed, cast, sliced, or with a constant added."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from quark.torch.graph.movement_ops import along, is_move, replay
from quark.torch.graph.trace import Op, Trace


class Alias(NamedTuple):
    """A tensor that holds elements of a parameter.

    Attributes:
        parameter: Name of the parameter.
        coordinates: For each axis of the parameter, int64 in the shape of the tensor: where along
            the axis each element comes from.
        offset: What was added to the parameter.
    """

    parameter: str
    coordinates: tuple[torch.Tensor, ...]
    offset: float

    def axis_along(self, dim: int) -> tuple[int, torch.Tensor] | None:
        """Return the axis of the parameter that a dimension runs along, and its coordinates.

        None if it runs along none, or along several.
        """
        found = [
            (axis, vector)
            for axis, marks in enumerate(self.coordinates)
            if (vector := along(marks, dim)) is not None
            and len(torch.unique(vector)) == len(vector)
        ]
        found = [f for f in found if len(f[1]) > 1] or found
        return found[0] if len(found) == 1 else None


class Aliases:
    """All tensors of a pass that hold a parameter, and who reads them.

    Attributes:
        by_number: Number of a tensor -> what it holds.
        numbers: Parameter -> the tensors that hold it.
        readers: Parameter -> indices of the operations that compute with it.
        shapes: Parameter -> its shape.
    """

    def __init__(self, trace: Trace) -> None:
        self.by_number: dict[int, Alias] = {}
        self.numbers: dict[str, list[int]] = defaultdict(list)
        self.readers: dict[str, list[int]] = defaultdict(list)
        self.shapes: dict[str, torch.Size] = {}
        values = {
            v.number: v for op in trace.ops for v in op.inputs if v.number in trace.parameters
        }
        for number, value in values.items():
            name = trace.parameters[number]
            self.shapes[name] = value.shape
            self._add(number, Alias(name, _coordinates(value.shape), 0.0))
        for index, op in enumerate(trace.ops):
            self._follow(index, op)

    def _add(self, number: int, alias: Alias) -> None:
        self.by_number[number] = alias
        self.numbers[alias.parameter].append(number)

    def _follow(self, index: int, op: Op) -> None:
        found = [self.by_number[v.number] for v in op.inputs if v.number in self.by_number]
        if not found:
            return
        alias, constant = found[0], _constant_added(op)
        if len(op.inputs) == 1 and is_move(op):
            number = op.inputs[0].number
            moved = [replay(op, {number: marks}) for marks in alias.coordinates]
            for value, *coordinates in zip(op.outputs, *moved, strict=True):
                self._add(value.number, alias._replace(coordinates=tuple(coordinates)))
        elif constant is not None:
            self._add(op.outputs[0].number, alias._replace(offset=alias.offset + constant))
        elif not op.is_idle:
            for name in {a.parameter for a in found}:
                self.readers[name].append(index)


def _coordinates(shape: torch.Size) -> tuple[torch.Tensor, ...]:
    grid = []
    for axis, size in enumerate(shape):
        view = [1] * len(shape)
        view[axis] = size
        grid.append(torch.arange(size).view(view).expand(shape))
    return tuple(grid)


def _constant_added(op: Op) -> float | None:
    """Return the number that is added to the only input."""
    if op.name != "add" or len(op.inputs) != 1:
        return None
    numbers = [a for a in op.args if isinstance(a, (int, float))]
    return float(numbers[0]) if len(numbers) == 1 and not op.kwargs else None
