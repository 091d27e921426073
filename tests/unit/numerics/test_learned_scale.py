"""Fake quantization whose scale is trained, against formulas and finite differences in float64."""

import math

import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.learned_scale import fake_quantize_learned
from quark.torch.numerics.qdq import fake_quantize
from quark.torch.numerics.scheme import Scheme

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def scheme(dtype, qscheme="per_tensor", **fields):
    return Scheme(Dtype[dtype].value, QSchemeType[qscheme], **fields)


def integer_codes(bits, zero_point=0, signed=True):
    """The values of all codes of an integer under a scale of 1, float64."""
    lo = -(2 ** (bits - 1)) if signed else 0
    return torch.arange(lo, lo + 2**bits, dtype=torch.float64) - zero_point


def written_out(x, scale, codes):
    """The result, and its derivatives by scale and x, value by value, with rounding as constant."""
    ratio = x.double() / scale
    nearest = codes[(ratio.unsqueeze(-1) - codes).abs().argmin(-1)]
    inside = (ratio >= codes.min()) & (ratio <= codes.max())
    return nearest * scale, torch.where(inside, nearest - ratio, nearest), inside.double()


# Name -> (scheme, scale, zero point, values of the codes under a scale of 1)
CASES = {
    "int4": (scheme("int4"), 0.3, 0, integer_codes(4)),
    "int8": (scheme("int8"), 0.02, 0, integer_codes(8)),
    "uint4": (scheme("uint4", symmetric=False), 0.3, 5, integer_codes(4, 5, signed=False)),
    "uint8 symmetric": (scheme("uint8"), 0.02, 128, integer_codes(8, 128, signed=False)),
    "fp4": (scheme("fp4"), 0.4, None, torch.tensor([-v for v in FP4] + FP4).double()),
}


@pytest.fixture
def x():
    return 1.5 * torch.randn(40, 24)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_formula(case, x):
    how, scale, zero_point, codes = CASES[case]
    expected, by_scale, by_x = written_out(x, torch.tensor(scale).double(), codes)
    assert 0.01 < 1 - by_x.mean() < 0.9 or case == "int8"  # some values saturate
    weights = torch.randn_like(x)
    x.requires_grad_()
    parameter = torch.tensor(scale, requires_grad=True)
    zeros = None if zero_point is None else torch.tensor(zero_point)
    y = fake_quantize_learned(x, parameter, parameter.detach(), zeros, how, 0.25)
    assert torch.equal(y, fake_quantize(x, parameter.detach(), zeros, how))
    torch.testing.assert_close(y.double(), expected, atol=1e-6, rtol=0)
    (y * weights).sum().backward()
    assert torch.equal(x.grad, weights * by_x)
    torch.testing.assert_close(
        parameter.grad.double(), 0.25 * (weights * by_scale).sum(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("how", "shape"),
    [
        (scheme("int4", "per_channel"), (6,)),
        (scheme("int4", "per_channel", axis=1), (20,)),
        (scheme("int4", "per_group", axis=-1, group=8), (6, 3)),
        (scheme("fp4", "per_block", block=(4, 8)), (2, 3)),
    ],
    ids=["rows", "columns", "groups with padding", "blocks"],
)
def test_one_gradient_for_each_block(how, shape):
    x, scale = torch.randn(6, 20), torch.rand(shape) / 4 + 0.1
    parameter = scale.clone().requires_grad_()
    weights = torch.randn_like(x)
    (fake_quantize_learned(x, parameter, scale, None, how, 1.0) * weights).sum().backward()

    blocks = how.blocks(x.shape)
    wide = blocks.join(blocks.spread(scale).expand(blocks.view))
    codes = CASES["fp4"][3] if how.fmt.is_float else integer_codes(4)
    _, by_scale, _ = written_out(x, wide.double(), codes)
    expected = blocks.split(by_scale * weights).sum(blocks.reduced).reshape(shape)
    torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [3, 8])
def test_finite_differences_of_the_smoothed_function(bits):
    """The loss with a constant offset in the place of rounding, in float64."""
    how, codes = scheme(f"int{bits}"), integer_codes(bits)
    x, scale, target = torch.randn(50), 0.15 if bits == 3 else 0.05, torch.randn(50).double()
    parameter = torch.tensor(math.log2(scale), requires_grad=True)
    value = (2 ** parameter.detach()).float()
    y = fake_quantize_learned(x, parameter, value, None, how, value * math.log(2))
    y.double().sub(target).square().sum().backward()

    ratio = x.double() / value.double()
    offset = codes[(ratio.unsqueeze(-1) - codes).abs().argmin(-1)] - ratio  # constant from now on
    is_cut = (ratio < codes.min()) | (ratio > codes.max())
    assert is_cut.any() == (bits == 3)

    def loss(log2):
        s = 2.0**log2
        smooth = torch.where(is_cut, (ratio + offset) * s, (x.double() / s + offset) * s)
        return (smooth - target).square().sum()

    at, step = math.log2(float(value)), 1e-5
    slope = (loss(at + step) - loss(at - step)) / (2 * step)
    assert parameter.grad.item() == pytest.approx(slope.item(), rel=1e-3)


def test_half_precision_has_gradients_in_its_type():
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.tensor(0.1, requires_grad=True)
    y = fake_quantize_learned(x, scale, scale.detach(), None, scheme("int4"), 1.0)
    y.float().square().sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16 and scale.grad.dtype == torch.float32


@pytest.mark.parametrize("groups", [{}, {"qscheme": "per_group", "axis": -1, "group": 8}])
def test_the_next_operation_may_work_in_place(groups):
    how = scheme("int4", **groups)
    scale = torch.full(() if not groups else (4, 3), 0.1)
    for call in (
        lambda x: fake_quantize(x, scale, None, how),
        lambda x: fake_quantize_learned(x, scale, scale, None, how, 1.0),
    ):
        x = torch.randn(4, 20, requires_grad=True)
        y = call(x)
        (torch.relu_(y) * 3).sum().backward()
        is_inside = fake_quantize(x.detach(), scale, None, how).abs() < 0.7
        assert torch.equal(x.grad[is_inside], 3.0 * (x.detach() > 0.05)[is_inside])
