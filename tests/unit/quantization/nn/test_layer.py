"""Turning a module into a quantized one and back, and what it tells of its tensors."""

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.numerics.hadamard import hadamard, random_hadamard
from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.config.config import QuantizationConfig, QuantizationSpec
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.layer import change_class
from quark.torch.quantization.nn.operators import QuantLinear, operator

INT8 = QuantizationSpec(dtype="int8", qscheme="per_tensor")
UINT4 = QuantizationSpec(
    dtype="uint4", qscheme="per_group", ch_axis=-1, group_size=8, symmetric=False
)
FP8 = QuantizationSpec(dtype="fp8_e4m3", qscheme="per_tensor")
TOKEN = QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=0, is_dynamic=True)
WEIGHTS = {
    "int8": INT8,
    "uint4 per group": UINT4,
    "fp8": FP8,
    "bfloat16": QuantizationSpec(dtype="bfloat16"),
    "int8 rounded down": QuantizationSpec(dtype="int8", qscheme="per_tensor", round_method="floor"),
    "fp8 rounded down": QuantizationSpec(
        dtype="fp8_e4m3", qscheme="per_tensor", round_method="floor"
    ),
}


def quantized(linear=None, computes_scales=True, **specs):
    layer = QuantLinear.from_float(linear or nn.Linear(16, 6), QuantizationConfig(**specs))
    for name, quantizer in layer.parameter_quantizers().items() if computes_scales else ():
        quantizer.observer(getattr(layer, name))
        quantizer.compute_scales()
    return layer


def freeze(layer):
    for name, quantizer in layer.parameter_quantizers().items():
        quantizer.freeze_(getattr(layer, name).data)
    layer.frozen = True
    return layer


# ---- in place -----------------------------------------------------------------------------------


def test_the_module_stays_itself():
    linear = nn.Linear(16, 6)
    linear.note = "kept"
    seen = []
    linear.register_forward_hook(lambda *_: seen.append(True))
    weight, bias = linear.weight, linear.bias
    layer = quantized(linear, weight=INT8)
    assert layer is linear and isinstance(layer, nn.Linear)
    assert layer.weight is weight and layer.bias is bias and layer.note == "kept"
    layer(torch.randn(2, 16))
    assert seen == [True]


def test_every_name_of_a_module_sees_the_change():
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    QuantLinear.from_float(model["a"], QuantizationConfig(weight=INT8))
    assert type(model["b"][0]) is QuantLinear


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_kept(training):
    linear = nn.Linear(16, 6).train(training)
    assert quantized(linear, weight=INT8).training is training


def test_only_configured_tensors_have_quantizers():
    layer = quantized(weight=INT8, output_tensors=FP8)
    assert list(layer.quantizers()) == ["weight", "output_tensors"]
    assert list(layer.parameter_quantizers()) == ["weight"]
    assert layer.weight_quantizer.spec == INT8 and layer.output_quantizer.spec == FP8
    assert layer.input_quantizer is None and layer.bias_quantizer is None


def test_all_four_tensors():
    layer = quantized(weight=INT8, bias=FP8, input_tensors=TOKEN, output_tensors=INT8)
    found = {name: quantizer.spec for name, quantizer in layer.quantizers().items()}
    assert found == {"weight": INT8, "bias": FP8, "input_tensors": TOKEN, "output_tensors": INT8}
    assert list(layer.parameter_quantizers()) == ["weight", "bias"]
    assert layer.bias_quantizer is layer.quantizers()["bias"]
    assert layer.input_quantizer is layer.quantizers()["input_tensors"]


def test_a_bias_that_is_not_there_is_not_quantized():
    layer = quantized(nn.Linear(16, 6, bias=False), weight=INT8, bias=INT8)
    assert list(layer.quantizers()) == ["weight"]
    assert layer.quantized_tensor("bias") is None and layer.value("bias") is None


def test_dynamic_parameters_are_static():
    layer = quantized(weight=TOKEN, input_tensors=TOKEN)
    assert layer.weight_quantizer.needs_data and layer.input_quantizer.is_dynamic
    assert layer.weight_quantizer.scale.shape == (6,), "one scale for each output channel"


