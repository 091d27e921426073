"""Small nets, and their graphs before and after the passes."""

import pytest
import torch
from torch import nn

from tests.nets import Net


@pytest.fixture(scope="session")
def net():
    """Make a net in evaluation mode, with random parameters and statistics of batch norms."""

    def net(function, **members):
        model = Net(function, **members).eval()
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                nn.init.uniform_(tensor, 0.2, 3.0)
            elif tensor.is_floating_point():
                nn.init.normal_(tensor, mean=0.2, std=0.5)
        return model

    return net


@pytest.fixture(scope="session")
def export():
    """Export a model as a graph."""

    def export(model, *inputs, **options):
        return torch.export.export(model, inputs, **options).module()

    return export


@pytest.fixture(scope="session")
def operations():
    """Count the operations that a graph calls, by name: {"conv2d": 2, "relu": 1}."""

    def operations(graph):
        counts = {}
        for node in graph.graph.nodes:
            if node.op == "call_function":
                name = node.target._schema.name.removeprefix("aten::")
                counts[name] = counts.get(name, 0) + 1
        return counts

    return operations


@pytest.fixture
def image():
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(3))
