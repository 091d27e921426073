"""Logits of parts of a batch, against those of the whole model."""

from functools import partial

import pytest
import torch
from torch import nn

from quark.torch.evaluation import output_head
from quark.torch.evaluation.output_head import OutputHead
from quark.torch.evaluation.perplexity import perplexity
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph.residency import residency_of
from tests.models.architectures import build, small_config

LENGTH, ROWS = 14, 6


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(output_head, "ROWS_AT_ONCE", ROWS)


@pytest.fixture
def tokens():
    return torch.randint(3, 64, (3, LENGTH), generator=torch.Generator().manual_seed(1))


class Sizes:
    """The rows that a layer receives in each call."""

    def __init__(self, layer):
        self.rows = []
        layer.register_forward_pre_hook(lambda _, args: self.rows.append(args[0].shape[:2].numel()))


def parts_of(model, tokens):
    """What is received: logits of parts, with their first positions."""
    parts = []
    with torch.no_grad():
        run = partial(model, tokens)
        OutputHead(model).run(run, tokens, lambda first, logits: parts.append((first, logits)))
    return parts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("opt", {}),
        ("gpt2", {}),
        ("mixtral", {}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
    ],
)
def test_parts_are_those_of_the_whole_model(kind, options, tokens):
    model = build(small_config(kind, **options), torch.float32)
    with torch.no_grad():
        expected = model(tokens).logits
    sizes, body = Sizes(model.get_output_embeddings()), []
    model.get_input_embeddings().register_forward_hook(lambda *_: body.append(1))
    parts = parts_of(model, tokens)
    assert [first for first, _ in parts] == list(range(0, LENGTH, 2))
    torch.testing.assert_close(torch.cat([x for _, x in parts], 1), expected, rtol=1e-5, atol=1e-6)
    assert sizes.rows == [ROWS] * (LENGTH // 2)  # what is observed is every token, once
    assert len(body) == 1
    with torch.no_grad():
        assert model(tokens).logits.equal(expected)  # nothing stays behind


class Language(nn.Module):
    """A language model of which a test changes what comes after the head."""

    def __init__(self, ending, quantize=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.scale = nn.Linear(64, 64)
        self.ending, self.quantize = ending, quantize

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        x = self.table(tokens)
        y = self.head(self.quantize(x))
        return self.ending(self, y, x)


@pytest.mark.parametrize(
    ("ending", "runs_whole"),
    [
        (lambda m, y, x: y.tanh(), False),
        (lambda m, y, x: m.scale(y), False),
        (lambda m, y, x: y - y.mean(1, keepdim=True), True),
        (lambda m, y, x: y + torch.arange(y.shape[1])[:, None], True),
        (lambda m, y, x: y + x.sum(-1, keepdim=True), True),
        (lambda m, y, x: x @ m.head.weight.T, True),
    ],
    ids=["elementwise", "module", "mean", "place", "other", "unused"],
)
def test_logits_that_depend_on_more_than_a_position_come_from_the_whole_model(
    ending, runs_whole, tokens
):
    model = Language(ending)
    with torch.no_grad():
        expected = model(tokens)
    sizes = Sizes(model.head)
    logits = torch.cat([part for _, part in parts_of(model, tokens)], 1)
    torch.testing.assert_close(logits, expected)
    assert (max(sizes.rows) > ROWS) == runs_whole


def test_a_head_whose_inputs_have_one_dynamic_range_runs_whole(tokens, config_of, quantize):
    from quark.torch.quantization.config.config import QuantizationConfig
    from quark.torch.quantization.config.spec_classes import Int8PerTensorSpec

    spec = Int8PerTensorSpec(
        observer_method="min_max",
        symmetric=True,
        scale_type="float",
        round_method="half_even",
        is_dynamic=True,
    ).to_quantization_spec()
    model = build(small_config("llama"), torch.float32)
    config = config_of("int8_wo", exclude=())
    config.layer_quant_config = {"lm_head": QuantizationConfig(input_tensors=spec)}
    model = quantize(model, config)
    sizes = Sizes(model.lm_head)
    parts_of(model, tokens)
    assert max(sizes.rows) == tokens.numel()


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_perplexity_of_parts(kind, tokens, tmp_path, monkeypatch):
    model = build(small_config(kind), torch.float32)
    model.save_pretrained(tmp_path)
    streamed = stream_model(tmp_path)
    sizes = Sizes(streamed.get_output_embeddings())
    value = perplexity(model, tokens, batch_size=3)
    assert perplexity(streamed, tokens, batch_size=3) == value
    assert set(sizes.rows) - {LENGTH} == {ROWS}  # what traces the model runs one window
    monkeypatch.setattr(output_head, "ROWS_AT_ONCE", 10**6)
    assert perplexity(model, tokens, batch_size=3) == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(value, _slow(model, tokens), rtol=1e-6, atol=0)


def test_batches_under_a_bound(tokens, tmp_path):
    model = build(small_config("llama"), torch.float32)
    model.save_pretrained(tmp_path)
    streamed = stream_model(tmp_path)
    # A window takes 4 bytes for each of 14 tokens times (10 · 96 outputs + 14 of attention).
    residency_of(streamed).activation_limit = 2 * 4 * LENGTH * (10 * 96 + LENGTH)
    sizes = Sizes(streamed.model.layers[0].mlp.up_proj)
    value = perplexity(streamed, tokens, batch_size=3)
    # After what finds the blocks and their form: 3 windows in batches of 2 and 1.
    assert sizes.rows[-2:] == [2 * LENGTH, LENGTH]
    assert max(sizes.rows) == 2 * LENGTH
    assert value == pytest.approx(perplexity(model, tokens, batch_size=3), rel=1e-6)


def _slow(model, tokens):
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1].double()
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return float((-chosen.mean()).exp())
