"""A small module written as one function of its members and an input."""

from torch import nn


class Net(nn.Module):
    """Children, parameters and a function of them and an input."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)
