"""Layers of packed weights against the fake-quantized layers they were packed from."""

import copy

import pytest
import torch
from torch import nn

from quark.torch.export.formats.layouts.packed import PackedLayout, ValueLayout
from quark.torch.numerics.packing import pack, unpack
from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.config.config import QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.tensor_names import PARAMETERS, SHORT_NAMES
from quark.torch.quantization.nn.operators import QParamsLinear, QuantLinear
from quark.torch.quantization.nn.quantizer import QuantizedTensor

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def spec(dtype, qscheme=None, **options):
    if qscheme == "per_group":
        options = {"ch_axis": -1, "group_size": 8, **options}
    elif qscheme == "per_channel":
        options = {"ch_axis": 0, **options}
    return QuantizationSpec(dtype=dtype, qscheme=qscheme, **options)


INT8, FP8 = spec("int8", "per_tensor"), spec("fp8_e4m3", "per_tensor")
TOKEN = spec("int8", "per_channel", is_dynamic=True)
WEIGHTS = {
    "int8 per tensor": INT8,
    "uint8 per channel": spec("uint8", "per_channel", symmetric=False),
    "int8 per group": spec("int8", "per_group"),
    "int4 per channel": spec("int4", "per_channel"),
    "uint4 per group": spec("uint4", "per_group", symmetric=False),
    "uint4 fractional zero": spec("uint4", "per_group", symmetric=False, zero_point_type="float32"),
    "int4 half scales": spec("int4", "per_group", scale_type="float16"),
    "int3 per channel": spec("int3", "per_channel", symmetric=False),
    "int2 per group": spec("int2", "per_group"),
    "fp8 per tensor": FP8,
    "fp8 per channel": spec("fp8_e5m2", "per_channel"),
    "fp8 per ragged group": spec("fp8_e4m3", "per_group", group_size=12),
    "int8 rounded down": spec("int8", "per_tensor", round_method="floor"),
    "bfloat16": spec("bfloat16"),
}
ACTIVATIONS = {
    "static": {"input_tensors": INT8, "output_tensors": FP8},
    "per token": {"input_tensors": TOKEN, "output_tensors": TOKEN},
    "dynamic": {
        "input_tensors": spec("uint8", "per_tensor", symmetric=False, is_dynamic=True),
        "output_tensors": spec("fp8_e4m3", "per_tensor", is_dynamic=True),
    },
    "cast": {"input_tensors": spec("bfloat16"), "output_tensors": spec("float16")},
    "bias": {"bias": INT8},
}


class CodesLayout:
    """The simplest layout there is: codes, scale and zero point as the arithmetic has them."""

    def declare(self, spec, shape, is_stored):
        scheme = spec.scheme
        parts = {"": (shape, scheme.fmt.code_dtype)} if is_stored else {}
        if scheme.fmt.scaled and (is_stored or not spec.is_dynamic):
            grid = scheme.scale_shape(shape)
            parts["scale"] = grid, scheme.scale.held_dtype
            if scheme.has_zero_point:
                kind = torch.float32 if scheme.float_zero_point else torch.int32
                parts["zero_point"] = grid, kind
        return parts

    def pack(self, state, value):
        parts = {"": state.codes, "scale": state.scale, "zero_point": state.zero_point}
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def unpack(self, spec, shape, stored):
        return QuantizedTensor(spec, stored.get(""), stored.get("scale"), stored.get("zero_point"))

    def value(self, spec, shape, stored, dtype):
        state = self.unpack(spec, shape, stored)
        return dequantize(state.codes, state.scale, state.zero_point, spec.scheme, dtype)


