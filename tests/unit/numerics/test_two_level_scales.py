"""Block scales of eight bits, alone and relative to a scale of the whole tensor."""

import ml_dtypes
import numpy as np
import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize, quantize
from quark.torch.numerics.scale_formats import E4M3, E5M3
from quark.torch.numerics.scales import tensor_scale_from_range
from quark.torch.numerics.scheme import Scheme

NVFP4 = Scheme(Dtype.fp4.value, QSchemeType.per_group, axis=-1, group=16, scale=E4M3)
AMDFP4 = Scheme(Dtype.fp4.value, QSchemeType.per_group, axis=-1, group=16, scale=E5M3)
SMALLEST = 2.0**-126


def faked(x, scheme=NVFP4, tensor_scale=None):
    return fake_quantize(x, *dynamic_qparams(x, scheme, tensor_scale), scheme)


def nvfp4(x, over=None):
    """Scales and values, one block after the other, in float32."""
    x = x.numpy()
    if over is None:
        over = np.abs(x).max() / np.float32(6 * 448)
    scales, out = [], x.copy()
    for row in out:
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            ratio = np.clip(np.abs(block).max() / np.float32(6) / over, 0, 448)
            ratio = ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            scale = max(ratio, np.float32(2.0**-9)) * over
            scales.append(scale)
            codes = (block * (np.float32(1) / scale)).astype(ml_dtypes.float4_e2m1fn)
            block[:] = codes.astype(np.float32) * scale
    return torch.tensor(np.array(scales)).reshape(len(x), -1), torch.from_numpy(out)


@pytest.mark.parametrize("shape", [(4, 64), (3, 50), (1, 5), (2, 33)])
@pytest.mark.parametrize("factor", [1.0, 0.02, 1e-12, 1e25])
def test_as_the_definition(shape, factor):
    x = torch.randn(shape) * factor
    scales, values = nvfp4(x)
    assert torch.equal(dynamic_qparams(x, NVFP4)[0], scales)
    assert torch.equal(faked(x), values)


def test_known_tensor_scale():
    lo, hi = torch.tensor([-1.0, -2.0]), torch.tensor([3.0205958, 0.5])
    assert tensor_scale_from_range(lo, hi, NVFP4).item() == pytest.approx(0.00112373, abs=5e-9)


def test_a_block_far_below_the_largest_keeps_the_smallest_scale():
    x = torch.ones(1, 32)
    x[0, 16:] = 1e-7
    scale, _ = dynamic_qparams(x, NVFP4)
    over = np.float32(1) / np.float32(6 * 448)
    assert scale.tolist() == [[448 * over, 2.0**-9 * over]]
    assert (faked(x)[0, 16:] == 0).all()


def test_larger_values_than_a_given_tensor_scale_saturate():
    x = torch.randn(2, 32)
    over = x.abs().max() / (6 * 448) / 4
    _, values = nvfp4(x, np.float32(over))
    assert torch.equal(faked(x, tensor_scale=over), values)
    assert faked(x, tensor_scale=over).abs().max() <= 6 * 448 * over


def test_a_tensor_scale_makes_blocks_independent():
    x = torch.randn(3, 32)
    over = torch.tensor(0.01)
    assert torch.equal(faked(x, tensor_scale=over)[1:], faked(x[1:], tensor_scale=over))


@pytest.mark.parametrize("scheme", [NVFP4, AMDFP4], ids=["e4m3", "e5m3"])
def test_zeros_stay_zeros(scheme):
    assert (faked(torch.zeros(4, 32), scheme) == 0).all()
    x = torch.randn(4, 32)
    x[1] = 0
    out = faked(x, scheme)
    assert (out[1] == 0).all() and (out[0] != 0).any()


@pytest.mark.parametrize("factor", [2.0**-149, 1e-44, 1e-42, 1e-38, 1e-37, 1e-33, 1e37])
@pytest.mark.parametrize("scheme", [NVFP4, AMDFP4], ids=["e4m3", "e5m3"])
def test_both_ends_of_float32(scheme, factor):
    x = torch.linspace(-8, 8, 64).reshape(2, 32) * factor
    x[0, 0] = 0
    scale, _ = dynamic_qparams(x, scheme)
    assert (scale >= SMALLEST).all() and (1 / scale).isfinite().all()
    out = faked(x, scheme)
    assert out.isfinite().all()
    assert (out.abs() <= x.abs().max() * 1.1).all()


def test_nan_stays_nan():
    x = torch.randn(2, 32)
    x[0, 3] = float("nan")
    lost = faked(x, AMDFP4).isnan()
    assert lost[0, 3] and not lost[0, 16:].any() and not lost[1].any()
    assert faked(x, tensor_scale=torch.tensor(0.01))[0, 3].isnan()


@pytest.mark.parametrize("factor", [1.0, 1e-4, 3e4, 6e5])
def test_e5m3_scales_need_no_second_level(factor):
    x = torch.randn(4, 64) * factor
    scale, _ = dynamic_qparams(x, AMDFP4)
    amax = x.reshape(4, 4, 16).abs().amax(-1)
    exponent = torch.frexp(amax.double() / 6).exponent - 1
    step = torch.exp2(exponent.double().clamp(min=-14) - 3)
    expected = ((amax / 6).double() / step).round() * step
    assert torch.equal(scale.double(), expected.clamp(2.0**-17, 114688))
    codes = quantize(x, scale, None, AMDFP4)
    assert codes.max() <= 15 and codes.unique().numel() > 8


def test_integers_under_two_levels():
    scheme = Scheme(Dtype.int4.value, QSchemeType.per_group, axis=-1, group=16, scale=E4M3)
    x = torch.randn(4, 64)
    scale, _ = dynamic_qparams(x, scheme)
    over = x.abs().max() / (7.5 * 448)
    ratio = scale / over
    assert torch.allclose(ratio, ratio.to(torch.float8_e4m3fn).float(), rtol=1e-6, atol=0)
    # Half a step and what a scale of four bits may be off at eight steps from zero.
    assert ((faked(x, scheme) - x).abs() <= scale.repeat_interleave(16, -1) * 1.05).all()
