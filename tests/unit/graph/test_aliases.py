"""Aliases of a parameter: where their elements come from, and what was added to them."""

import pytest
from torch import nn

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.trace import trace


@pytest.mark.parametrize(
    ("view", "coordinates", "offset"),
    [
        (lambda w: w.T, ([0, 1], [0, 1, 2]), 0.0),
        (lambda w: w.double(), ([0, 1], [0, 1, 2]), 0.0),
        (lambda w: w[:, 1:] + 1, ([0, 1], [1, 2]), 1.0),
        (lambda w: w.flip(0), ([1, 0], [0, 1, 2]), 0.0),
        (lambda w: w[1].expand(4, 3), ([1], [0, 1, 2]), 0.0),
    ],
    ids=["transposed", "cast", "part with a constant", "reversed", "expanded"],
)
def test_forms_of_a_parameter(view, coordinates, offset):
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: view(layer.weight) * 2
    aliases = Aliases(trace(layer, lambda: layer(None)))
    last = aliases.by_number[aliases.numbers["weight"][-1]]
    assert last.offset == offset
    assert tuple(labels.unique().tolist() for labels in last.coordinates) == tuple(
        sorted(expected) for expected in coordinates
    )
    assert len(aliases.readers["weight"]) == 1
