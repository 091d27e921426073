"""Forwards that keep no graph."""

import torch

from quark.torch.graph.checkpointing import checkpointed


def test_gradients_are_those_of_a_plain_forward():
    """Also where a forward writes to its input, which the second run needs again."""
    runs = []
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def forward(x, *, bias):
        runs.append(torch.is_grad_enabled())
        x.relu_()
        return (x @ weight + bias).exp()

    found = []
    for call in (forward, checkpointed(forward)):
        x = torch.linspace(-1, 2, 8).view(2, 4).requires_grad_()
        bias = torch.full((4,), 0.5, requires_grad=True)
        loss = call(x * 1.0, bias=bias).square().sum()
        found.append(torch.autograd.grad(loss, (x, bias, weight)))
    assert runs == [True] * 3  # the second forward runs twice
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_second_run_without_gradients():
    runs = []
    with torch.no_grad():
        checkpointed(lambda x: runs.append(x) or x)(torch.ones(2))
    assert len(runs) == 1