# ---- and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_to_float_undoes_from_float(bias):
    linear = nn.Linear(16, 6, bias=bias)
    linear.note = "kept"
    attributes, state = vars(linear).keys() - {"_modules"}, copy.deepcopy(linear.state_dict())
    x = torch.randn(3, 16)
    expected = linear(x)
    layer = quantized(linear, weight=INT8, bias=FP8, input_tensors=TOKEN, output_tensors=TOKEN)
    assert set(layer.state_dict()) > set(state)
    assert layer.to_float() is linear
    assert type(linear) is nn.Linear
    assert vars(linear).keys() - {"_modules"} == attributes and not linear._modules
    assert linear.state_dict().keys() == state.keys()
    assert all(torch.equal(linear.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(linear(x), expected)


def test_there_and_back_and_there():
    linear = nn.Linear(16, 6)
    first = copy.deepcopy(quantized(linear, weight=INT8))
    linear.to_float()
    second = quantized(linear, weight=INT8)
    x = torch.randn(3, 16)
    assert torch.equal(first(x), second(x))


# ---- modules whose forward is not that of their class -------------------------------------------


def test_a_replaced_forward_is_refused():
    linear = nn.Linear(16, 6)
    linear.forward = lambda x: x
    with pytest.raises(ValueError, match=r"The forward of a Linear was replaced by .*exclude"):
        QuantLinear.from_float(linear, QuantizationConfig(weight=INT8))
    assert type(linear) is nn.Linear and not linear._modules


def test_a_module_placed_by_accelerate():
    """Its own forward is wrapped: the class of the inner one changes."""
    linear, x = nn.Linear(16, 6), torch.randn(3, 16)
    plain = linear(x)
    add_hook_to_module(linear, ModelHook())
    layer = quantized(linear, weight=UINT4)
    value = layer.value("weight")
    assert torch.equal(layer(x), nn.functional.linear(x, value, layer.bias))
    assert not torch.equal(layer(x), plain)
    layer.to_float()
    assert torch.equal(linear(x), plain)


def test_become_changes_the_class_alone():
    linear = nn.Linear(16, 6)
    attributes = dict(vars(linear))
    change_class(linear, QuantLinear)
    assert type(linear) is QuantLinear and vars(linear) == attributes


# ---- values and states --------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True], ids=["fake", "frozen"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_codes_give_the_values(name, kind, frozen):
    """Before and after freezing, which may not move a code."""
    torch.manual_seed(3)
    layer = quantized(nn.Linear(16, 64).to(kind), weight=WEIGHTS[name], bias=FP8)
    before = {tensor: layer.value(tensor).clone() for tensor in ("weight", "bias")}
    codes = {tensor: layer.quantized_tensor(tensor).codes for tensor in ("weight", "bias")}
    if frozen:
        freeze(layer)
    for tensor, value in before.items():
        state = layer.quantized_tensor(tensor)
        assert state.spec == layer.quantizers()[tensor].spec
        assert state.codes.dtype == state.scheme.fmt.code_dtype
        assert torch.equal(state.codes.float(), codes[tensor].float())
        assert torch.equal(layer.value(tensor), value)
        given = dequantize(state.codes, state.scale, state.zero_point, state.scheme, kind)
        assert torch.equal(given, value)


def test_frozen_values_are_those_held():
    layer = freeze(quantized(weight=INT8))
    assert layer.value("weight") is layer.weight and layer.value("bias") is layer.bias


def test_freezing_changes_no_output():
    layer = quantized(weight=UINT4, bias=INT8, input_tensors=TOKEN)
    x = torch.randn(5, 16)
    before = layer(x)
    assert torch.equal(freeze(layer)(x), before)


def test_states_of_activations_have_no_codes():
    layer = quantized(weight=INT8, input_tensors=FP8, output_tensors=TOKEN)
    layer.input_quantizer.observer(torch.ones(1))
    layer.input_quantizer.compute_scales()
    given, output = (
        layer.quantized_tensor("input_tensors"),
        layer.quantized_tensor("output_tensors"),
    )
    assert given.codes is None and given.scale.item() == pytest.approx(1 / 448)
    assert given.zero_point is None
    assert output.codes is None and output.scale is None
    assert layer.quantized_tensor("bias") is None


def test_the_mixin_has_no_product_of_its_own():
    class Bare(FakeQuantizedLayer, nn.Linear):
        float_class = nn.Linear

    layer = Bare.from_float(nn.Linear(16, 6), QuantizationConfig())
    with pytest.raises(NotImplementedError):
        layer(torch.randn(1, 16))


# ---- rotated inputs -----------------------------------------------------------------------------

SKEW = torch.arange(16 * 16, dtype=torch.float64).sin().view(16, 16)
ROTATIONS = {
    "hadamard": hadamard(16),
    "blocks": random_hadamard(8, torch.Generator().manual_seed(1)),
    "orthogonal": torch.linalg.matrix_exp(SKEW - SKEW.T),
}


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_a_rotated_input_leaves_the_product(rotation, kind):
    linear = nn.Linear(16, 6) if kind is nn.Linear else Conv1D(6, 16)
    x = torch.randn(2, 3, 16)
    expected, weight = linear(x), linear.weight.detach().clone()
    layer = operator(kind).quantized.from_float(linear, QuantizationConfig(input_tensors=TOKEN))
    layer.input_quantizer.enabled = False
    layer.rotate_input(rotation)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(layer.weight, weight, atol=1e-2)
    layer.to_float()
    torch.testing.assert_close(linear.weight, nn.Parameter(weight))


def test_the_input_is_rotated_before_it_is_quantized():
    layer = quantized(input_tensors=INT8)
    layer.rotate_input(hadamard(16))
    quantizer = layer.input_quantizer
    quantizer.is_observing = True
    x = torch.zeros(1, 16)
    x[0, 3] = 8.0
    layer(x)
    quantizer.compute_scales()
    assert quantizer.scale.item() == pytest.approx(2 / 127.5), (
        "an outlier of 8 is spread to 16 of 2"
    )


@pytest.mark.parametrize(
    ("module", "size", "said"),
    [
        (nn.Linear(16, 6), 12, "size 12 does not divide"),
        (nn.Conv2d(4, 4, 1), 4, "of a QuantConv2d cannot be rotated"),
    ],
    ids=["size", "operator"],
)
def test_rotations_that_do_not_fit(module, size, said):
    layer = operator(type(module)).quantized.from_float(module, QuantizationConfig())
    with pytest.raises(ValueError, match=said):
        layer.rotate_input(hadamard(size))
    assert layer.input_rotation is None


def test_a_second_rotation_is_refused():
    layer = quantized(weight=INT8)
    layer.rotate_input(hadamard(16))
    with pytest.raises(ValueError, match="once"):
        layer.rotate_input(hadamard(16))
