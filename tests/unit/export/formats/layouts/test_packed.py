"""Shapes, order and bits of stored tensors, as other readers of the format expect them."""

import pytest
import torch

from quark.torch.export.formats.layouts.earlier import EarlierPackedLayout
from quark.torch.export.formats.layouts.packed import PackedLayout, ValueLayout
from quark.torch.numerics.qdq import dequantize, dynamic_qparams, quantize
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from tests.configurations import spec

I8, U8, I32 = torch.int8, torch.uint8, torch.int32
F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


# Specification and shape of a weight (out, in) -> what is stored: (shape, type) of each part.
CASES = {
    "int8_tensor": (spec("int8", "per_tensor"), (24, 64), ((24, 64), I8), ((), F32), ((), I8)),
    "uint8_tensor": (
        spec("uint8", "per_tensor", False),
        (24, 64),
        ((24, 64), U8),
        ((), F32),
        ((), U8),
    ),
    "int8_channel": (
        spec("int8", "per_channel"),
        (24, 64),
        ((24, 64), I8),
        ((24,), F32),
        ((24,), I8),
    ),
    "int8_channel_of_inputs": (
        spec("int8", "per_channel", ch_axis=1),
        (24, 64),
        ((24, 64), I8),
        ((64,), F32),
        ((64,), I8),
    ),
    "int8_group": (
        spec("int8", "per_group"),
        (24, 64),
        ((64, 24), I8),
        ((2, 24), F32),
        ((2, 24), I8),
    ),
    "int4_tensor": (spec("int4", "per_tensor"), (24, 64), ((24, 8), I32), ((), F32), ((), I32)),
    "uint4_channel": (
        spec("uint4", "per_channel", False),
        (24, 64),
        ((24, 8), I32),
        ((24,), F32),
        ((3,), I32),
    ),
    "uint4_group": (
        spec("uint4", "per_group", False),
        (24, 64),
        ((64, 3), I32),
        ((2, 24), F32),
        ((2, 3), I32),
    ),
    "int4_group_ragged": (
        spec("int4", "per_group"),
        (12, 64),
        ((64, 2), I32),
        ((2, 12), F32),
        ((2, 2), I32),
    ),
    "int4_channel_ragged": (
        spec("int4", "per_channel", False),
        (12, 60),
        ((12, 8), I32),
        ((12,), F32),
        ((2,), I32),
    ),
    "int4_whole_rows": (
        spec("int4", "per_group", group_size=-1),
        (24, 64),
        ((64, 3), I32),
        ((1, 24), F32),
        ((1, 3), I32),
    ),
    "uint4_float_zero_point": (
        spec("uint4", "per_group", False, zero_point_type="float32"),
        (24, 64),
        ((64, 3), I32),
        ((2, 24), F32),
        ((2, 24), F32),
    ),
    "int2_group": (
        spec("int2", "per_group"),
        (24, 64),
        ((64, 6), U8),
        ((2, 24), F32),
        ((2, 6), U8),
    ),
    "int3_group": (
        spec("int3", "per_group", False),
        (24, 64),
        ((64, 9), U8),
        ((2, 24), F32),
        ((2, 9), U8),
    ),
    "int3_channel": (
        spec("int3", "per_channel"),
        (24, 64),
        ((24, 24), U8),
        ((24,), F32),
        ((9,), U8),
    ),
    "fp8_tensor": (spec("fp8_e4m3", "per_tensor"), (24, 64), ((24, 64), E4M3), ((), F32), None),
    "fp8_channel": (
        spec("fp8_e4m3", "per_channel"),
        (24, 64),
        ((24, 64), E4M3),
        ((24,), F32),
        None,
    ),
    "fp8_group": (
        spec("fp8_e5m2", "per_group"),
        (24, 64),
        ((24, 64), torch.float8_e5m2),
        ((24, 2), F32),
        None,
    ),
    "fp4_scales_in_e4m3": (
        spec("fp4", "per_group", group_size=16, scale_format="e4m3"),
        (24, 64),
        ((24, 32), U8),
        ((24, 4), F32),
        None,
    ),
    "half_scales": (
        spec("int8", "per_channel", scale_type="float16"),
        (24, 64),
        ((24, 64), I8),
        ((24,), torch.float16),
        ((24,), I8),
    ),
    "bfloat16": (QuantizationSpec("bfloat16"), (24, 64), ((24, 64), BF16), None, None),
}
PARTS = ("", "scale", "zero_point")
METHODS = ("reorder", "order")


