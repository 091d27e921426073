"""Sensitivities: calls that begin at a block, and models in which they cannot."""

import logging
from contextlib import nullcontext

import pytest
import torch

from quark.torch.statistics import sensitivities
from quark.torch.statistics.collection import collect_statistics
from quark.torch.statistics.sensitivities import _BlockOutputs, predict
from tests.models.architectures import tokens, varied


class _Remembering(torch.nn.Module):
    """A block that keeps what it returned."""

    def __init__(self, block):
        super().__init__()
        self.block, self.kept = block, None

    def forward(self, x, *args, **kwargs):
        self.kept = self.block(x, *args, **kwargs)
        return self.kept


class _Reading(torch.nn.Module):
    """A block that also reads what another block keeps."""

    def __init__(self, block, source):
        super().__init__()
        self.block, self._source = block, [source]

    def forward(self, x, *args, **kwargs):
        return self.block(x, *args, **kwargs) + self._source[0].kept


def with_memory(model):
    """Let the last block of a model read what the first one kept."""
    layers = model.model.layers
    layers[0] = _Remembering(layers[0])
    layers[-1] = _Reading(layers[-1], layers[0])
    return model


def probes_of(model, batches):
    return collect_statistics(model, batches, probes=2).probes


def all_blocks_run(monkeypatch):
    """Let no call begin at a block."""
    monkeypatch.setattr(_BlockOutputs, "beginning_at", lambda *_: nullcontext())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_calls_that_begin_at_a_block_have_the_same_bits(name, monkeypatch):
    data = [tokens(), tokens().flip(1)]
    found = probes_of(varied(name), data)
    all_blocks_run(monkeypatch)
    assert found == probes_of(varied(name), data)


@pytest.mark.parametrize("remembers", [False, True])
def test_what_a_later_block_reads_of_an_earlier_one_is_not_left_out(remembers, build, batches):
    model = build(num_hidden_layers=3)
    model = with_memory(model) if remembers else model
    runs, calls = [], [*batches[:1], batches[0].flip(1)]
    with torch.no_grad(), _BlockOutputs(model, [f"model.layers.{i}" for i in range(3)]) as outputs:
        outputs.prove(calls[0])
        expected = [outputs.record(call) for call in calls]
        model.model.layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(2))
        with outputs.beginning_at("model.layers.2", 0):
            assert torch.equal(predict(model, calls[0]), expected[0])
    assert (2 in runs) == remembers


def test_earlier_blocks_do_not_run(build, batches):
    """Of two blocks with seven layers each, the first one runs for its own layers alone."""
    model, shapes = build(), []
    first = model.model.layers[0].mlp
    first.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape[:2]))
    counts = []
    for probes in (0, 1):
        shapes.clear()
        collect_statistics(model, batches[:1], probes=probes)
        counts.append(shapes.count(batches[0].shape))
    assert counts[1] - counts[0] == 1 + 7  # the float model, and each layer of the block


def test_the_time_is_told_after_the_first_layer(build, batches, monkeypatch, caplog):
    monkeypatch.setattr(sensitivities, "LONG", 0.0)
    with caplog.at_level(logging.INFO, "quark"):
        sensitivities._tell_time(30.0, [["a.0.x"], ["a.1.x"], ["a.1.y"]], ["a.0", "a.1"])
        assert "3 layers take about 60 s" in caplog.text  # 30, and half of it twice
        collect_statistics(build(), batches[:1], probes=1)
    assert caplog.text.count("The sensitivities of 14 layers take about") == 1
