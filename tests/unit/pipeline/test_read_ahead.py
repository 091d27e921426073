"""The next unit is read by a thread while one is worked on: the same values, in time, in bounds."""

import threading

import pytest
import torch
from torch import nn

from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import resident
from quark.torch.pipeline.memory_limit import MemoryLimit
from quark.torch.pipeline.read_ahead import ReadAhead
from quark.torch.pipeline.residency import Residency
from quark.torch.pipeline.scratch import Scratch

BLOCKS, SIZE = 6, 4 * (4 * 4 + 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(BLOCKS)])

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


class Source:
    """The values of a model, which thread read each, and an event for each that was read."""

    def __init__(self, model):
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.threads = {name: [] for name in self.values}
        self.events = {name: threading.Event() for name in self.values}

    def read(self, names):
        values = {name: self.values[name].clone() for name in names}
        for name in names:
            self.threads[name].append(threading.current_thread().name)
            self.events[name].set()
        return values


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def open_residency(model, tmp_path):
    def open_residency(units):
        source = Source(model)
        return source, Residency(
            model, source, MemoryLimit(units * SIZE, 0, None), Scratch(tmp_path)
        )

    return open_residency


def run(model):
    with torch.no_grad():
        return model(torch.arange(8.0).view(2, 4))


@pytest.mark.parametrize("units", [0, 2, 3, 4, 99])
def test_values_and_bound(units, model, open_residency):
    expected = run(model)
    source, residency = open_residency(units)
    for _ in range(3):
        assert torch.equal(run(model), expected)
    assert residency.peak <= max(units, 1) * SIZE
    is_ahead = [any("read-ahead" in t for t in threads) for threads in source.threads.values()]
    assert any(is_ahead) == (units >= 2)
    assert all(is_ahead[2:]) == (units >= 3)  # but the first block
    if units > BLOCKS:
        assert {len(threads) for threads in source.threads.values()} == {1}


def test_the_next_block_is_read_while_one_runs(model, open_residency):
    source, _ = open_residency(3)
    waited = []

    def wait(block):
        waited.append(source.events[f"blocks.{block}.weight"].wait(10))

    for number in range(BLOCKS - 1):
        model.blocks[number].register_forward_hook(lambda *_, n=number: wait(n + 1))
    run(model)
    assert waited == [True] * (BLOCKS - 1)
    main = threading.current_thread().name
    assert source.threads["blocks.0.weight"] == [main]
    assert all(main not in source.threads[f"blocks.{i}.bias"] for i in range(1, BLOCKS))


def test_changed_values_are_not_those_of_the_source(model, open_residency):
    source, residency = open_residency(3)
    with resident(model, "blocks.1"):
        write_(model.blocks[1].weight, torch.eye(4))
    residency.release()
    source.threads["blocks.1.weight"].clear()
    with resident(model, "blocks.0"):
        pass
    with resident(model, "blocks.1"):
        assert torch.equal(model.blocks[1].weight, torch.eye(4))
        assert torch.equal(model.blocks[1].bias, source.values["blocks.1.bias"])
    assert source.threads["blocks.1.weight"] == []


def test_another_order_is_learned(model, open_residency):
    source, residency = open_residency(3)
    for _ in range(2):
        source.threads["blocks.5.bias"].clear()
        for name in ("blocks.0", "blocks.5", "blocks.2"):
            with resident(model, name):
                pass
        residency.release()
    assert [name.partition("_")[0] for name in source.threads["blocks.5.bias"]] == ["read-ahead"]


def test_a_value_that_is_not_finite_is_refused_when_it_is_used(model, open_residency):
    source, _ = open_residency(3)
    source.values["blocks.2.bias"][1] = torch.nan
    with resident(model, "blocks.1"):
        pass
    with pytest.raises(ValueError, match=r"blocks\.2\.bias has NaN"), resident(model, "blocks.2"):
        pass


def test_what_is_not_taken_is_dropped(model):
    source = Source(model)
    ahead = ReadAhead(source, torch.device("cpu"))
    ahead.begin(["blocks.0.weight"])
    ahead.begin(["blocks.1.weight"])
    assert ahead.take("blocks.0.weight") is None
    assert torch.equal(ahead.take("blocks.1.weight"), source.values["blocks.1.weight"])
    assert ahead.take("blocks.1.weight") is None
