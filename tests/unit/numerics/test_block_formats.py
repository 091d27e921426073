"""Formats whose blocks share an exponent, against slow oracles and the examples of their papers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dequantize, dynamic_qparams, fake_quantize, quantize
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.numerics.scheme import Scheme
from tests.unit.numerics import kinds
from tests.unit.numerics.kinds import FLOATS, cast

MODES = ["floor", "even", "ceil"]
SHARED = [*FLOATS, *kinds.SHARED]
SHAPES = [(4, 64), (3, 50), (33,), (2, 3, 40), (5, 1), (1, 7)]
KINDS = ["normal", "zeros", "zero rows", "wide", "subnormal", "tiny", "huge", "powers", "outlier"]
VECTOR = [1, 0.9, -0.4, 0.3, 0.1, -0.05, 0.02, 0.01, 3.7, -2.2, 0.6, 0.5, 1.5, -0.75, 0.125]
VECTOR = torch.tensor([*VECTOR, -0.0625])


def scheme_of(name, axis=-1, mode="even", group=None):
    fmt = Dtype[name].value
    if fmt.block:
        fmt = replace(fmt, block=group or fmt.block)
        return Scheme(fmt, QSchemeType.per_group, axis=axis, group=fmt.block)
    options = {"axis": axis, "group": group or 32, "scale": E8M0, "scale_mode": mode}
    return Scheme(fmt, QSchemeType.per_group, **options)


def faked(x, scheme):
    return fake_quantize(x, *dynamic_qparams(x, scheme), scheme)


def sample(kind, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "zero rows":
        x[0] = 0
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-40, 40, shape, generator=generator).float())
    if kind == "powers":
        x = x.sign() * torch.exp2(torch.randint(-9, 9, shape, generator=generator).float())
    if kind == "outlier":
        x.view(-1)[0] = 3e4
    factor = {"zeros": 0.0, "subnormal": 2.0**-140, "tiny": 2.0**-125, "huge": 2.0**125}
    return (x * factor.get(kind, 1.0)).clamp(-3.4e38, 3.4e38)


def blocks_of(x, axis, size):
    """The blocks along an axis, one after the other, as (values, where they are)."""
    lines = x.double().numpy() if axis == -1 else x.double().numpy().swapaxes(axis, -1)
    for at in np.ndindex(lines.shape[:-1]):
        for start in range(0, lines.shape[-1], size):
            yield lines[at][start : start + size], (*at, slice(start, start + size))


def slowly(x, axis, size, one):
    """Apply ``one`` to each block."""
    out = x.double().numpy().copy()
    view = out if axis == -1 else out.swapaxes(axis, -1)
    for values, where in blocks_of(x, axis, size):
        view[where] = one(values)
    return torch.from_numpy(out).float()


def floor_log2(x):
    return int(np.frexp(x)[1]) - 1


def normal(amax):
    """Values below the smallest normal number do not count."""
    return amax >= 2.0**-126


def mx_float(values, name, mode):
    largest = kinds.largest(name)
    top = floor_log2(largest)  # exponent of the largest element
    amax = np.abs(values).max()
    exponent = -127
    if normal(amax):
        mantissa = kinds.mantissa_bits(name)
        exponent = floor_log2(amax)
        if mode == "ceil":
            exponent += amax > 2.0**exponent
        if mode == "even":
            exponent += amax >= 2.0**exponent * (2 - 2.0 ** -(mantissa + 1))
        exponent = min(max(exponent - top, -127), 127)
    scaled = np.clip(values / 2.0**exponent, -largest, largest)
    return cast(scaled, name) * 2.0**exponent


def mx_int8(values):
    amax = np.abs(values).max()
    exponent = floor_log2(amax) if normal(amax) else -127
    # "even" rounds to 8 bits after the point, of 2^-126 where amax is below it.
    below = 2.0 ** (exponent + 1) - 2.0 ** (max(exponent, -126) - 9)
    exponent = min(exponent + (amax >= below), 127)
    step = 2.0 ** (exponent - 6)
    return np.clip(np.round(values / step), -127, 127) * step


def micro(values, bits):
    """MX6 and MX9: pairs of small values gain a bit."""
    out = np.zeros_like(values)
    amax = np.abs(values).max()
    exponent = floor_log2(amax) if normal(amax) else -127
    for i in range(0, len(values), 2):
        pair = values[i : i + 2]
        shift = exponent > -127 and np.abs(pair).max() < 2.0**exponent
        step = 2.0 ** (exponent - shift - bits + 2)
        limit = 2 ** (bits - 1) - 1
        out[i : i + 2] = np.clip(np.round(pair / step), -limit, limit) * step
    return out


def bfp(values):
    amax = np.abs(values).max()
    step = 2.0 ** ((floor_log2(amax) if normal(amax) else -127) - 6)
    codes = np.round(values / step)
    if codes.max() > 127 or codes.min() < -128:
        step *= 2
        codes = np.round(values / step)
    return np.clip(codes, -128, 127) * step


def oracle(x, name, axis, mode="even"):
    if name in FLOATS:
        return slowly(x, axis, 32, lambda v: mx_float(v, name, mode))
    if name == "mx":
        return slowly(x, axis, 32, mx_int8)
    if name == "bfp16":
        return slowly(x, axis, 8, bfp)
    return slowly(x, axis, 16, lambda v: micro(v, {"mx6": 5, "mx9": 8}[name]))


# ---- any values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", SHARED)
def test_as_the_slow_oracle(name, axis, kind):
    for shape in SHAPES:
        x = sample(kind, shape)
        assert torch.equal(faked(x, scheme_of(name, axis)), oracle(x, name, axis)), shape


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FLOATS)
def test_scale_modes_as_the_slow_oracle(name, mode):
    for kind in ("normal", "powers", "wide", "huge"):
        x = sample(kind, (4, 96), seed=1)
        assert torch.equal(faked(x, scheme_of(name, -1, mode)), oracle(x, name, -1, mode)), kind


@pytest.mark.parametrize("name", SHARED)
def test_quantized_values_stay(name):
    for kind in KINDS:
        once = faked(sample(kind, (6, 50)), scheme_of(name))
        assert torch.equal(faked(once, scheme_of(name)), once), kind


@pytest.mark.parametrize("name", SHARED)
def test_scales_with_powers_of_two(name):
    x = torch.randn(4, 64)
    for power in (2.0**-20, 2.0**20):
        assert torch.equal(faked(x * power, scheme_of(name)), faked(x, scheme_of(name)) * power)


@pytest.mark.parametrize("name", [name for name in SHARED if name != "bfp16"])
def test_sign_only_changes_the_sign(name):
    x = torch.randn(4, 64)
    assert torch.equal(faked(-x, scheme_of(name)), -faked(x, scheme_of(name)))


@pytest.mark.parametrize("name", SHARED)
def test_blocks_do_not_see_each_other(name):
    scheme = scheme_of(name)
    x = torch.randn(3, 2 * scheme.group)
    changed = x.clone()
    changed[:, scheme.group :] *= 1000
    before, after = faked(x, scheme), faked(changed, scheme)
    assert torch.equal(before[:, : scheme.group], after[:, : scheme.group])
    assert not torch.equal(before[:, scheme.group :], after[:, scheme.group :])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHARED)
def test_nan_stays_nan_and_alone(name, mode):
    x = torch.randn(2, 64)
    x[0, 5] = float("nan")
    out = faked(x, scheme_of(name, mode=mode))
    assert out.isnan().nonzero().tolist() == [[0, 5]]
    assert (out[0, torch.arange(64) != 5].abs() <= 8).all()
    assert torch.equal(out[1], faked(x[1:], scheme_of(name, mode=mode))[0])


# ---- examples -----------------------------------------------------------------------------------

MX_BLOCK = [7.9, -5, 3.3, 1, 0.26, 0.24, 0.1, -0.6]
MX_EXAMPLE = {
    "fp8_e4m3": (121, [7, -5, 3.25, 1, 0.25, 0.234375, 0.1015625, -0.625]),
    "fp8_e5m2": (114, [7, -5, 3.5, 1, 0.25, 0.25, 0.09375, -0.625]),
    "fp6_e3m2": (125, [7, -5, 3.5, 1, 0.25, 0.25, 0.09375, -0.625]),
    "fp6_e2m3": (127, [7.5, -5, 3.25, 1, 0.25, 0.25, 0.125, -0.625]),
    "fp4": (127, [6, -4, 3, 1, 0.5, 0, 0, -0.5]),
    "mx": (129, [7.875, -5, 3.3125, 1, 0.25, 0.25, 0.125, -0.625]),
}


@pytest.mark.parametrize("name", MX_EXAMPLE)
def test_microscaling_example(name):
    biased, values = MX_EXAMPLE[name]
    scheme = scheme_of(name, mode="floor")
    x = torch.tensor([MX_BLOCK + [0.0] * 24])
    scale, zero_point = dynamic_qparams(x, scheme)
    assert zero_point is None
    assert (scale.log2() + scheme.fmt.fraction_bits + 127).tolist() == [[biased]]
    assert faked(x, scheme).tolist() == [values + [0.0] * 24]


def test_mxint8_example_codes():
    x = torch.tensor([MX_BLOCK + [0.0] * 24])
    scheme = scheme_of("mx", mode="floor")
    codes = quantize(x, *dynamic_qparams(x, scheme), scheme)
    assert codes.dtype == torch.int8
    assert codes[0, :8].tolist() == [126, -80, 53, 16, 4, 4, 2, -10]


MX9_EXAMPLE = [1, 0.90625, -0.40625, 0.296875, 0.09375, -0.046875, 0.015625, 0.015625]
MX9_EXAMPLE += [3.6875, -2.1875, 0.59375, 0.5, 1.5, -0.75, 0.125, -0.0625]
MX6_EXAMPLE = [1, 0.875, -0.375, 0.25, 0.125, 0, 0, 0, 3.75, -2.25, 0.625, 0.5, 1.5, -0.75]
MX6_EXAMPLE += [0.125, 0]


@pytest.mark.parametrize(("name", "expected"), [("mx9", MX9_EXAMPLE), ("mx6", MX6_EXAMPLE)])
def test_shared_microexponents_example(name, expected):
    assert faked(VECTOR, scheme_of(name)).tolist() == expected


def test_shared_microexponents_of_other_blocks():
    x = torch.randn(3, 64)
    x[:, 40] = 100
    for size in (4, 16, 32):
        expected = slowly(x, -1, size, lambda v: micro(v, 8))
        assert torch.equal(faked(x, scheme_of("mx9", group=size)), expected)


@pytest.mark.parametrize(
    ("amax", "step"),
    [(1.0, 2.0**-6), (1.98, 2.0**-6), (1.9999, 2.0**-5), (-1.9999, 2.0**-6), (127.5 / 64, 2.0**-5)],
)
def test_block_floating_point_goes_up_where_the_largest_value_would_not_fit(amax, step):
    x = torch.tensor([[amax, 0.3, -0.2, 0, 0, 0, 0.01, 0.02]])
    scale, _ = dynamic_qparams(x, scheme_of("bfp16"))
    assert scale.item() == step
    assert abs(faked(x, scheme_of("bfp16"))[0, 0] - amax) <= step / 2


@pytest.mark.parametrize("name", ["mx", "mx6", "mx9"])
def test_the_most_negative_code_is_not_used(name):
    scheme = scheme_of(name)
    x = torch.full((1, 32), -(2 - 2.0**-20))
    codes = quantize(x, *dynamic_qparams(x, replace(scheme, scale_mode="floor")), scheme)
    limit = 2 ** (scheme.fmt.bits - 1) - 1
    assert codes.unique().tolist() == [-limit]
    assert dequantize(codes, *dynamic_qparams(x, scheme), scheme).isfinite().all()
