"""Sensitivities: calls that begin at a block, and models in which they cannot."""

import logging
from contextlib import nullcontext

import pytest
import torch

from quark.torch.evaluation import output_head
from quark.torch.evaluation.output_head import OutputHead
from quark.torch.pipeline.activation_store import ActivationStore, activation_limit
from quark.torch.statistics import probe_runs, sensitivities
from quark.torch.statistics.block_outputs import BlockOutputs
from quark.torch.statistics.collection import collect_statistics
from quark.torch.statistics.log_probabilities import predict, predict_parts
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
    monkeypatch.setattr(BlockOutputs, "beginning_at", lambda *_: nullcontext())


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
    outputs = BlockOutputs(model, [f"model.layers.{i}" for i in range(3)])
    with torch.no_grad():
        outputs.prove(calls[0])
        expected = []
        for call in calls:
            with outputs.recording():
                expected.append(predict(model, call))
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
    # The float model, for predictions and for blocks; each layer in it, and its block twice.
    assert counts[1] - counts[0] == 2 + 3 * 7


def test_the_time_is_told_after_the_first_layer(build, batches, monkeypatch, caplog):
    monkeypatch.setattr(sensitivities, "LONG", 0.0)
    with caplog.at_level(logging.INFO, "quark"):
        sensitivities._tell_time(30.0, [["a.0.x"], ["a.1.x"], ["a.1.y"]], ["a.0", "a.1"])
        assert "3 layers take about 60 s" in caplog.text  # 30, and half of it twice
        collect_statistics(build(), batches[:1], probes=1)
    assert caplog.text.count("The sensitivities of 14 layers take about") == 1


class TestParts:
    """The output head runs on a few tokens at a time."""

    CALLS = (  # 3 parts; one; with padding
        torch.arange(3, 63).repeat(2, 5),
        torch.arange(3, 63)[None],
        {
            "input_ids": torch.arange(3, 63).repeat(2, 5).flip(1),
            "attention_mask": (torch.arange(300) < torch.tensor([[300], [200]])).long(),
        },
    )

    @pytest.fixture
    def long(self, build):
        return build(max_position_embeddings=512)

    @pytest.mark.parametrize(("index", "parts"), [(0, 3), (1, 1), (2, 3)])
    def test_they_are_those_of_the_whole(self, long, index, parts):
        received = []
        with torch.no_grad():
            predict_parts(long, self.CALLS[index], OutputHead(long), received.append)
            expected = predict(long, self.CALLS[index])
        assert len(received) == parts
        order = torch.arange(len(expected))
        if parts > 1:  # parts hold the same positions of all sequences
            grid = [torch.arange(300).repeat(2, 1), torch.arange(2)[:, None].expand(2, 300)]
            kept = torch.ones(2, 300) if index == 0 else self.CALLS[index]["attention_mask"]
            places, rows = (x[kept.bool()] for x in grid)
            order = (places // 128 * 600 + rows * 300 + places).argsort()
        torch.testing.assert_close(torch.cat(received), expected[order], rtol=1e-5, atol=1e-5)

    def test_sensitivities_are_those_of_the_whole(self, long, monkeypatch):
        data = [self.CALLS[0], self.CALLS[2]]
        found, sizes = [], []
        compare = probe_runs.kl_divergence

        def count(expected, actual):
            sizes.append(len(actual))
            return compare(expected, actual)

        monkeypatch.setattr(probe_runs, "kl_divergence", count)
        for rows in (32, 10_000):
            monkeypatch.setattr(output_head, "ROWS_AT_ONCE", rows)
            sizes.clear()
            found.append(probes_of(long, data))
            assert max(sizes) == min(rows, sensitivities.PREDICTED)
        for name, probe in found[0].items():
            assert probe.tokens == found[1][name].tokens == 2 * sensitivities.PREDICTED
            assert probe.divergence == pytest.approx(found[1][name].divergence, rel=1e-4)

    def test_a_model_that_predicts_one_class(self, build):
        from transformers import LlamaForSequenceClassification

        config = build().config
        config.num_labels, config.pad_token_id = 5, 0
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config).eval()
        found = probes_of(model, [torch.arange(3, 35).view(2, 16)])
        assert {probe.tokens for probe in found.values()} == {2}
        assert all(probe.divergence > 0 for probe in found.values())

    def test_memory_holds_as_few_as_the_limit_says(self, long, monkeypatch):
        stored = []
        make = ActivationStore._make

        def note(store, shape, dtype, strides):
            made = make(store, shape, dtype, strides)
            stored.append((store.limit, store._size))
            return made

        monkeypatch.setattr(ActivationStore, "_make", note)
        with activation_limit(100_000):
            expected = probes_of(long, self.CALLS[:1])
        assert stored and all(size <= 50_000 for limit, size in stored if limit == 50_000)
        assert {limit for limit, _ in stored} >= {50_000}
        assert probes_of(long, self.CALLS[:1]) == expected


@pytest.mark.parametrize(
    ("shape", "predicted", "seen"),
    [
        ((3, 300), [(1, 128), (1, 128)], [(1, 256), (1, 256), (1, 256)]),
        ((5, 100), [(1, 100), (1, 100)], [(2, 100), (2, 100), (1, 100)]),
        ((40, 4), [(32, 4), (8, 4)], [(40, 4)]),
        ((1, 256), [(1, 128)], [(1, 256)]),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 50])
def test_pieces_do_not_depend_on_batches(shape, predicted, seen, size):
    data = torch.arange(3, 3 + shape[0] * shape[1]).view(shape)
    pieces = sensitivities.first_pieces(list(data.split(size)), 2)
    for calls, shapes in ((pieces.predicted, predicted), (pieces.seen, seen)):
        assert [call.shape for call in calls] == shapes
        length = shapes[0][1]
        assert torch.equal(torch.cat(calls), data[: sum(count for count, _ in shapes), :length])


@pytest.mark.parametrize("kind", ["unknown", "known"])
def test_a_block_whose_outputs_are_not_known(kind, build, batches, monkeypatch):
    """Without outputs of blocks the divergence at four bits is proportional to the error."""
    if kind == "unknown":
        monkeypatch.setattr(probe_runs, "_hidden_states", lambda output: None)
    found = collect_statistics(build(), batches[:1])
    shares = [
        found.fine_probes[name].sensitivity / probe.sensitivity
        for name, probe in found.probes.items()
    ]
    assert all(share == pytest.approx(1) for share in shares) == (kind == "unknown")
