"""Bit for bit what AMD Quark 0.13 computes on a CPU, for a sample of schemes and inputs.

``numerics.json`` gives the specification of each case and the inputs it was run on;
``numerics.safetensors`` the inputs (``x.<input>``) and for each case and input the quantized values
(``<case>.<input>.y``) with ``scale`` and ``zero_point``. Left out is what that version gets wrong:
symmetric unsigned integers, rounding modes other than half to even, values beyond float16.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quark.torch.numerics.qdq import dequantize, dynamic_qparams, fake_quantize, quantize
from quark.torch.quantization.config.spec import QuantizationSpec

DATA = Path(__file__).parents[2] / "data"
CASES = json.loads((DATA / "numerics.json").read_text())
TENSORS = load_file(DATA / "numerics.safetensors")


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, of in CASES.items() for name in of["inputs"]]
)
def test_reference_values(case, name):
    spec = QuantizationSpec(**CASES[case]["spec"])
    x, expected = TENSORS[f"x.{name}"], TENSORS[f"{case}.{name}.y"]
    scale = zero_point = None
    if spec.fmt.scaled:
        scale, zero_point = dynamic_qparams(x, spec.scheme)
        # Grouped tensors of three axes have their first two axes merged there.
        assert torch.equal(scale.flatten(), TENSORS[f"{case}.{name}.scale"].flatten())
    if zero_point is not None:
        assert torch.equal(zero_point.flatten(), TENSORS[f"{case}.{name}.zero_point"].flatten())
    faked = fake_quantize(x, scale, zero_point, spec.scheme)
    stored = dequantize(quantize(x, scale, zero_point, spec.scheme), scale, zero_point, spec.scheme)
    for values in (faked, stored):
        assert torch.equal(values.view(torch.int32), expected.view(torch.int32))


def test_every_tensor_is_compared():
    named = {f"{case}.{name}.y" for case, of in CASES.items() for name in of["inputs"]}
    assert named == {key for key in TENSORS if key.endswith(".y")}
    assert {of["spec"]["dtype"] for of in CASES.values()} == {
        *("int8", "int4", "uint4", "int3", "int2", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16")
    }
