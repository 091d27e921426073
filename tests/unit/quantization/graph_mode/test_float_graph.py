import pytest
import torch
from torch import fx, nn

from quark.torch.quantization.graph_mode.float_graph import (
    independent_copy,
    rewrite,
    start_proof,
)
from tests.unit.quantization.graph_mode.networks import export, images, network


class Wrapped(nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        return self.function(self, x)


def graph_of(function, x=None):
    return export(Wrapped(function).eval(), torch.randn(3, 4) if x is None else x)


def rewritten(graph, x):
    copied = independent_copy(graph)
    return rewrite(copied, start_proof(copied, [x]))


def add_twice(self, x):
    y = x * 2
    y.add_(x)
    y.relu_().mul_(3)
    return y + 1


def write_a_flat_view(self, x):
    return (x * 2).flatten().relu_().reshape(3, 4)


def write_the_input(self, x):
    return x.relu_() + x


@pytest.mark.parametrize("function", [add_twice, write_a_flat_view])
def test_operators_in_place_return_new_tensors(function):
    graph = graph_of(function)
    x = torch.randn(3, 4)
    given = x.clone()
    copied = rewritten(graph, x)
    assert all(
        not n.target._schema.is_mutable for n in copied.graph.nodes if hasattr(n.target, "_schema")
    )
    expected = function(graph, x.clone())
    assert torch.equal(copied(x), expected)
    assert torch.equal(x, given)


def write_a_part(self, x):
    y = x * 2
    y[:, :2].mul_(5)
    return y


def write_behind_a_view(self, x):
    y = x * 2
    view = y.t()
    y.add_(1)
    return view


def write_a_buffer(self, x):
    self.state.add_(1)
    return x + self.state


@pytest.mark.parametrize(
    "function", [write_a_part, write_behind_a_view, write_a_buffer, write_the_input]
)
def test_writes_that_others_read_are_refused(function):
    with pytest.raises(ValueError, match=r"writes into .*run_decompositions"):
        rewritten(graph_of(function), torch.randn(3, 4))


@pytest.mark.parametrize("function", [write_a_part, write_behind_a_view])
def test_the_remedy_works(function):
    model, x = Wrapped(function).eval(), torch.randn(3, 4)
    graph = torch.export.export(model, (x,)).run_decompositions({}).module()
    assert torch.equal(rewritten(graph, x)(x), model(x))


def test_graphs_of_training_are_refused():
    model = network("mobilenet").train()
    with pytest.raises(ValueError, match=r"batch_norm\) is in training mode: call model.eval"):
        independent_copy(export(model))


def test_graphs_without_shapes_are_refused():
    graph = fx.symbolic_trace(network("unet"))
    with pytest.raises(ValueError, match="no shapes"):
        independent_copy(graph)


def test_the_copy_takes_any_batch_and_changes_its_mode():
    model = network("unet")
    copied = independent_copy(export(model))
    x = images(1, (5, 3, 16, 16))[0]
    assert torch.equal(copied(x), model(x))
    assert copied.train().training and not copied.eval().training
