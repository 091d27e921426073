"""Quantized operators against computations written out by hand."""

import copy
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.quantization.config.config import (
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.config.layer_types import LAYER_TYPES
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.operators import (
    OPERATORS,
    QuantLinear,
    is_operator,
    operator,
    operator_names,
)
from quark.torch.quantization.nn.packed import PackedLayer

TENSORS = ["weight", "bias", "input_tensors", "output_tensors"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
COMBINATIONS = [c for n in range(5) for c in combinations(TENSORS, n)]

FLOAT_CLASSES = [*OPERATORS, Conv1D]


def spec(dtype, qscheme, **options):
    return QuantizationSpec(dtype=dtype, qscheme=qscheme, **options)


# Each specification with the same thing written out: values and the data their range comes from.


def int8(x, seen):
    scale = seen.float().abs().max() / 127.5
    return ((x.float() * (1 / scale)).round().clamp(-128, 127) * scale).to(x.dtype)


def uint8(x, seen):
    lo, hi = seen.float().min().clamp(max=0), seen.float().max().clamp(min=0)
    scale = (hi - lo) / 255
    zero = (-lo / scale).round().clamp(0, 255)
    codes = ((x.float() * (1 / scale)).round() + zero).clamp(0, 255)
    return ((codes - zero) * scale).to(x.dtype)


def fp8(x, seen):
    scale = seen.float().abs().max() / 448
    codes = (x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def rows_of_int8(x, seen):
    scale = seen.float().abs().amax(-1, keepdim=True) / 127.5
    return ((x.float() * (1 / scale)).round().clamp(-128, 127) * scale).to(x.dtype)


def groups_of_int4(x, seen):
    groups = x.float().unflatten(-1, (-1, 8))
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    values = (groups * (1 / scale)).round().clamp(-8, 7) * scale
    return values.flatten(-2).to(x.dtype)


KINDS = {
    "int8": (spec("int8", "per_tensor"), int8),
    "uint8": (spec("uint8", "per_tensor", symmetric=False), uint8),
    "fp8": (spec("fp8_e4m3", "per_tensor"), fp8),
}
WEIGHTS = {
    **KINDS,
    "int8 per channel": (spec("int8", "per_channel", ch_axis=0), rows_of_int8),
    "int4 per group": (spec("int4", "per_group", ch_axis=-1, group_size=8), groups_of_int4),
}
DYNAMIC = {
    "int8": (spec("int8", "per_tensor", is_dynamic=True), int8),
    "uint8": (spec("uint8", "per_tensor", symmetric=False, is_dynamic=True), uint8),
    "fp8": (spec("fp8_e4m3", "per_tensor", is_dynamic=True), fp8),
    "int8 per token": (spec("int8", "per_channel", ch_axis=0, is_dynamic=True), rows_of_int8),
}


def layer_of(linear, seen, specs):
    """A quantized copy of a layer whose static ranges are those of the given tensors."""
    layer = QuantLinear.from_float(copy.deepcopy(linear), QuantizationConfig(**specs))
    for name, quantizer in layer.quantizers().items():
        if quantizer.needs_data:
            quantizer.observer(seen[name])
            quantizer.compute_scales()
    return layer


def problem(kind=torch.float32):
    """A linear layer, calibration data and other data, partly beyond its range."""
    linear = nn.Linear(16, 6).to(kind)
    data = torch.randn(2, 5, 16).to(kind)
    return linear, data, 1.5 * torch.randn(2, 3, 16).to(kind)


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("chosen", COMBINATIONS, ids=lambda c: "+".join(c) or "nothing")
@pytest.mark.parametrize("name", KINDS)
def test_each_combination_of_tensors(name, chosen, kind):
    linear, data, x = problem(kind)
    chosen_spec, by_hand = KINDS[name]
    seen = {
        "weight": linear.weight,
        "bias": linear.bias,
        "input_tensors": data,
        "output_tensors": linear(data),
    }
    layer = layer_of(linear, seen, dict.fromkeys(chosen, chosen_spec))

    def value(tensor, x):
        return by_hand(x, seen[tensor]) if tensor in chosen else x

    product = F.linear(
        value("input_tensors", x), value("weight", linear.weight), value("bias", linear.bias)
    )
    y = layer(x)
    assert torch.equal(y, value("output_tensors", product))
    assert y.dtype == kind and y.shape == (2, 3, 6)


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_each_kind_of_weight(name, bias, kind):
    linear = nn.Linear(16, 6, bias=bias).to(kind)
    weight_spec, by_hand = WEIGHTS[name]
    layer = layer_of(linear, {"weight": linear.weight}, {"weight": weight_spec})
    x = torch.randn(4, 16).to(kind)
    value = by_hand(linear.weight, linear.weight)
    assert torch.equal(layer(x), F.linear(x, value, linear.bias))
    assert not torch.equal(value, linear.weight)


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", DYNAMIC)
def test_each_kind_of_dynamic_activation(name, kind):
    linear, _, x = problem(kind)
    dynamic, by_hand = DYNAMIC[name]
    layer = layer_of(linear, {}, {"input_tensors": dynamic, "output_tensors": dynamic})
    for batch in (x, 100 * x, x[:1]):
        y = F.linear(by_hand(batch, batch), linear.weight, linear.bias)
        assert torch.equal(layer(batch), by_hand(y, y))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "fp8_e4m3", "fp8_e5m2"])
def test_tokens_do_not_see_the_rest_of_the_batch(dtype):
    token = spec(dtype, "per_channel", ch_axis=0, is_dynamic=True)
    linear, _, x = problem()
    layer = layer_of(linear, {}, {"input_tensors": token, "output_tensors": token})
    quantized_inputs = layer.input_quantizer(x)
    x[0] *= 1000.0
    assert torch.equal(layer.input_quantizer(x)[1], quantized_inputs[1])
    assert torch.equal(layer(x)[1], layer(x[1:])[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_of_all_tensors(dtype):
    linear, _, x = problem()
    cast = QuantizationSpec(dtype=dtype)
    layer = layer_of(linear, {}, dict.fromkeys(TENSORS, cast))

    def narrow(t):
        return t.to(getattr(torch, dtype)).float()

    y = F.linear(narrow(x), narrow(linear.weight), narrow(linear.bias))
    assert torch.equal(layer(x), narrow(y))


def test_a_static_activation_without_calibration():
    linear, _, x = problem()
    layer = layer_of(linear, {"weight": linear.weight}, {"weight": KINDS["int8"][0]})
    assert layer(x).isfinite().all()
    bare = QuantLinear.from_float(linear, QuantizationConfig(input_tensors=KINDS["int8"][0]))
    with pytest.raises(RuntimeError, match="A static quantizer has no scale yet"):
        bare(x)


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_an_empty_batch(is_dynamic):
    linear, data, _ = problem()
    chosen = spec("int8", "per_tensor", is_dynamic=is_dynamic)
    seen = {"weight": linear.weight, "input_tensors": data, "output_tensors": linear(data)}
    layer = layer_of(linear, seen, dict.fromkeys(seen, chosen))
    assert layer(torch.empty(0, 5, 16)).shape == (0, 5, 6)


@pytest.mark.parametrize("name", WEIGHTS)
def test_training_moves_the_float_weight(name):
    """Straight through: the layer learns to be another one through its quantized values."""
    target = nn.Linear(16, 6)
    linear = nn.Linear(16, 6)
    weight_spec = WEIGHTS[name][0]
    token = DYNAMIC["int8 per token"][0]
    layer = layer_of(
        linear, {"weight": 4 * linear.weight}, {"weight": weight_spec, "input_tensors": token}
    )
    x = torch.randn(200, 16)
    expected = target(x).detach()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), expected)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert not torch.equal(layer.weight, linear.weight)
    assert {id(p) for p in layer.parameters()} == {id(layer.weight), id(layer.bias)}


def test_gradients_reach_the_input_of_a_layer_that_does_not_learn():
    linear, data, x = problem()
    seen = {"weight": linear.weight, "input_tensors": 10 * data}
    layer = layer_of(linear, seen, dict.fromkeys(seen, KINDS["int8"][0]))
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    expected = layer.value("weight").sum(0).expand(2, 3, 16)
    torch.testing.assert_close(x.grad, expected)


def test_repr():
    config = QuantizationConfig(
        weight=WEIGHTS["int4 per group"][0], input_tensors=DYNAMIC["int8 per token"][0]
    )
    assert repr(QuantLinear.from_float(nn.Linear(16, 6), config)) == (
        "QuantLinear(\n"
        "  in_features=16, out_features=6, bias=True\n"
        "  (_weight_quantizer): TensorQuantizer(int4, per_group, group_size=8)\n"
        "  (_bias_quantizer): None\n"
        "  (_input_quantizer): TensorQuantizer(int8, per_channel, dynamic)\n"
        "  (_output_quantizer): None\n"
        ")"
    )


def test_state_names():
    linear, data, _ = problem()
    seen = {"weight": linear.weight, "input_tensors": data}
    layer = layer_of(linear, seen, {"weight": KINDS["int8"][0], "input_tensors": KINDS["fp8"][0]})
    assert set(layer.state_dict()) == {
        "weight",
        "bias",
        "_weight_quantizer.scale",
        "_weight_quantizer.zero_point",
        "_input_quantizer.scale",
    }


@pytest.mark.parametrize("kind", FLOAT_CLASSES, ids=lambda k: k.__name__)
def test_operators_extend_what_they_replace(kind):
    assert is_operator(kind)
    made = operator(kind)
    assert issubclass(made.quantized, FakeQuantizedLayer) and issubclass(made.quantized, kind)
    assert issubclass(made.packed, PackedLayer) and issubclass(made.packed, kind)
    assert made.quantized.__name__ == f"Quant{kind.__name__}"
    assert made.packed.__name__ == f"QParams{kind.__name__}"
    assert made.quantized.forward is FakeQuantizedLayer.forward


def test_files_may_name_every_operator():
    assert list(LAYER_TYPES.values()) == list(OPERATORS)
    assert operator_names().split(", ") == [kind.__name__ for kind in FLOAT_CLASSES]


def test_subclasses_are_no_operators():
    """Their forward may differ from that of the class they extend."""

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    assert not is_operator(Other)
