"""Names of schemes in other projects."""

import pytest

from quark.torch.quantization.config.presets import ALIASES, scheme, scheme_names
from tests.unit.quantization.config.test_presets import CURRENT, MXFP6_E2M3, MXFP8, described

# Names of compressed-tensors: what it documents of weight and input, and the group size.
ELSEWHERE = {
    "W4A16": (("int4", "per_group", True, False), None, 128),
    "W4A16_ASYM": (("uint4", "per_group", False, False), None, 128),
    "W8A16": (("int8", "per_group", True, False), None, 128),
    "W7A16": (("int7", "per_group", True, False), None, 128),
    "W6A16": (("int6", "per_group", True, False), None, 128),
    "W5A16": (("int5", "per_group", True, False), None, 128),
    "W3A16": (("int3", "per_group", True, False), None, 128),
    "W2A16": (("int2", "per_group", True, False), None, 128),
    "W8A8": CURRENT["ptpc_int8"],
    "W4A8": (("int4", "per_group", True, False), CURRENT["ptpc_int8"][1], 128),
    "W4AFP8": (("int4", "per_group", True, False), CURRENT["ptpc_fp8"][1], 128),
    "FP8_DYNAMIC": CURRENT["ptpc_fp8"],
    "NVFP4A16": CURRENT["nvfp4_weight_only"],
    "MXFP6A16": (MXFP6_E2M3, None),
    "MXFP8A16": (MXFP8, None),
    "MXFP4A16": CURRENT["mxfp4_weight_only"],
}


def test_every_alias_is_described():
    assert {name.lower() for name in ELSEWHERE} == ALIASES.keys()
    assert not ALIASES.keys() & set(scheme_names())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_aliases(name):
    layer = scheme(name)
    weight, inputs, *size = ELSEWHERE[name]
    assert [described(layer.weight), described(layer.input_tensors)] == [weight, inputs]
    assert not size or layer.weight.group_size == size[0]
    assert scheme(name.lower()) == layer
