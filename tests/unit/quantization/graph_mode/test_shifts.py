from dataclasses import fields, replace

import pytest
import torch
from torch import fx, nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    Config,
    GPTQConfig,
    PassOptions,
    QuantizationConfig,
    QuantizationSpec,
    ShiftLimits,
)
from quark.torch.quantization.graph_mode.edges import edge_modules
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from tests.unit.quantization.graph_mode.networks import (
    INT8,
    export,
    graph_config,
    images,
    network,
)

POF2 = QuantizationSpec(
    dtype="int8", qscheme="per_tensor", symmetric=True, is_dynamic=False, scale_type="pof2"
)
INT32 = replace(POF2, dtype="int32", scale_type="float")
POWERS = QuantizationConfig(input_tensors=POF2, output_tensors=POF2, weight=POF2, bias=INT32)
NARROW = ShiftLimits(
    cut=(4, 5), bias=(-5, 2), read=(0, 0), write=(-1, 0), product=(3, 8), pool=(0, 0)
)
CONVOLUTIONS = ("resnet", "mobilenet", "unet")


def quantize(model, limits, layer=POWERS, data=None, **options):
    data = data or images()
    config = graph_config(layer, shift_limits=limits, **options)
    return ModelQuantizer(config).quantize_model(export(model, data[0]), data)


class Shifts(fx.Interpreter):
    """Computes every shift from the scales of a graph; the value of a node is its positions."""

    def __init__(self, graph, limits):
        super().__init__(graph)
        self.limits, self.checked = limits, {field.name: 0 for field in fields(limits)}
        self.quantizers = edge_modules(graph)

    def check(self, kind, shift, offset=0):
        low, high = getattr(self.limits, kind)
        assert low + offset <= shift <= high, (kind, shift)
        self.checked[kind] += 1

    def run_node(self, n):
        inputs = [self.env[x] for x in n.all_input_nodes]
        name = str(n.target)
        if n.op == "call_module" and name not in self.quantizers:
            layer = self.module.get_submodule(name)
            w, b = (position(layer.quantizers()[x]) for x in ("weight", "bias"))
            return {"sum": inputs[0]["at"] + w, "bias": b}
        if name in self.quantizers:
            at = position(self.quantizers[name])
            given = inputs[0]
            if "sum" in given:
                cut = given["sum"] - at
                self.check("cut", cut)
                self.check("bias", given["sum"] - given["bias"], cut)
            elif "added" in given:
                self.check("read", max(given["added"]) - min(given["added"]))
                self.check("write", min(given["added"]) - at)
            elif "pooled" in given:
                self.check("pool", given["pooled"] - at)
            return {"at": at}
        if "add" in name:
            return {"added": [x["at"] for x in inputs]}
        if "avg_pool" in name:
            return {"pooled": inputs[0]["at"]}
        return inputs[0] if inputs else {}


def position(quantizer):
    p = -torch.log2(quantizer.scale.double()).item()
    assert p == int(p)
    return int(p)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("limits", [ShiftLimits(), NARROW], ids=["default", "narrow"])
def test_every_shift_of_a_frozen_graph_is_within_its_limits(name, limits):
    frozen = ModelQuantizer.freeze(quantize(network(name), limits))
    shifts = Shifts(frozen, limits)
    shifts.run(images(1)[0], enable_io_processing=False)
    layers = [m for m in frozen.modules() if isinstance(m, FakeQuantizedLayer)]
    assert shifts.checked["cut"] >= len(layers) and shifts.checked["bias"] >= len(layers)
    if name == "resnet":
        assert shifts.checked["write"] == 2 and shifts.checked["pool"] == 1
    if limits is NARROW:  # the scales of calibration alone do not keep the limits
        free = ModelQuantizer.freeze(quantize(network(name), None))
        with pytest.raises(AssertionError, match=r"cut|read|write|pool"):
            Shifts(free, limits).run(images(1)[0], enable_io_processing=False)


class Integers(fx.Interpreter):
    """Computes a graph with integers and shifts alone; a value is (integers, position)."""

    def __init__(self, graph):
        super().__init__(graph)
        self.quantizers = edge_modules(graph)

    def run_node(self, n):
        args = [self.env[x] for x in n.all_input_nodes]
        name = str(n.target)
        if name in self.quantizers:
            x, before = args[0]
            after = position(self.quantizers[name])
            # a shift right rounds half to even; float64 holds these integers exactly
            return (x * 2.0 ** (after - before)).round().clamp(-128, 127), after
        if n.op == "call_module":
            (x, i), layer = args[0], self.module.get_submodule(name)
            parts = {k: layer.quantized_tensor(k).codes.double() for k in ("weight", "bias")}
            w, b = (position(layer.quantizers()[k]) for k in parts)
            parts["bias"] *= 2.0 ** (w + i - b)
            return torch.func.functional_call(layer.float_class_copy, parts, (x,)), w + i
        if n.op == "placeholder" or n.op == "output":
            return super().run_node(n)
        if n.op == "call_function" and "add" in name:
            (x, i), (y, j) = args
            p = max(i, j)
            return x * 2.0 ** (p - i) + y * 2.0 ** (p - j), p
        if "avg_pool" in name:  # a mean of 2**k elements is their sum, shifted by k
            x, i = args[0]
            return x.sum((2, 3), keepdim=True), i + x[0, 0].numel().bit_length() - 1
        if "hardtanh" in name or "relu6" in name:
            return args[0][0].clamp(0, 6 * 2 ** args[0][1]), args[0][1]
        if "cat" in name:
            assert len({p for _, p in args}) == 1
            return torch.cat([x for x, _ in args], 1), args[0][1]
        rest = list(n.args[1:])
        return n.target(args[0][0], *rest, **n.kwargs), args[0][1]


