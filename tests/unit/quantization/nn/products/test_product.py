"""Products of weights in two stages and of weights that are (inputs, outputs)."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.products import compiled
from tests.configurations import config, groups
from tests.unit.quantization.nn.test_runtime import NAMES, difference, packed

INPUTS = 96
WEIGHTS = {
    "int4 in groups": groups("int4", True),
    "uint4 in groups": groups("uint4", False),
    "int3 in groups": groups("int3", True),
}
SCHEMES = ["int4_fp8", "w_int8_per_tensor_sym", "fp8", "mxfp4", "nvfp4", "int4_wo_per_channel"]


def settings(name):
    return config(WEIGHTS.get(name) or scheme(name).weight, exclude=())


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    """Compiled functions as Python runs them."""
    monkeypatch.setattr(compiled, "compile_function", lambda function: function)
    compiled._functions.cache_clear()
    yield
    compiled._functions.cache_clear()


@pytest.mark.parametrize("runtime", ["auto", "fast", "compiled", "unpacked"])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("name", [*WEIGHTS, *SCHEMES])
def test_runtimes(name, kind, runtime):
    x = torch.randn(5, INPUTS)
    module = nn.Linear(INPUTS, 80) if kind == "Linear" else Conv1D(80, INPUTS)
    layer, frozen = packed(module, settings(name), x)
    if layer.quantized_tensor("weight").spec.quantizes_codes and kind == "Conv1D":
        pytest.skip("transposed weights in two stages are unpacked at each use")
    codes, expected = copy.deepcopy(layer._stored("weight")), layer.value("weight")
    layer.set_runtime(runtime)
    assert (layer.packed_product is not None) == (runtime != "unpacked")
    for rows in (x, x[:1]):
        bound = 1e-5 if runtime in ("auto", "unpacked") else 2e-2
        assert difference(layer(rows), frozen(rows)) < bound
    assert torch.equal(layer.value("weight"), expected)
    assert torch.equal(layer._stored("weight"), codes)
    layer.set_runtime("exact")
    assert torch.equal(layer(x), frozen(x))
    assert torch.equal(layer._stored("weight"), codes)


def test_every_scheme_has_a_product_but_those_that_the_docs_name():
    """A layer that computes as ``exact`` in ``fast`` is slow without a word."""
    without, products, x = set(), {}, torch.randn(3, 64)
    for name in NAMES:
        weight = scheme(name, 32).weight
        if repr(weight) not in products:
            layer, frozen = packed(nn.Linear(64, 40), config(weight, exclude=()), x)
            layer.set_runtime("fast")
            products[repr(weight)] = layer.packed_product
            assert difference(layer(x), frozen(x)) < 2e-2, name
        without |= {name} if products[repr(weight)] is None else set()
    text = Path(__file__).parents[5].joinpath("docs/runtime.md").read_text("utf-8")
    table = text.partition("| schemes | product | instead |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if "GPU" not in line]
    assert without == {name.strip(" `") for row in rows for name in row.split(",")}


@pytest.mark.parametrize(("name", "bits"), [("mx6", 6), ("w_mx6", 6), ("mx9", 9), ("w_mx9", 9)])
def test_pairs_are_held_in_groups_of_their_blocks(name, bits):
    """Values of the largest and smallest codes, with and without the shift of their pair."""
    linear = nn.Linear(64, 40)
    with torch.no_grad():
        linear.weight[:, 16:18] *= 2.0**-20  # pairs with half the scale, and zeros
        linear.weight[3] = 0.0
    layer, _ = packed(linear, config(scheme(name).weight, exclude=()), torch.randn(2, 64))
    state, stored = layer.quantized_tensor("weight"), layer._stored("weight").clone()
    layer.set_runtime("auto")
    product = layer.packed_product
    assert product.method.panels.arrangement.group == 16
    assert product.codes().abs().max() > state.codes.abs().max()
    assert product.values(torch.float32).equal(state.value(torch.float32))
    assert layer._stored("weight").equal(stored)
    assert product.nbytes <= 64 * 64 * (bits + 32 / 16) / 8


def test_two_stages_multiply_by_the_first_scale_last():
    """Against float64 products of the codes, whose values exceed the weight by far."""
    x = torch.randn(3, INPUTS)
    layer, _ = packed(nn.Linear(INPUTS, 80, bias=False), settings("int4_fp8"), x)
    state = layer.quantized_tensor("weight")
    first = state.last_stage.value(torch.float64)
    layer.set_runtime("auto")
    product = layer.packed_product
    assert torch.equal(product.parts["unit"], state.scale.reshape(()))
    expected = F.linear(x.double(), first) * state.scale.double()
    assert difference(product.multiply(x).double(), expected) < 1e-6
    assert product.codes().equal(state.codes)
