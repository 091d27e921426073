"""Aliases of parameters: tensors that hold a transposed, cast, sliced or shifted parameter."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from quark.torch.graph.movement_ops import is_move, move_labels, project_labels
from quark.torch.graph.trace import Op, Trace


class Alias(NamedTuple):
    """A tensor that holds elements of a parameter.

    Example: ``w`` of shape (2, 3), and its alias ``w.T[1:]`` of shape (2, 2). Element [0, 1] of
    the alias is w[1, 1]:

        coordinates[0]   [[0, 1], [0, 1]]   row of w
        coordinates[1]   [[1, 1], [2, 2]]   column of w

    Attributes:
        parameter: Name of the parameter.
        coordinates: One tensor per axis of the parameter, int64 in the shape of the alias: the
            index along this axis that each element comes from.
        offset: Constant that was added to the parameter.
    """

    parameter: str
    coordinates: tuple[torch.Tensor, ...]
    offset: float

    def match_axis(self, dim: int) -> tuple[int, torch.Tensor] | None:
        """Return the axis of the parameter that runs along a dimension, and its coordinates.

        Returns:
            None if no axis runs along the dimension, or several do.
        """
        matches = [
            (axis, vector)
            for axis, labels in enumerate(self.coordinates)
            if (vector := project_labels(labels, dim)) is not None
            and len(torch.unique(vector)) == len(vector)
        ]
        matches = [match for match in matches if len(match[1]) > 1] or matches
        return matches[0] if len(matches) == 1 else None


class Aliases:
    """All aliases of parameters in a trace, and the operations that read them.

    Attributes:
        by_number: Number of a tensor -> its alias.
        numbers: Parameter -> numbers of its aliases.
        readers: Parameter -> indices of the operations that compute with an alias of it.
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
            self._visit(index, op)

    def _add(self, number: int, alias: Alias) -> None:
        self.by_number[number] = alias
        self.numbers[alias.parameter].append(number)

    def _visit(self, index: int, op: Op) -> None:
        """Add the outputs of an operation as aliases, or the operation as a reader."""
        aliases = [self.by_number[v.number] for v in op.inputs if v.number in self.by_number]
        if not aliases:
            return
        alias, constant = aliases[0], _added_constant(op)
        if len(op.inputs) == 1 and is_move(op):
            number = op.inputs[0].number
            moved = [move_labels(op, {number: labels}) for labels in alias.coordinates]
            for value, *coordinates in zip(op.outputs, *moved, strict=True):
                self._add(value.number, alias._replace(coordinates=tuple(coordinates)))
        elif constant is not None:
            self._add(op.outputs[0].number, alias._replace(offset=alias.offset + constant))
        elif not op.is_empty:
            for name in {a.parameter for a in aliases}:
                self.readers[name].append(index)


def _coordinates(shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Return the coordinates of a whole tensor, as ``torch.meshgrid`` does, but expanded."""
    grid = []
    for axis, size in enumerate(shape):
        view = [1] * len(shape)
        view[axis] = size
        grid.append(torch.arange(size, device="cpu").view(view).expand(shape))
    return tuple(grid)


def _added_constant(op: Op) -> float | None:
    """Return the number that an operation adds to its only tensor, None if it does not."""
    if op.name != "add" or len(op.inputs) != 1:
        return None
    numbers = [a for a in op.args if isinstance(a, (int, float))]
    return float(numbers[0]) if len(numbers) == 1 and not op.kwargs else None
