"""The flow of factors against numbers: divide the rows of a weight, and compare every result."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.rescaling.factor_flow import FactorFlow
from quark.torch.graph.trace import trace

FACTORS = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64)


def flow_of(model, x, parameter="layer.weight"):
    """Propagate the factors of the rows of a parameter through a pass."""
    record = trace(model, lambda: model(x))
    flow = FactorFlow(Aliases(record), parameter, 0)
    for index, op in enumerate(record.ops):
        if any(value.number in flow.flows for value in op.inputs):
            flow.propagate(index, op)
    (result,) = record.results
    return flow, flow.flows.get(result)


@torch.no_grad()
def divided(model, x):
    """The output with each row of the weight divided by its factor."""
    weight = model.layer.weight
    before = weight.clone()
    weight /= FACTORS[:, None]
    out = model(x)
    weight.copy_(before)
    return out


def heads(y):
    """(3, 5, 4) -> (3, 2, 5, 2): two heads of two values."""
    return y.view(3, 5, 2, 2).transpose(1, 2)


def attend(net, x, y):
    query = torch.ones(3, 6, 5, 2, dtype=x.dtype)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        values = heads(y).repeat_interleave(3, 1)
        return F.scaled_dot_product_attention(query, query, values)


PROPORTIONAL = {
    "itself": lambda net, x, y: y.clone(),
    "relu": lambda net, x, y: y.relu(),
    "negative": lambda net, x, y: -y,
    "square": lambda net, x, y: y**2,
    "cube": lambda net, x, y: y * y * y,
    "gate": lambda net, x, y: y * torch.sigmoid(x[..., :4]),
    "quotient": lambda net, x, y: y / 8,
    "heads": lambda net, x, y: heads(y).clone(),
    "attention": attend,
    "rows of another product": lambda net, x, y: x.mT @ y,
}


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_results_are_proportional_to_the_factors_of_their_labels(net, data, name):
    model = net(
        lambda net, x: PROPORTIONAL[name](net, x, net.layer(x)), layer=nn.Linear(6, 4, bias=False)
    )
    flow, result = flow_of(model, data)
    assert not flow.stopped.any(), flow.reason
    labels = result.labels.expand(model(data).shape)
    assert (labels >= 0).all()
    expected = model(data) * FACTORS[labels] ** -result.power
    torch.testing.assert_close(divided(model, data), expected)


STOPPED = {
    "tanh": (lambda net, x, y: y.tanh(), "tanh"),
    "sum": (lambda net, x, y: y.sum(-1), "sum"),
    "softmax": (lambda net, x, y: y.softmax(-1), "softmax"),
    "residual": (lambda net, x, y: y + x[..., :4], "is added to another tensor"),
    "divisor": (lambda net, x, y: x[..., :4] / y, "divides something"),
    "fraction": (lambda net, x, y: y**0.5, "pow"),
    "layer norm": (lambda net, x, y: F.layer_norm(y, (4,)), "is normalized"),
}


@pytest.mark.parametrize("name", STOPPED)
def test_operations_that_stop_factors(net, data, name):
    function, reason = STOPPED[name]
    model = net(lambda net, x: function(net, x, net.layer(x)), layer=nn.Linear(6, 4, bias=False))
    flow, _ = flow_of(model, data)
    assert flow.stopped.all()
    assert reason in flow.reason


def test_the_bias_is_divided_and_the_next_layer_multiplied(net, data):
    model = net(lambda net, x: net.next(net.layer(x)), layer=nn.Linear(6, 4), next=nn.Linear(4, 2))
    flow, result = flow_of(model, data)
    assert result is None
    assert not flow.stopped.any()
    (bias,) = flow.biases["layer.bias"].values()
    (use,) = flow.consumers["next.weight"].values()
    assert (bias.power, use.power, use.axis) == (-1, 1, 1)
    before = model(data)
    with torch.no_grad():
        model.layer.weight /= FACTORS[:, None]
        model.layer.bias *= FACTORS[bias.labels] ** bias.power
        model.next.weight *= FACTORS[use.labels] ** use.power
    torch.testing.assert_close(model(data), before)


def test_parts_that_are_stopped_stop_no_others(net, data):
    def function(net, x):
        y = net.layer(x)
        return net.next(torch.cat((y[..., :1].tanh(), y[..., 1:]), -1))

    model = net(function, layer=nn.Linear(6, 4, bias=False), next=nn.Linear(4, 2))
    flow, _ = flow_of(model, data)
    assert flow.stopped.tolist() == [True, False, False, False]
