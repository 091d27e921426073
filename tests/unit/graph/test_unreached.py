"""Experts that no token chose take part like those that some chose."""

import pytest
import torch
from torch import nn

from quark.torch.graph.discovery import discover
from quark.torch.graph.unreached import find_counterparts, iterate_pairings, swap_parameters


class Experts(nn.Module):
    """A norm, and experts of which only the chosen ones run."""

    def __init__(self, chosen, odd=None):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(6, 9 if e == odd else 8), "down": nn.Linear(8, 6)})
            for e in range(5)
        )
        self.chosen = chosen
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter.detach(), mean=0.5, std=0.3)

    def forward(self, x):
        y = self.norm(x)
        for e in self.chosen:
            x = x + self.experts[e]["down"](self.experts[e]["up"](y).relu())
        return x


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [1, 3], [4]])
def test_all_experts_take_part(data, unchanged, chosen):
    model = Experts(chosen)
    with unchanged(model):
        groups = discover(model, data).groups
    norm, *experts = groups
    assert norm.producer == "norm"
    assert sorted(norm.consumers) == [f"experts.{e}.up" for e in range(5)]
    assert sorted(norm.unreached) == [f"experts.{e}.up" for e in range(5) if e not in chosen]
    assert sorted(g.producer for g in experts) == sorted(norm.consumers)
    assert {g.producer for g in experts if g.unreached} == set(norm.unreached)


def test_what_is_told_of_experts_that_did_not_run_is_right(data):
    model = Experts([2])
    everyone = Experts(range(5))
    everyone.load_state_dict(model.state_dict())
    before = everyone(data)
    for group in discover(model, data).groups:
        group.apply_(everyone, torch.linspace(0.3, 3, group.size))
    torch.testing.assert_close(everyone(data), before, rtol=1e-10, atol=1e-10)


def test_an_expert_unlike_the_others_prevents_what_it_may_read(data):
    structure = discover(Experts([0, 1], odd=4), data)
    assert "norm" not in {group.producer for group in structure.groups}
    reasons = {r.producer: r.reason for r in structure.rejected}
    assert "experts.4.up.weight was not read" in reasons["norm"]


def test_every_one_gets_a_turn_in_the_place_of_another(data):
    model = Experts([1, 3])
    groups = discover(model, data).groups
    read = [n for n, _ in model.named_parameters() if ".1." in n or ".3." in n]
    counterparts = find_counterparts(model, read)
    assert counterparts == {f"experts.{e}": ("experts.1", "experts.3") for e in (0, 2, 4)}
    pairs = list(iterate_pairings(counterparts, groups))
    assert [len(p) for p in pairs] == [2, 1]
    assert list(iterate_pairings(counterparts, [])) == []
    assert {u for p in pairs for u in p} == set(counterparts)
    weights = [e["up"].weight.clone() for e in model.experts]
    with swap_parameters(model, pairs[0]):
        for unreached, seen in pairs[0].items():
            moved = model.get_submodule(seen)["up"].weight
            assert torch.equal(moved, weights[int(unreached[-1])])
    assert all(torch.equal(e["up"].weight, w) for e, w in zip(model.experts, weights, strict=True))
