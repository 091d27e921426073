"""Enumerations: the members and values that files and scripts of earlier versions use."""

import pytest

from quark.torch.quantization.config import type as types

MEMBERS = {
    "DeviceType": {"CPU": "cpu", "IPU": "ipu"},
    "QSchemeType": {
        "per_tensor": "per_tensor",
        "per_channel": "per_channel",
        "per_group": "per_group",
    },
    "QuantFlow": {"standard": 1, "file2file": 2, "per_block": 3},
    "QuantizationMode": {"eager_mode": 1, "fx_graph_mode": 2},
    "RoundType": {"round": 2, "floor": 3, "half_even": 8},
    "ScaleType": {
        "float": "float",
        "float32": "float32",
        "float16": "float16",
        "bfloat16": "bfloat16",
    },
    "TQTThresholdInitMeth": {"_3SD": "_3sd", "_KL_J": "_kl_j"},
    "ZeroPointType": {"int32": "int32", "float32": "float32"},
}


@pytest.mark.parametrize("name", MEMBERS)
def test_documented_members(name):
    members = {member.name: member.value for member in getattr(types, name)}
    assert MEMBERS[name].items() <= members.items()


def test_number_formats():
    names = [
        "int8",
        "uint8",
        "int4",
        "uint4",
        "int3",
        "int2",
        "fp8_e4m3",
        "fp8_e5m2",
        "bfloat16",
        "float16",
    ]
    assert set(names) <= set(types.Dtype.__members__)


def test_every_enumeration_is_exported():
    assert {*MEMBERS, "Dtype"} == set(types.__all__)
