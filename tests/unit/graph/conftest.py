"""Small modules written as one function of their parameters."""

import pytest
import torch
from torch import nn


class Net(nn.Module):
    """Children, parameters and a function of both and the input."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)


@pytest.fixture(scope="session")
def net():
    """Make a small module: a function of itself and x, and its members."""

    def net(function, **members):
        model = Net(function, **members).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter.detach(), mean=0.3, std=0.5)
        return model

    return net


@pytest.fixture(scope="session")
def data():
    """Input of six features."""
    return torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
