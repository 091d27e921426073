"""Predictions compared with an original, and their standard errors over windows."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from quark.torch.evaluation.perplexity import perplexity, window_losses
from quark.torch.evaluation.predictions import POSITIONS, Reference, standard_error
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline import activation_store
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.interleaved_passes import Pass, run_in_turn
from tests.models.architectures import build, small_config

WORDS, WINDOWS, LENGTH = 11, 5, 2 * POSITIONS + 6  # every second position is compared


class Table(nn.Module):
    """A language model that knows the token before alone."""

    def __init__(self, seed, noise=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.logits = nn.Parameter(torch.randn(WORDS, WORDS) * 2)
        self.noise = noise * torch.randn(WORDS, WORDS)

    def forward(self, tokens):
        return (self.logits + self.noise)[tokens]


@pytest.fixture
def windows():
    torch.manual_seed(7)
    return torch.randint(WORDS, (WINDOWS, LENGTH))


def log_probs(model, windows):
    with torch.no_grad():
        return model(windows).double().log_softmax(-1)


def compared(windows, batch_size, model=None, positions=POSITIONS):
    reference = Reference(ActivationStore(), positions)
    reference.run(Table(0), windows, batch_size)
    return reference.compare(model or Table(0, noise=0.3), windows, batch_size)


@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS // 2, LENGTH])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
def test_figures_are_those_of_their_definitions(batch_size, positions, windows):
    result = compared(windows, batch_size, positions=positions)
    p, q = log_probs(Table(0), windows), log_probs(Table(0, noise=0.3), windows)
    at = slice(0, None, LENGTH // positions)
    kl = (p.exp() * (p - q)).sum(-1)[:, at].mean(1)
    assert result.kl == pytest.approx(float(kl.mean()), rel=1e-5)
    assert result.kl_error == pytest.approx(float(kl.std()) / math.sqrt(WINDOWS), rel=1e-4)
    same = (p.argmax(-1) == q.argmax(-1))[:, at]
    assert result.agreement == pytest.approx(float(same.double().mean()))
    assert 0 < result.agreement < 1
    assert result.positions == same.numel()
    target = windows[:, 1:, None]
    losses = [-x[:, :-1].gather(2, target).squeeze(2).mean(1) for x in (p, q)]
    before, after = (float(x.mean().exp()) for x in losses)
    assert (result.original, result.perplexity) == pytest.approx((before, after), rel=1e-6)
    assert result.error == pytest.approx(after * standard_error(losses[1]), rel=1e-4)
    paired = standard_error(losses[1] - losses[0])
    assert result.change_error == pytest.approx(paired * after / before, rel=1e-4)
    assert result.change == pytest.approx(after / before - 1, rel=1e-4)


def test_the_same_model_has_no_error(windows):
    result = compared(windows, 2, Table(0))
    assert (result.change, result.change_error, result.kl, result.agreement) == (0, 0, 0, 1)
    assert result.error > 0.01


def test_one_window_has_no_standard_error(windows):
    result = compared(windows[:1], 8)
    assert (result.error, result.change_error, result.kl_error) == (None, None, None)
    assert result.kl > 0


def test_without_an_original(windows):
    result = Reference(ActivationStore()).compare(Table(0), windows, 2)
    assert result.perplexity == perplexity(Table(0), windows)
    assert (result.original, result.change, result.kl, result.positions) == (None, None, None, 0)


def test_the_perplexity_does_not_depend_on_batches(windows):
    losses = [window_losses(Table(3), windows, size) for size in (1, 2, 5)]
    assert losses[0].shape == (WINDOWS,)
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])
    values = {perplexity(Table(3), windows, size) for size in (1, 2, 5)}
    assert len(values) == 1


def test_the_standard_error_of_a_mean():
    assert standard_error(torch.tensor([1.0, 3.0])) == pytest.approx(1.0)  # std √2, over √2
    assert standard_error(torch.tensor([1.0])) is None


def in_turn(store, models, windows, batch_size):
    reference = Reference(store)
    first, *others = models
    passes = [Pass(first, reference.run_steps(first, windows, batch_size))]
    passes += [Pass(m, reference.compare_steps(m, windows, batch_size)) for m in others]
    return [x.result for x in run_in_turn(passes, reference.drop_predictions)]


@pytest.mark.parametrize("batches", [0, 1, 2, 9])
def test_models_that_take_turns_keep_predictions_of_few_batches(batches, windows, monkeypatch):
    """The figures are those of one model after the other, and nothing goes to files."""
    models = [Table(0), Table(0, noise=0.3), Table(2)]
    reference = Reference(ActivationStore())
    reference.run(models[0], windows, 1)
    expected = [reference.predictions, *(reference.compare(m, windows, 1) for m in models[1:])]
    size = len(windows[0, :: LENGTH // POSITIONS]) * WORDS * 4  # of a window, float32
    if batches:
        monkeypatch.setattr(activation_store, "TemporaryDirectory", None)
    assert in_turn(ActivationStore(batches * size), models, windows, 1) == expected


def test_models_in_parts_read_each_block_side_by_side(tmp_path):
    torch.manual_seed(0)
    windows = torch.randint(3, 64, (3, 24))
    model = build(small_config("llama"), torch.float32)
    model.save_pretrained(tmp_path / "original")
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.2)
    model.save_pretrained(tmp_path / "other")
    one_by_one, turns = ([stream_model(tmp_path / n) for n in ("original", "other")] for _ in "ab")
    reference = Reference(ActivationStore())
    reference.run(one_by_one[0], windows, 1)
    expected = [reference.predictions, reference.compare(one_by_one[1], windows, 1)]
    assert expected[1].kl > 0
    order = []
    for name, model in zip("ab", turns, strict=True):
        residency = residency_of(model)
        read = residency._read
        residency._read = partial(
            lambda name, read, unit: (order.append(name + unit.name), read(unit)), name, read
        )
        limit = residency.activation_limit
    assert in_turn(ActivationStore(), turns, windows, 1) == expected
    assert residency.activation_limit == limit and residency.reads_ahead
    blocks = [entry.replace("model.layers.", "") for entry in order if "layers" in entry]
    count = turns[0].config.num_hidden_layers
    side_by_side = [f"{name}{i}" for i in range(1, count) for name in "ab"]
    assert blocks[-len(side_by_side) :] == side_by_side