LAYOUTS = {
    "codes": CodesLayout(),
    "order": PackedLayout("order"),
    "reorder": PackedLayout("reorder"),
    "values": ValueLayout(),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_type = pytest.mark.parametrize("kind", TYPES, ids=str)


def frozen(linear, specs):
    """A frozen quantized copy of a layer, with static ranges of random data."""
    layer = QuantLinear.from_float(copy.deepcopy(linear), QuantizationConfig(**specs))
    data = torch.randn(8, linear.in_features, dtype=linear.weight.dtype)
    seen = {"input_tensors": data, "output_tensors": linear(data)}
    for name, quantizer in layer.quantizers().items():
        if quantizer.needs_data:
            quantizer.observer(seen.get(name, getattr(layer, name, None)))
            quantizer.compute_scales()
    for name, quantizer in layer.parameter_quantizers().items():
        quantizer.freeze_(getattr(layer, name).data)
    layer.frozen = True
    return layer


def packed(linear, layer, layout, device="cpu"):
    """A packed layer which has loaded what the layout stores of a frozen one."""
    target = QParamsLinear.from_module(copy.deepcopy(linear).to(device), layer.quant_config, layout)
    stored = dict(layer.named_parameters(recurse=False))
    for name, short in SHORT_NAMES.items():
        state = layer.quantized_tensor(name)
        if state is None:
            continue
        for part, tensor in layout.pack(state, getattr(layer, name, None)).items():
            stored[f"{short}_quantizer.{part}" if part else name] = tensor
    target.load_state_dict(stored, assign=device == "meta")
    return target


@each_type
@pytest.mark.parametrize("name", WEIGHTS)
@each_layout
def test_each_kind_of_weight(layout, name, kind):
    """The same outputs, values and codes, bit for bit, on a layer of odd sizes."""
    group = WEIGHTS[name].group_size
    linear = nn.Linear(40 if group != 12 else 41, 13).to(kind)
    layer = frozen(linear, {"weight": WEIGHTS[name]})
    target = packed(linear, layer, layout)
    x = torch.randn(2, 3, linear.in_features).to(kind)
    assert torch.equal(target(x), layer(x))
    assert target.value("weight").dtype == kind
    assert torch.equal(target.value("weight"), layer.weight)
    ours, theirs = target.quantized_tensor("weight"), layer.quantized_tensor("weight")
    assert ours.spec == theirs.spec
    assert torch.equal(ours.codes.float(), theirs.codes.float())
    for a, b in zip(ours[2:], theirs[2:], strict=True):
        assert (a is None and b is None) or torch.equal(a.float(), b.float())


@each_type
@pytest.mark.parametrize("others", ACTIVATIONS)
@each_layout
def test_each_kind_of_activation(layout, others, kind):
    linear = nn.Linear(32, 6).to(kind)
    layer = frozen(linear, {"weight": WEIGHTS["uint4 per group"], **ACTIVATIONS[others]})
    target = packed(linear, layer, layout)
    for magnitude in (0.1, 1.0, 10.0):
        x = magnitude * torch.randn(4, 32).to(kind)
        assert torch.equal(target(x), layer(x))
    assert torch.equal(target.value("bias"), layer.bias)
    for name in SHORT_NAMES:
        ours, theirs = target.quantized_tensor(name), layer.quantized_tensor(name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.spec == theirs.spec
            assert (ours.scale is None) == (theirs.scale is None)
            assert (ours.codes is None) == (name not in PARAMETERS)


@each_layout
def test_a_weight_that_is_not_quantized(layout):
    linear = nn.Linear(32, 6)
    layer = frozen(linear, {"input_tensors": INT8})
    target = packed(linear, layer, layout)
    x = torch.randn(4, 32)
    assert torch.equal(target(x), layer(x))
    assert torch.equal(target.value("weight"), linear.weight)
    assert target.quantized_tensor("weight") is None and target.weight_quantizer is None


def test_no_bias():
    linear = nn.Linear(32, 6, bias=False)
    layer = frozen(linear, {"weight": INT8, "bias": INT8})
    target = packed(linear, layer, LAYOUTS["reorder"])
    assert target.bias is None and target.bias_quantizer is None
    assert target.value("bias") is None and target.quantized_tensor("bias") is None
    x = torch.randn(4, 32)
    assert torch.equal(target(x), layer(x))


def test_the_weight_follows_the_type_of_the_input():
    """As a model does that computes in another type than it was stored in."""
    linear = nn.Linear(32, 6)
    target = packed(linear, frozen(linear, {"weight": INT8}), LAYOUTS["reorder"])
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    y = target(x)
    assert y.dtype == torch.bfloat16
    expected = nn.functional.linear(x, target.value("weight").bfloat16(), linear.bias.bfloat16())
    assert torch.equal(y, expected)
    assert target.value("weight", torch.float16).dtype == torch.float16


# ---- what is held -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHTS)
@each_layout
def test_holds_what_the_layout_declares(layout, name):
    linear = nn.Linear(48, 16)
    config = QuantizationConfig(weight=WEIGHTS[name], input_tensors=INT8, output_tensors=TOKEN)
    target = QParamsLinear.from_module(linear, config, layout)
    weight = layout.declare(config.weight, (16, 48), True)
    given = layout.declare(config.input_tensors, (), False)
    expected = {"weight": ((16, 48), torch.float32), "bias": ((16,), torch.float32)}
    for short, parts in (("weight", weight), ("input", given)):
        for part, what in parts.items():
            expected[f"{short}_quantizer.{part}" if part else short] = what
    held = {n: (tuple(t.shape), t.dtype) for n, t in target.state_dict().items()}
    assert held == expected
    if "" in weight:
        assert not target.weight.requires_grad


def test_packs_four_bits_in_four():
    """What the memory of a layer is meant to come to."""
    linear = nn.Linear(64, 32)
    config = QuantizationConfig(weight=WEIGHTS["uint4 per group"])
    target = QParamsLinear.from_module(linear, config, LAYOUTS["reorder"])
    stored = target.state_dict()["weight"]
    assert stored.nbytes == 64 * 32 // 2
    words = torch.randint(-(2**31), 2**31, stored.shape, dtype=torch.int32)
    fmt = config.weight.fmt
    assert torch.equal(pack(unpack(words, fmt, 32), fmt), words)


@each_layout
def test_made_on_the_meta_device(layout):
    """Without a float model in memory: only the stored tensors ever are."""
    linear = nn.Linear(32, 6)
    layer = frozen(linear, {"weight": WEIGHTS["uint4 per group"], "input_tensors": INT8})
    target = QParamsLinear.from_module(copy.deepcopy(linear).to("meta"), layer.quant_config, layout)
    assert all(t.is_meta for t in target.state_dict().values())
    loaded = packed(linear, layer, layout, device="meta")
    x = torch.randn(4, 32)
    assert torch.equal(loaded(x), layer(x))


def test_the_module_stays_itself():
    linear = nn.Linear(32, 6)
    linear.note = "kept"
    bias = linear.bias
    target = QParamsLinear.from_module(linear, QuantizationConfig(weight=INT8), LAYOUTS["reorder"])
    assert target is linear and isinstance(target, nn.Linear)
    assert target.note == "kept" and target.bias is bias
    assert target.weight.dtype == torch.float32
    assert target.state_dict()["weight"].dtype == torch.int8


def test_a_replaced_forward_is_refused():
    linear = nn.Linear(32, 6)
    linear.forward = lambda x: x
    with pytest.raises(ValueError, match="The forward of a Linear was replaced"):
        QParamsLinear.from_module(linear, QuantizationConfig(weight=INT8), LAYOUTS["reorder"])
    assert type(linear) is nn.Linear and linear.weight.dtype == torch.float32


def test_shapes_in_full():
    linear = nn.Linear(41, 13)
    config = QuantizationConfig(weight=WEIGHTS["int3 per channel"])
    target = QParamsLinear.from_module(linear, config, LAYOUTS["reorder"])
    assert target.weight.shape == (13, 41)
    assert target.state_dict()["weight"].shape != (13, 41)
    assert target.shapes == {"weight": (13, 41), "bias": (13,)}


@pytest.mark.parametrize("others", ["static", "per token", "dynamic", "cast"])
def test_an_empty_batch(others):
    linear = nn.Linear(32, 6)
    layer = frozen(linear, {"weight": INT8, **ACTIVATIONS[others]})
    target = packed(linear, layer, LAYOUTS["reorder"])
    assert target(torch.empty(0, 5, 32)).shape == (0, 5, 6)


def test_repr():
    config = QuantizationConfig(weight=WEIGHTS["uint4 per group"], input_tensors=spec("bfloat16"))
    target = QParamsLinear.from_module(nn.Linear(32, 6), config, LAYOUTS["reorder"])
    assert repr(target) == (
        "QParamsLinear(\n"
        "  in_features=32, out_features=6, bias=True\n"
        "  (weight_quantizer): PackedQuantizer(uint4, per_group)\n"
        "  (bias_quantizer): None\n"
        "  (input_quantizer): PackedQuantizer(bfloat16)\n"
        "  (output_quantizer): None\n"
        ")"
    )
