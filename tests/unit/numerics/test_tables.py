"""Formats whose values are a table: rounding and codes by definition, and refusals."""

import numpy as np
import pytest
import torch

from quark.torch.numerics.code_recovery import recovers_codes
from quark.torch.numerics.codec import decode, encode, round_to_codes
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import (
    dequantize,
    dynamic_qparams,
    fake_quantize,
    is_inside,
    quantize,
    recover_codes,
)
from quark.torch.numerics.rounding import round_to_grid_
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.qat import QATSpec
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.unit.numerics.kinds import TABLES

FIXED = {"is_dynamic": False}
GROUPS = {**FIXED, "qscheme": "per_group", "ch_axis": -1, "group_size": 32}


def groups_of(name, size=32):
    return Scheme(Dtype[name].value, QSchemeType.per_group, -1, size)


def every_value(name):
    """All finite bfloat16 values, the values of a table, the middles between them, and beyond."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    table = torch.tensor(Dtype[name].value.values)
    points = torch.cat([table, (table[1:] + table[:-1]) / 2])
    around = [torch.nextafter(points, points.new_tensor(end)) for end in (-1e9, 1e9)]
    return torch.cat([bits[bits.isfinite()], points, *around])


def nearest(x, name, mode):
    """Return codes by a search of all values, in float64."""
    table = np.array(Dtype[name].value.values)
    exact = np.clip(x.double().numpy(), table[0], table[-1])
    if mode is RoundType.floor:
        return np.maximum((exact[:, None] >= table).sum(1) - 1, 0)
    distances = np.abs(exact[:, None] - table)
    is_near = distances == distances.min(1, keepdims=True)
    first, last = is_near.argmax(1), len(table) - 1 - is_near[:, ::-1].argmax(1)
    takes_first = exact < 0 if mode is RoundType.round else first % 2 == 0
    return np.where(takes_first, first, last)


@pytest.mark.parametrize("mode", RoundType, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", TABLES)
def test_rounding_by_definition(name, mode):
    fmt, x = Dtype[name].value, every_value(name)
    expected = torch.from_numpy(nearest(x, name, mode))
    assert round_to_codes(x.clone(), fmt, mode).long().equal(expected)
    values = round_to_grid_(x.clone(), fmt, mode)
    assert values.equal(torch.tensor(fmt.values)[expected])
    assert encode(values, fmt).long().equal(expected)
    ends = torch.tensor([float("nan"), float("inf"), -float("inf")])
    rounded = round_to_grid_(ends, fmt, mode)
    assert rounded[0].isnan() and rounded[1:].tolist() == [fmt.values[-1], fmt.values[0]]


@pytest.mark.parametrize("name", TABLES)
def test_codes_are_places_in_the_table(name):
    fmt = Dtype[name].value
    assert len(fmt.values) == 1 << fmt.bits and [*fmt.values] == sorted({*fmt.values})
    assert decode(torch.arange(1 << fmt.bits), fmt).tolist() == [*fmt.values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TABLES)
def test_groups(name, dtype):
    """The largest value of a group is a value of the table, on whichever side it is."""
    torch.manual_seed(0)
    scheme, x = groups_of(name), torch.randn(64, 128).to(dtype)
    scale, zero_point = dynamic_qparams(x, scheme)
    codes = quantize(x, scale, zero_point, scheme)
    assert zero_point is None and codes.dtype == torch.uint8
    assert is_inside(x, scale, zero_point, scheme).all()
    values = dequantize(codes, scale, zero_point, scheme, dtype)
    assert fake_quantize(x, scale, zero_point, scheme).equal(values)
    error = (values - x).float().abs().view(64, 4, 32) / scale.view(64, 4, 1)
    gaps = np.diff(Dtype[name].value.values)
    assert error.max() <= gaps.max() / 2 * 1.02
    assert recovers_codes(scale, scheme, dtype)
    assert recover_codes(values, scale, zero_point, scheme).equal(codes)
    ends = x.float().view(64, 4, 32)
    table = Dtype[name].value.values
    expected = torch.maximum(ends.amin(-1) / table[0], ends.amax(-1) / table[-1])
    assert scale.flatten().equal(expected.flatten())


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale_format": "e8m0", **GROUPS}, "e8m0 scales are for floats and mx"),
        ({"symmetric": False, **GROUPS}, "no zero point"),
        ({**GROUPS, "qat_spec": QATSpec()}, "trained scales need integers or floats"),
    ],
)
def test_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        QuantizationSpec(name, **fields)
