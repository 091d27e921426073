"""Labels move as elements do, checked against the same operations of torch on values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quark.torch.graph.movement_ops import (
    is_move,
    labels_vary,
    move_labels,
    project_labels,
    unexpand_labels,
)
from quark.torch.graph.trace import trace

# Each takes a tensor of any shape with at least one axis, and only moves elements.
MOVES = {
    "transpose": lambda x: x.transpose(0, -1),
    "permute": lambda x: x.permute(*reversed(range(x.dim()))),
    "flat": lambda x: x.reshape(-1),
    "column": lambda x: x.reshape(-1, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "halves": lambda x: x[: (len(x) + 1) // 2],
    "every second": lambda x: x[::2],
    "first and last": lambda x: torch.stack((x[0], x[-1])),
    "repeated": lambda x: x.repeat_interleave(2, 0),
    "twice": lambda x: torch.cat((x, x.flip(0))),
    "rolled": lambda x: x.roll(1, 0),
    "chosen": lambda x: x[torch.arange(len(x)).flip(0)],
    "expanded": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "copied": lambda x: x.clone(),
    "parts exchanged": lambda x: torch.cat(x.split((len(x) + 1) // 2)[::-1]),
}


class Function(nn.Module):
    """A function of one tensor."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x.clone())  # so that x is the first tensor of the trace


def follow(function, x):
    """Label the elements of ``x`` 0, 1, 2 …; return the labels of the result of a function."""
    module = Function(function)
    record = trace(module, lambda: module(x))
    labels = {1: torch.arange(x.numel()).view(x.shape)}
    for op in record.ops:
        if any(value.number in labels for value in op.inputs):
            assert is_move(op), op.name
            moved = move_labels(op, labels)
            labels |= {v.number: m for v, m in zip(op.outputs, moved, strict=False)}
    (result,) = record.results
    return labels[result]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.sampled_from(sorted(MOVES)), min_size=1, max_size=5),
)
def test_labels_are_where_the_elements_are(shape, names):
    def moves(x):
        for name in names:
            x = MOVES[name](x)
        return x.clone()

    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    assert follow(moves, values).equal(moves(values).long())


def test_elements_that_are_written_into_a_tensor():
    def function(x):
        whole = torch.zeros(3, 4)
        whole[1:, ::2] = x
        return whole.clone()

    labels = follow(function, torch.ones(2, 2))
    assert labels.tolist() == [[-1, -1, -1, -1], [0, -1, 1, -1], [2, -1, 3, -1]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x.sum(0),
        lambda x: x.view(torch.int32),
        lambda x: x.sort().values,
        lambda x: x.cumsum(0),
    ],
    ids=["product", "sum", "other type", "sorted", "cumulative"],
)
def test_other_operations_are_no_moves(function):
    module = Function(function)
    record = trace(module, lambda: module(torch.ones(2, 2)))
    assert not all(map(is_move, record.ops))


def test_labels_along_a_dimension():
    labels = torch.tensor([4, 5]).expand(3, 2)
    assert [labels_vary(labels, dim) for dim in (0, 1)] == [False, True]
    assert unexpand_labels(labels).shape == (1, 2)
    assert project_labels(labels, -1).tolist() == [4, 5]
    assert project_labels(labels, 0) is None
    assert project_labels(torch.tensor(3), 0) is None
