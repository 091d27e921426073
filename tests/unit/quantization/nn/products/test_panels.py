"""Panels of packed weights: the bits of ``dequantize`` for every format and granularity."""

from types import SimpleNamespace

import pytest
import torch

from quark.torch.numerics.formats import Dtype, Format
from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.nn.products.arrangement import (
    Arrangement,
    compact,
    pack_planes,
    plane_widths,
    unpack_planes,
)
from quark.torch.quantization.nn.products.panels import Panels
from quark.torch.quantization.nn.quantizer import QuantizedTensor

WIDE = SimpleNamespace(name="int9", value=Format("int9", 9))  # MX9 with the shifts of its pairs
FORMATS = [  # of up to 8 bits, with values that float16 has by a rule
    d
    for d, fmt in ((d, d.value) for d in Dtype)
    if fmt.bits <= 8 and fmt.has_rule and not fmt.sub_block and fmt.max_value < 65536
] + [WIDE]
ORDERS = [Arrangement.of_rows(70, 64, 32)] + [
    Arrangement.of_columns(70, 64, 32, half) for half in (16, 32)
]


class Scheme:
    """The part of a specification that panels read."""

    def __init__(self, dtype, symmetric):
        from quark.torch.numerics.granularity import QSchemeType
        from quark.torch.numerics.scheme import Scheme

        self.scheme = Scheme(dtype.value, QSchemeType.per_group, 1, 32, symmetric)


def weight(dtype, symmetric, zeros=None):
    """All codes of a format but those of NaN and infinity, in 70 rows of 64, with odd scales."""
    fmt = dtype.value
    bits = torch.arange(70 * 64, dtype=torch.int32).remainder(1 << fmt.bits).view(70, 64)
    if fmt.native is not None:
        codes = bits.byte().view(fmt.code_dtype)
        codes = torch.where(codes.float().isfinite(), codes.float(), 1.0).to(fmt.code_dtype)
    else:
        codes = (bits + (0 if fmt.is_float else fmt.qmin)).to(fmt.code_dtype)
    scale = torch.rand(70, 2) + 0.1
    return QuantizedTensor(Scheme(dtype, symmetric), codes, scale, zeros)


@pytest.mark.parametrize("order", ORDERS, ids=["rows", "columns, 16", "columns, 32"])
@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
@pytest.mark.parametrize("zeros", ["none", "one", "many", "fractions"])
def test_every_format(dtype, order, zeros):
    fmt = dtype.value
    if fmt.is_float and zeros != "none":
        pytest.skip("floats have no zero points")
    points = {
        "none": None,
        "one": torch.full((70, 2), 1),
        "many": torch.randint(fmt.qmin, fmt.qmax + 1, (70, 2)),
        "fractions": torch.rand(70, 2) + 0.3,
    }[zeros]
    state = weight(dtype, zeros == "none", points)
    panels, parts = Panels.pack(state, order)
    values = torch.stack([panel.clone() for panel in panels.decode(parts)])
    expected = dequantize(state.codes, state.scale, points, state.scheme)
    assert torch.equal(order.restore(values), expected)
    codes = panels.codes(parts)
    assert codes.dtype == state.codes.dtype
    assert torch.equal(codes.view(torch.uint8), state.codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
def test_planes_take_the_bits_of_the_codes(dtype):
    _, parts = Panels.pack(weight(dtype, True), ORDERS[1])
    planes = [parts[f"plane_{width}"] for width in plane_widths(dtype.value)]
    assert 8 * sum(p.numel() for p in planes) == dtype.value.bits * 96 * 64  # 70 rows in 3 panels


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
def test_planes_are_unpacked(dtype):
    fmt = dtype.value
    bits = torch.arange(9 * 64).remainder(1 << fmt.bits).view(9, 64)
    bits = bits.byte() if fmt.bits <= 8 else bits.short()
    parts = pack_planes(bits, fmt)
    assert len(parts) == len(plane_widths(dtype.value))
    assert torch.equal(unpack_planes(parts, dtype.value), bits)


def test_bytes_hold_runs_of_elements():
    order = Arrangement(32, 4, 4, 32)
    codes = torch.arange(128).remainder(16).view(32, 4).byte()
    state = QuantizedTensor(Scheme(Dtype.uint4, False), codes, torch.ones(32, 1), None)
    state.spec.scheme.__dict__["group"] = 4
    _, parts = Panels.pack(state, order)
    first, second = codes.flatten().chunk(2)
    assert torch.equal(parts["plane_4"].flatten(), first + 16 * second)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([1.0, 2.0**-127], torch.bfloat16), ([1.0009765625], torch.float16), ([0.1], torch.float32)],
)
def test_scales_keep_their_values_in_the_smallest_type(values, dtype):
    scale = torch.tensor(values)
    assert compact(scale).dtype == dtype
    assert torch.equal(compact(scale).float(), scale)


def test_two_level_scales_stay_in_two_levels():
    state = weight(Dtype.fp4, True)
    ratio = (torch.rand(70, 2) + 0.5).to(torch.float8_e4m3fn).float()
    tensor_scale = torch.tensor(0.0123)
    state = state._replace(scale=ratio * tensor_scale, scale_2=tensor_scale)
    panels, parts = Panels.pack(state, ORDERS[0])
    assert parts["scale"].dtype == torch.bfloat16
    values = torch.stack([panel.clone() for panel in panels.decode(parts)])
    expected = dequantize(state.codes, state.scale, None, state.scheme)
    assert torch.equal(ORDERS[0].restore(values), expected)


def test_threads_have_buffers_of_their_own():
    from concurrent.futures import ThreadPoolExecutor

    packed = [Panels.pack(weight(Dtype.int4, True), ORDERS[0]) for _ in range(2)]
    iterators = [p.decode(parts) for p, parts in packed]
    with ThreadPoolExecutor(1) as other:
        here, there = next(iterators[0]), other.submit(next, iterators[1]).result()
    assert here.data_ptr() != there.data_ptr()