def state_of(of, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.1
    scale = zero_point = None
    if of.fmt.scaled:
        scale, zero_point = dynamic_qparams(x, of.scheme)
    return QuantizedTensor(of, quantize(x, scale, zero_point, of.scheme), scale, zero_point)


def described(stored):
    return {part: (tuple(t.shape), t.dtype) for part, t in stored.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
class TestPacked:
    @pytest.mark.parametrize("method", METHODS)
    def test_what_is_stored(self, case, method):
        of, shape, *parts = case
        layout = PackedLayout(method)
        expected = {part: p for part, p in zip(PARTS, parts, strict=True) if p is not None}
        assert layout.declare(of, shape, True) == expected
        stored = layout.pack(state_of(of, shape), None)
        assert described(stored) == expected
        assert all(tensor.is_contiguous() for tensor in stored.values())

    @pytest.mark.parametrize("method", METHODS)
    def test_unpacking_gives_everything_back(self, case, method):
        of, shape, *_ = case
        state, layout = state_of(of, shape), PackedLayout(method)
        stored = layout.pack(state, None)
        found = layout.unpack(of, shape, stored)
        assert found.spec is of
        for before, after in zip(state[1:], found[1:], strict=True):
            assert (before is None) == (after is None)
            assert before is None or before.float().equal(after.float())
        for dtype in (F32, BF16):
            value = layout.value(of, shape, stored, dtype)
            assert value.dtype == dtype
            assert torch.equal(value, dequantize(*state[1:4], of.scheme, dtype))

    def test_values_and_scales_beside_them(self, case):
        of, shape, *_ = case
        state, layout = state_of(of, shape), ValueLayout()
        value = dequantize(*state[1:4], of.scheme)
        stored = layout.pack(state, value)
        declared = layout.declare(of, shape, True)
        assert described(stored) == {"": (shape, F32), **declared}
        for part, tensor in (("scale", state.scale), ("zero_point", state.zero_point)):
            assert (part in stored) == (tensor is not None)
            assert tensor is None or stored[part].equal(tensor)  # neither turned nor packed
        assert layout.unpack(of, shape, stored).codes.float().equal(state.codes.float())
        assert torch.equal(layout.value(of, shape, stored, BF16), value.bfloat16())


class TestBits:
    def words(self, of, codes, method="reorder"):
        grid = of.scheme.scale_shape(codes.shape)
        state = QuantizedTensor(of, codes, torch.ones(grid), torch.zeros(grid, dtype=I32))
        return PackedLayout(method).pack(state, None)

    @pytest.mark.parametrize(
        ("method", "word"), [("order", 0x76543210), ("reorder", 0x75316420)], ids=METHODS
    )
    def test_neighbouring_outputs_share_a_word_per_group(self, method, word):
        codes = torch.arange(8, dtype=U8).view(8, 1).repeat(1, 32)  # the code is the output
        stored = self.words(spec("uint4", "per_group", False), codes, method)
        assert stored[""].tolist() == [[word]] * 32

    def test_neighbouring_inputs_share_a_word_per_channel(self):
        codes = torch.arange(8, dtype=U8).repeat(2, 2)  # the code is the input
        stored = self.words(spec("uint4", "per_channel", False), codes)
        assert stored[""].tolist() == [[0x75316420] * 2] * 2

    def test_signed_codes(self):
        codes = torch.arange(-8, 0, dtype=I8).view(1, 8)
        word = self.words(spec("int4", "per_tensor"), codes)[""].item() & 0xFFFFFFFF
        assert word == 0xFDB9ECA8

    def test_two_and_three_bits(self):
        codes = torch.tensor([0, 1, -2, -1], dtype=I8).view(4, 1).repeat(1, 32)
        assert self.words(spec("int2", "per_group"), codes)[""].tolist() == [[0x1B]] * 32
        codes = torch.tensor([[0, 1, 2, 3, -4, -3, -2, -1]], dtype=I8)
        assert self.words(spec("int3", "per_channel"), codes)[""].tolist() == [[0x88, 0xC6, 0xFA]]

    def test_two_bits_as_versions_before_1_0_stored_them(self):
        of, shape = spec("int2", "per_group"), (24, 64)
        layout, state = EarlierPackedLayout("reorder"), state_of(of, shape)
        expected = {"": ((64, 24), I32), "scale": ((2, 24), F32), "zero_point": ((2, 24), I32)}
        assert layout.declare(of, shape, True) == expected
        stored = {
            "": state.codes.t().to(I32).contiguous(),
            "scale": state.scale.t().contiguous(),
            "zero_point": state.zero_point.t().to(I32).contiguous(),
        }
        value = layout.value(of, shape, stored, F32)
        assert torch.equal(value, dequantize(*state[1:4], of.scheme))


@pytest.mark.parametrize(
    "layout", [PackedLayout("reorder"), ValueLayout()], ids=["codes", "values"]
)
class TestActivations:
    def test_static(self, layout):
        declared = layout.declare(spec("int8", "per_tensor"), (), False)
        assert declared["scale"] == ((), F32) and declared["zero_point"][0] == ()
        assert set(declared) == {"scale", "zero_point"}
        assert layout.declare(spec("fp8_e4m3", "per_tensor"), (), False) == {"scale": ((), F32)}

    def test_nothing_is_stored_for_dynamic_ones_and_casts(self, layout):
        dynamic = QuantizationSpec("int8", qscheme="per_channel", ch_axis=1, is_dynamic=True)
        assert layout.declare(dynamic, (), False) == {}
        assert layout.declare(QuantizationSpec("bfloat16"), (), False) == {}
        assert layout.pack(QuantizedTensor(dynamic, None, None, None), None) == {}
