"""Shapes of scales, and which schemes carry zero points."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.numerics.scheme import Scheme

INT8 = Dtype.int8.value


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        ({}, (8, 64), ()),
        ({}, (), ()),
        ({"qscheme": QSchemeType.per_channel, "axis": 0}, (8, 64), (8,)),
        ({"qscheme": QSchemeType.per_channel, "axis": -1}, (8, 64), (64,)),
        ({"qscheme": QSchemeType.per_channel, "axis": 1}, (4, 3, 5, 5), (3,)),
        ({"qscheme": QSchemeType.per_group, "axis": -1, "group": 32}, (8, 64), (8, 2)),
        ({"qscheme": QSchemeType.per_group, "axis": -1, "group": 32}, (8, 50), (8, 2)),
        ({"qscheme": QSchemeType.per_group, "axis": 0, "group": 4}, (8, 64), (2, 64)),
        ({"qscheme": QSchemeType.per_group, "axis": -1, "group": -1}, (8, 64), (8, 1)),
        ({"qscheme": QSchemeType.per_group, "axis": -1, "group": 16}, (2, 3, 64), (2, 3, 4)),
        ({"per_token": True}, (2, 3, 64), (2, 3, 1)),
        ({"per_token": True}, (64,), (1,)),
    ],
    ids=str,
)
def test_scale_shape(options, shape, expected):
    assert Scheme(INT8, **options).scale_shape(shape) == expected


@settings(deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    axis=st.integers(-4, 3),
    group=st.sampled_from([-1, 1, 2, 3, 32]),
    qscheme=st.sampled_from(QSchemeType),
    per_token=st.booleans(),
)
def test_one_scale_for_each_block(shape, axis, group, qscheme, per_token):
    axis = axis % len(shape) - len(shape) * (axis < 0)
    if qscheme is QSchemeType.per_block and len(shape) < 2:
        shape = [*shape, 3]
    scheme = Scheme(INT8, qscheme, axis, group, per_token=per_token, block=(2, -1))
    grid = scheme.blocks(tuple(shape)).grid
    assert math.prod(scheme.scale_shape(tuple(shape))) == math.prod(grid)


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_integers_have_a_zero_point(dtype, symmetric):
    scheme = Scheme(dtype.value, symmetric=symmetric)
    assert scheme.has_zero_point == ("int" in dtype.name or dtype is Dtype.mx)
    assert not Scheme(Dtype.mx.value, scale=E8M0).has_zero_point


def test_axis_that_is_not_there():
    with pytest.raises(ValueError, match="ch_axis=2 is not an axis"):
        Scheme(INT8, QSchemeType.per_channel, 2).blocks((8, 64))


def test_a_scheme_is_a_value():
    scheme = Scheme(INT8, QSchemeType.per_group, -1, 32)
    with pytest.raises(FrozenInstanceError):
        scheme.group = 64
    assert replace(scheme) == scheme and hash(replace(scheme)) == hash(scheme)
    assert scheme.symmetric and scheme.rounding is RoundType.half_even


def test_blocks_follow_every_change_of_the_scheme():
    """Layouts are remembered by scheme and shape: no two may be mixed up."""
    scheme = Scheme(INT8, QSchemeType.per_group, -1, 32)
    assert scheme.blocks((8, 64)).grid == (8, 2)
    assert replace(scheme, group=16).blocks((8, 64)).grid == (8, 4)
    assert replace(scheme, axis=0).blocks((8, 64)).grid == (1, 64)
    assert scheme.blocks((4, 64)).grid == (4, 2)
