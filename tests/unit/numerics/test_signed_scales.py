"""Scales of both signs: the value farthest from zero has the smallest code, whatever its sign."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quark.torch.numerics.scales import (
    block_range,
    qparams_from_range,
    represented_range,
    round_scale,
)
from quark.torch.quantization.config.config import QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.nn.quantizer import QuantizedTensor

INTEGERS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "uint4", "uint8"]
FIELDS = {"qscheme": "per_group", "ch_axis": -1, "group_size": 8, "is_dynamic": False}


def spec(dtype="int4", signed=True, **changes):
    return QuantizationSpec(dtype, signed_scales=signed, **FIELDS | {"symmetric": True} | changes)


def rounded(x, of):
    """A tensor as its codes and scales."""
    scale, zeros = qparams_from_range(*block_range(x, of.scheme), of.scheme)
    return QuantizedTensor.from_values(of, x, scale, zeros)


def test_an_example():
    state = rounded(
        torch.tensor([[1, -0.6, 0.1, 0, 0, 0, 0, 0], [-1, 0.6, 0, 0, 0, 0, 0, 0]]), spec()
    )
    assert state.scale.flatten().tolist() == [-0.125, 0.125]
    assert state.codes.tolist() == [[-8, 5, -1, 0, 0, 0, 0, 0], [-8, 5, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("scale_type", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", INTEGERS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**16), magnitude=st.floats(1e-3, 1e3))
def test_the_codes_of_a_tensor_are_those_of_its_negative(dtype, scale_type, seed, magnitude):
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed)) * magnitude
    groups = x.view(3, 4, 8)
    assume(bool((groups.amax(-1) != -groups.amin(-1)).all()))
    of = spec(dtype, scale_type=scale_type)
    one, other = rounded(x, of), rounded(-x, of)
    assert torch.equal(one.codes, other.codes) and torch.equal(one.scale, -other.scale)
    assert torch.equal(one.value(torch.float32), -other.value(torch.float32))
    is_up = groups.amax(-1) > -groups.amin(-1)
    assert torch.equal(one.scale < 0, is_up)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_farthest_value_has_the_smallest_code(dtype):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    groups = x.view(64, 4, 8)
    codes = rounded(x, spec(dtype)).codes.view(64, 4, 8)
    farthest = codes.gather(-1, groups.abs().argmax(-1, keepdim=True))
    assert (farthest == Dtype[dtype].value.qmin).all()


@pytest.mark.parametrize(("dtype", "at_most"), [("int2", 0.62), ("int3", 0.77), ("int4", 0.84)])
def test_the_error_is_smaller(dtype, at_most):
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    errors = [
        float(
            (rounded(x, spec(dtype, signed, group_size=32)).value(torch.float32) - x).square().sum()
        )
        for signed in (True, False)
    ]
    assert errors[0] < at_most * errors[1]


@pytest.mark.parametrize("dtype", INTEGERS)
@settings(deadline=None, max_examples=40)
@given(lo=st.floats(-1e4, 0, width=32), hi=st.floats(0, 1e4, width=32))
def test_a_range_that_is_represented_has_the_same_scale(dtype, lo, hi):
    scheme = spec(dtype).scheme
    scale, zeros = qparams_from_range(torch.tensor([lo]), torch.tensor([hi]), scheme)
    ends = represented_range(scale, zeros, scheme)
    again, _ = qparams_from_range(*ends, scheme)
    assert ends[0] <= 0 <= ends[1]
    torch.testing.assert_close(again, scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp8_e4m3", "symmetric": None},
        {"dtype": "uint4", "symmetric": False},
        {"scale_type": "pof2"},
        {"is_dynamic": True},
        {"qat_spec": {"name": "qat"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_others_are_refused(fields):
    if "qat_spec" in fields:
        from quark.torch.quantization.config.qat import QATSpec

        fields = {"qat_spec": QATSpec()}
    with pytest.raises(ValueError, match="signed_scales=True is for"):
        spec(**fields)


def test_inputs_are_refused():
    own = spec(qscheme="per_tensor", ch_axis=None, group_size=None)
    with pytest.raises(ValueError, match="input_tensors: signed_scales=True is for weights"):
        QuantizationConfig(input_tensors=own)


def test_configurations_keep_it_and_do_without():
    assert QuantizationSpec.from_dict(spec().to_dict()) == spec()
    assert "signed_scales" not in spec(signed=False).to_dict()


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
def test_rounded_scales_keep_the_signs_of_others(kind):
    to = spec(scale_type=kind).scheme.scale
    signs, given = torch.tensor([-1.0, 1.0, -1.0, 1.0]), torch.tensor([-0.3, 0.3, 0.2, -0.2])
    found = round_scale(given, to, signs=signs)
    smallest = round_scale(torch.zeros(1), to)[0]
    assert torch.equal(found[:2].abs(), round_scale(given[:2].abs(), to))
    assert torch.equal(found, torch.stack([-found[1], found[1], -smallest, smallest]))
