"""The schemes of ggml's blocks: formats, groups and scales."""

import pytest

from quark.torch.numerics.scale_formats import SUPER_BLOCKS, ScaleFormat
from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES, fallback_of
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec

HALF = ScaleFormat("float16")
# Scheme -> format, elements of a group, symmetric, scales, whether zero points keep a fraction.
EXPECTED = {
    "q4_0": ("int4", 32, True, HALF, False),
    "q4_1": ("uint4", 32, False, HALF, False),
    "q5_0": ("int5", 32, True, HALF, False),
    "q5_1": ("uint5", 32, False, HALF, False),
    "q8_0": ("int8", 32, True, HALF, False),
    "iq4_nl": ("iq4_nl", 32, True, HALF, False),
    "q2_k": ("uint2", 16, False, SUPER_BLOCKS["uint4x16"], True),
    "q3_k": ("int3", 16, True, SUPER_BLOCKS["int6x16"], False),
    "q4_k": ("uint4", 32, False, SUPER_BLOCKS["uint6x8"], True),
    "q5_k": ("uint5", 32, False, SUPER_BLOCKS["uint6x8"], True),
    "q6_k": ("int6", 16, True, SUPER_BLOCKS["int8x16"], False),
}


def test_every_scheme_is_expected():
    assert EXPECTED.keys() == BLOCK_SCHEMES.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_specification(name):
    layer = scheme(name)
    made = layer.weight.scheme
    fields = (made.fmt.name, made.group, made.symmetric, made.scale, made.float_zero_point)
    assert fields == EXPECTED[name]
    assert layer.input_tensors is None and layer.weight.is_dynamic is False
    assert QuantizationSpec.from_dict(layer.weight.to_dict()) == layer.weight
    assert [other for other, kind in BLOCK_SCHEMES.items() if kind.fits(layer.weight)] == [name]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_super_block_has_256_elements(name):
    weight = scheme(name).weight
    if weight.scheme.scale.span:
        assert weight.group_size * weight.scheme.scale.span == 256
        assert not BLOCK_SCHEMES[fallback_of(weight)].has_super_blocks
    else:
        assert fallback_of(weight) == ""
