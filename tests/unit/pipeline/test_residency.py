"""Parameters that are in memory only while they are used."""

import pytest
import torch
from torch import nn

from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import around, iterate_parts, residency_of, resident
from quark.torch.pipeline.memory_limit import MemoryLimit
from quark.torch.pipeline.residency import Residency
from quark.torch.pipeline.scratch import Scratch
from quark.torch.pipeline.unit_cache import find_units


class Inner(nn.Module):
    """A model with a list of blocks, a tied head, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(4))
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.token
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


class Source:
    """The values of a model, and how often each was read."""

    def __init__(self, model):
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.reads = []

    def read(self, names):
        self.reads += names
        return {name: self.values[name].clone() for name in names}


IDS = torch.tensor([[0, 3, 5], [1, 2, 4]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Inner()


@pytest.fixture
def expected(model):
    with torch.no_grad():
        return model(IDS)


@pytest.fixture
def source(model, expected):
    return Source(model)


@pytest.fixture
def cache(model, source, tmp_path):
    return Residency(model, source, MemoryLimit(0, 0, None), Scratch(tmp_path))


def test_units_are_blocks_and_what_is_around_them(model):
    assert [(u.name, u.is_whole) for u in find_units(model)] == [
        ("", False),
        ("embed", True),
        ("blocks.0", True),
        ("blocks.1", True),
        ("blocks.2", True),
        ("head", True),
    ]
    assert [unit.name for unit in find_units(nn.Sequential(nn.Linear(2, 2)))] == [""]


def test_a_model_runs_with_one_unit_in_memory(model, cache, expected):
    with torch.no_grad():
        assert torch.equal(model(IDS), expected)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    # The parameter of the model stays while its forward runs, beside one unit.
    assert cache.peak <= model.token.nbytes + max(block, model.head.weight.nbytes)


def test_what_is_not_resident_has_shape_and_type_but_no_values(model, cache):
    weight = model.blocks[1].weight
    assert weight.shape == (4, 4) and weight.dtype == torch.float32
    assert weight.isnan().all() and weight.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        weight.data.copy_(torch.zeros(4, 4))


def test_a_tied_parameter_stays_one(model, cache, source):
    parameter = model.embed.weight
    with resident(model, "embed"):
        assert model.head.weight is parameter
        with resident(model, "head"):
            assert torch.equal(parameter, source.values["embed.weight"])
        assert torch.equal(parameter, source.values["embed.weight"])
    with resident(model, "blocks.0"):
        assert parameter.isnan().all()


def test_units_in_use_are_not_released(model, cache, source):
    with resident(model, "blocks.0.weight"), resident(model, "blocks.1"):
        assert torch.equal(model.blocks[0].bias, source.values["blocks.0.bias"])
        assert torch.equal(model.blocks[1].bias, source.values["blocks.1.bias"])


def test_the_least_recently_used_unit_is_released(model, cache, source):
    cache.limit = 2 * sum(p.nbytes for p in model.blocks[0].parameters())
    for name in ("blocks.0", "blocks.1", "blocks.0", "blocks.2"):
        with resident(model, name):
            pass
    held = [i for i in range(3) if not model.blocks[i].weight.isnan().any()]
    assert held == [0, 2]
    assert source.reads.count("blocks.0.weight") == 1


def test_changed_values_survive(model, cache, source):
    with resident(model, "blocks.0"):
        write_(model.blocks[0].weight, torch.full((4, 4), 2.0))
    with resident(model, "embed"):
        write_(model.embed.weight, torch.full((6, 4), 3.0))
    with resident(model, "blocks.1"):
        pass  # the others leave
    assert model.blocks[0].weight.isnan().all()
    with resident(model, "blocks.0", "head"):
        assert (model.blocks[0].weight == 2).all()
        assert torch.equal(model.blocks[0].bias, source.values["blocks.0.bias"])
        assert (model.head.weight == 3).all()


def test_the_order_of_axes_in_memory_survives(model, cache):
    with resident(model, "blocks.0"):
        model.blocks[0].weight.data = torch.randn(4, 4).T
        write_(model.blocks[0].weight, torch.arange(16.0).view(4, 4))
    cache.release()
    with resident(model, "blocks.0"):
        weight = model.blocks[0].weight
        assert weight.stride() == (1, 4)
        assert torch.equal(weight, torch.arange(16.0).view(4, 4))


def test_a_parameter_that_takes_the_place_of_another_survives(model, cache, source):
    with resident(model, "head"):
        model.head.weight = nn.Parameter(model.head.weight.detach() + 1)
    cache.release()
    with resident(model, ""):
        assert torch.equal(model.head.weight, source.values["embed.weight"] + 1)
        assert torch.equal(model.embed.weight, source.values["embed.weight"])


def test_changes_can_be_forgotten(model, cache, source, tmp_path, expected):
    for name in ("blocks.0", "blocks.1"):
        with resident(model, name):
            write_(model.get_parameter(f"{name}.weight"), torch.zeros(4, 4))
    cache.forget_changes()
    assert not list(tmp_path.iterdir())
    with torch.no_grad():
        assert torch.equal(model(IDS), expected)


def test_values_that_are_not_finite_are_named(model, cache, source):
    source.values["blocks.1.bias"][2] = torch.inf
    with torch.no_grad(), pytest.raises(ValueError, match=r"blocks\.1\.bias has NaN or infinite"):
        model(IDS)


def test_gradients_pass_a_unit_in_use(model, cache, source):
    x = torch.randn(2, 4, requires_grad=True)
    with resident(model, "blocks.0"):
        y = model.blocks[0](x).sum()
        (gradient,) = torch.autograd.grad(y, x)
    assert torch.equal(gradient, source.values["blocks.0.weight"].sum(0).expand(2, 4))


def test_parts_cover_each_module_once(model, cache):
    modules = [name for name, m in model.named_modules() if m._parameters]
    parts = list(iterate_parts(model))
    assert {name: sum(part.holds(name) for part in parts) for name in modules} == dict.fromkeys(
        modules, 1
    )
    assert around(model, ["blocks.0", "blocks.1", "blocks.2"]) == ["token", "embed", "head"]


def test_models_in_memory_are_one_part(model):
    assert residency_of(model) is None
    assert [part.name for part in iterate_parts(model)] == [""]
    assert around(model, ["blocks.0"]) == []
    with resident(model, "blocks.0"):
        assert not model.blocks[0].weight.isnan().any()