def plain_layers(graph):
    """Give each layer a float copy of itself, of the operator alone."""
    for layer in graph.modules():
        if isinstance(layer, FakeQuantizedLayer):
            kind = layer.float_class
            if kind is nn.Linear:
                made = kind(layer.in_features, layer.out_features)
            else:
                names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
                options = {k: getattr(layer, k) for k in (*names, "groups")}
                made = kind(**options)
            object.__setattr__(layer, "float_class_copy", made.double())


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [INT32, POF2], ids=["int32", "int8"])
def test_integers_and_shifts_alone_compute_the_bits_of_the_simulation(name, bias):
    model, x = network(name), images(1)[0]
    graph = quantize(model, ShiftLimits(), replace(POWERS, bias=bias))
    with torch.no_grad():
        frozen = ModelQuantizer.freeze(graph)
        expected = frozen(x)
        plain_layers(frozen)
        codes, p = Integers(frozen).run((x.double(), 0), enable_io_processing=False)[0]
        original = model(x)
    assert codes.unique().numel() > 8
    assert torch.equal((codes * 2.0**-p).float(), expected)
    assert (expected - original).norm() < 0.2 * original.norm()


def test_limits_hold_after_training_and_after_algorithms_that_round():
    limits = replace(NARROW, cut=(0, 3), pool=(-9, 9))
    graph = quantize(network("resnet"), limits, algo_config=GPTQConfig(damp_percent=0.01))
    frozen = ModelQuantizer.freeze(graph)
    Shifts(frozen, limits).run(images(1)[0], enable_io_processing=False)
    for layer in frozen.modules():
        if isinstance(layer, FakeQuantizedLayer):
            codes = layer.weight / layer.weight_quantizer.scale
            assert torch.equal(codes, codes.round()) and codes.abs().max() <= 128
    trained = quantize(network("resnet"), limits)
    with torch.no_grad():
        trained.train()(images(1)[0] * 5)
        for parameter in trained.parameters():
            parameter *= 3
    frozen = ModelQuantizer.freeze(trained.eval())
    Shifts(frozen, limits).run(images(1)[0], enable_io_processing=False)


class Dense(nn.Module):
    """The convolution has one scale for input and output, so its shift is that of the weight."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x):
        return torch.cat([x, self.conv(x)], 1)


def test_limits_that_no_scales_keep_are_refused():
    model = Dense().eval()
    quantize(model, ShiftLimits())
    nn.init.constant_(model.conv.weight, 1e4)
    with pytest.raises(ValueError, match=r"cut shift of conv is -\d+, not in \(0, 16\).*exclude"):
        quantize(model, ShiftLimits())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_tensors": INT8}, "input_tensors.*scale_type='pof2'"),
        ({"weight": replace(POF2, qscheme="per_channel", ch_axis=0)}, "weight.*per_channel"),
        ({"output_tensors": None}, "output_tensors.*got none"),
        ({"bias": None}, "bias.*got none"),
        ({"input_tensors": replace(POF2, symmetric=False)}, "symmetric"),
    ],
)
def test_scales_that_cannot_be_shifted_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        quantize(network("resnet"), ShiftLimits(), replace(POWERS, **change))


def test_limits_are_pairs_and_belong_to_graph_mode():
    for value in (3, (1, 0), (0, 1.5), (0, 1, 2)):
        with pytest.raises(ValueError, match="cut: expected two integers"):
            ShiftLimits(cut=value)
    with pytest.raises(ValueError, match="read"):
        ShiftLimits(read=(1, 3))
    with pytest.raises(TypeError, match="shift_limits: expected a ShiftLimits"):
        Config(POWERS, shift_limits=(0, 16))
    with pytest.raises(ValueError, match="shift_limits is for quant_mode=fx_graph_mode"):
        ModelQuantizer(Config(POWERS, shift_limits=ShiftLimits())).quantize_model(network("unet"))


@pytest.mark.parametrize("name", ["fused_activations", "float_outputs"])
def test_values_without_a_scale_are_refused(name):
    options = {"pass_options": PassOptions(**{name: True})}
    with pytest.raises(ValueError, match=f"shift_limits: with {name}=True"):
        quantize(network("unet"), ShiftLimits(), **options)
