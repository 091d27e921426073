"""Layouts of versions before 1.0, from bytes written by hand."""

import torch

from quark.torch.export.formats.layouts.earlier import EarlierPackedLayout, EarlierValueLayout
from quark.torch.numerics.codec import decode
from quark.torch.numerics.formats import Dtype
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.configurations import groups, spec

SHAPE = (1, 32)


def mx(element):
    fields = {"mx_element_dtype": element, "ch_axis": -1, "group_size": 32}
    return QuantizationSpec("mx", is_dynamic=False, **fields).for_parameter()


def test_six_bits_in_two_planes():
    stored = {
        "": torch.tensor([[0x7D, 0x2E, 0x47] + [0] * 21], dtype=torch.uint8),
        "scale": torch.tensor([[256 - 3]], dtype=torch.uint8),
    }
    layout = EarlierPackedLayout("reorder")
    for element in ("fp6_e3m2", "fp6_e2m3"):
        of = mx(element)
        declared = layout.declare(of, SHAPE, True)
        assert {part: tuple(t.shape) for part, t in stored.items()} == {
            part: shape for part, (shape, _) in declared.items()
        }
        codes = torch.tensor([[0x12, 0x3E, 0x34, 0x17] + [0] * 28], dtype=torch.uint8)
        expected = decode(codes, Dtype[element].value) * 2.0**-3
        assert layout.value(of, SHAPE, stored, torch.float32).equal(expected)


def test_exponents_without_bias():
    """The byte 255 is the exponent -1, not NaN."""
    codes = torch.full((1, 16), 0x22, dtype=torch.uint8)  # 1.0 in fp4
    for byte, scale in {255: 0.5, 0: 1.0, 2: 4.0, 252: 2.0**-4}.items():
        stored = {"": codes, "scale": torch.tensor([[byte]], dtype=torch.uint8)}
        value = EarlierPackedLayout("reorder").value(mx("fp4"), SHAPE, stored, torch.float32)
        assert value.eq(scale).all()


def test_values_that_were_stored_before_they_were_quantized():
    values = torch.randn(4, 32)
    stages = [spec("fp8_e4m3"), spec("int4", "per_channel", True)]
    two = QuantizationSpec.of_stages(stages).for_parameter()
    scale, scale_2 = values.abs().max() / 448, torch.full((4,), 64.0)
    stored = {"": values, "scale": scale, "scale_2": scale_2, "zero_point_2": torch.zeros(4)}
    layout = EarlierValueLayout()
    first = (values / scale).to(torch.float8_e4m3fn).float()
    expected = (first / 64).round().clamp(-8, 7) * 64 * scale
    value = layout.value(two, (4, 32), stored, torch.float32)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    assert layout.unpack(two, (4, 32), stored).value(torch.float32).equal(value)
    again = layout.value(two, (4, 32), {**stored, "": value}, torch.float32)
    assert again.equal(value)


def test_groups_of_rows_come_last():
    of = groups("int4", size=8, ch_axis=0).for_parameter()
    declared = EarlierValueLayout().declare(of, (16, 3), True)
    assert {part: shape for part, (shape, _) in declared.items()} == {
        "scale": (3, 2),
        "zero_point": (3, 2),
    }
    codes = torch.randint(-8, 8, (16, 3)).float()
    scale = torch.tensor([[0.5, 1.0], [2.0, 4.0], [8.0, 16.0]])
    values = codes * scale.T.repeat_interleave(8, 0)
    stored = {"": values, "scale": scale, "zero_point": torch.zeros(3, 2, dtype=torch.int32)}
    state = EarlierValueLayout().unpack(of, (16, 3), stored)
    assert state.codes.float().equal(codes)
