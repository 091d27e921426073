"""Small modules written as one function of their parameters."""

import pytest
import torch
from torch import nn

from tests.nets import Net


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
