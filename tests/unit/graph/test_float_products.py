"""Products of 16-bit floats in float32."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from quark.torch.evaluation.perplexity import perplexity
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph import float_products as module
from quark.torch.graph.float_products import SWITCH, float_products, native_products
from quark.torch.graph.residency import residency_of
from quark.torch.graph.trace import trace
from quark.torch.pipeline.batches import run_batch
from quark.torch.pipeline.journal import Journal
from quark.torch.quantization.config.algo import GPTQConfig
from tests.configurations import preset, quantized

DTYPE = torch.bfloat16


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DTYPE)


X, W, B = values(20, 48), values(24, 48), values(24)
HEADS = [values(1, 2, 20, 16) + i for i in range(3)]
PICTURE, KERNEL = values(1, 3, 8, 8), values(4, 3, 3, 3)
OPERATORS = {
    "linear": (F.linear, (X, W, B)),
    "linear without bias": (F.linear, (X, W)),
    "matmul": (torch.matmul, (X, W.T)),
    "operator": (lambda a, b: a @ b, (X, W.T)),
    "bmm": (torch.bmm, (X[None], W.T[None])),
    "addmm": (torch.addmm, (B, X, W.T)),
    "attention": (F.scaled_dot_product_attention, HEADS),
    "convolution": (F.conv2d, (PICTURE, KERNEL)),
}


@pytest.fixture(autouse=True)
def switch(monkeypatch):
    """Choose float32, since most machines of developers multiply bfloat16 natively."""
    monkeypatch.setenv(SWITCH, "float32")
    return lambda choice: monkeypatch.setenv(SWITCH, choice)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_round_float32_results(name):
    operator, operands = OPERATORS[name]
    expected = operator(*(x.float() for x in operands)).to(DTYPE)
    with float_products():
        result = operator(*operands)
    assert result.dtype is DTYPE
    assert torch.equal(result, expected)


def test_results_are_more_accurate_than_sums_of_rounded_parts():
    """In float32 the sum is rounded once: the error is at most half a unit in the last place."""
    with float_products():
        result = F.linear(X, W)
    exact = X.double() @ W.double().T
    assert ((result - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5).all()


def test_parts_of_the_weight_give_the_same_values(monkeypatch):
    whole = F.linear(X.float(), W.float(), B.float()).to(DTYPE)
    monkeypatch.setattr(module, "PIECE", 5 * 48)  # 5 rows of 24
    with float_products():
        assert torch.equal(F.linear(X, W, B), whole)


@pytest.mark.parametrize("kind", ["few rows", "float32", "native", "inside of native"])
def test_other_products_stay(kind, switch, monkeypatch):
    monkeypatch.setattr(module, "_linear", lambda *args: pytest.fail("computed in float32"))
    if kind == "native":
        switch("native")
    x, w = (X[:15], W) if kind == "few rows" else (X, W)
    x, w = (x.float(), w.float()) if kind == "float32" else (x, w)
    expected = F.linear(x, w)
    if kind == "inside of native":
        with native_products(), float_products():
            assert torch.equal(F.linear(x, w), expected)
    else:
        with float_products():
            assert torch.equal(F.linear(x, w), expected)


@pytest.mark.parametrize("has", [True, False])
def test_the_cpu_decides(has, switch, monkeypatch):
    switch("auto")
    module._widened_types.cache_clear()
    monkeypatch.setattr(module, "_has", lambda question: has)
    assert module.widens_products(torch.nn.Linear(4, 4, dtype=DTYPE)) is not has
    assert not module.widens_products(torch.nn.Linear(4, 4))
    module._widened_types.cache_clear()


def test_an_unknown_choice_is_refused_before_any_work(switch, build, batches):
    switch("fast")
    with pytest.raises(ValueError, match=r"QUARK_PRODUCTS='fast'.*auto, float32, native"):
        quantized(build(dtype=DTYPE), preset("int8"), batches)


def test_traces_have_no_casts(build, batches, switch):
    model = build(dtype=DTYPE)

    def operators():
        return [op.name for op in trace(model, lambda: run_batch(model, batches[0])).ops]

    widened = operators()
    with float_products():
        assert widened == operators()
    switch("native")
    assert widened == operators()


def test_gradients_are_those_of_float32():
    leaves = [x.clone().requires_grad_() for x in (X, W, B)]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    with float_products():
        F.linear(*leaves).sum().backward()
    F.linear(*wide).sum().backward()
    for leaf, other in zip(leaves, wide, strict=True):
        assert torch.equal(leaf.grad, other.grad.to(DTYPE))


class TestModels:
    """Calibration, algorithms and evaluation of a bfloat16 model."""

    DATA = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(3))

    def test_the_choice_changes_the_outputs(self, build, switch):
        model = build(dtype=DTYPE)
        widened = perplexity(model, self.DATA)
        reference = perplexity(build().to(DTYPE).float(), self.DATA)
        switch("native")
        assert widened != perplexity(model, self.DATA)
        assert widened == pytest.approx(reference, rel=1e-2)

    @pytest.mark.parametrize("algorithms", [(), (GPTQConfig(),)], ids=["static", "gptq"])
    def test_batches_and_streaming_keep_the_bits(self, build, export, tmp_path, algorithms):
        scheme = "int4_wo_32" if algorithms else "int8"
        config = preset(scheme, *algorithms)
        whole = export(quantized(build(dtype=DTYPE), config, [self.DATA]))
        parts = export(quantized(build(dtype=DTYPE), config, self.DATA.split(1)))
        build(dtype=DTYPE).save_pretrained(tmp_path / "float")
        streamed = stream_model(tmp_path / "float")
        residency_of(streamed).limit = 0
        streamed = export(quantized(streamed, config, [self.DATA]))
        for other in (parts, streamed):
            tensors = [load_file(place / "model.safetensors") for place in (whole, other)]
            assert tensors[0].keys() == tensors[1].keys()
            for name, tensor in tensors[0].items():
                assert torch.equal(tensor, tensors[1][name]), name

    def test_the_choice_is_noted_and_belongs_to_a_journal(self, build, export, switch):
        model = build(dtype=DTYPE)
        path = export(quantized(model, preset("int8"), [self.DATA]))
        note = json.loads((path / "config.json").read_text("utf-8"))["calibration_products"]
        assert note == "float32"
        switch("native")
        path = export(quantized(build(dtype=DTYPE), preset("int8"), [self.DATA]))
        assert "calibration_products" not in json.loads((path / "config.json").read_text("utf-8"))

    def test_a_journal_of_other_products_is_refused(self, build, switch, tmp_path):
        from quark.torch import ModelQuantizer

        config = preset("int4_wo_32", GPTQConfig())

        def run():
            with Journal(tmp_path / "journal") as journal:
                quantizer = ModelQuantizer(config, journal=journal)
                quantizer.quantize_model(build(dtype=DTYPE), [self.DATA])

        run()
        switch("native")
        with pytest.raises(ValueError, match="products"):
            run()
