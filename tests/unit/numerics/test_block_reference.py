"""Block formats against the fake-quantized tensors of AMD Quark 0.13.

``block_formats.safetensors`` holds the inputs and, for each case of ``block_formats.json``, the
outputs (in bfloat16 where that is exact). Left out are its inputs that differ by design: single
tensors of nothing but zeros under e4m3 scales, where it gives NaN; blocks so small that their e4m3
scale becomes zero there, while here it is the smallest one; ties of single-stage e4m3 scales, which
fall to either side. Symmetric unsigned integers and power-of-two scales, which lose negative values
and have no effect there, are no case at all.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.numerics.scale_formats import E8M0, SCALE_FORMATS
from quark.torch.numerics.scheme import Scheme

DATA = Path(__file__).parents[2] / "data"
CASES = json.loads((DATA / "block_formats.json").read_text())
# Its single-stage e4m3 scales multiply where a division is defined: off in the last bit.
TOLERANCE = {"fp4_per_group16_e4m3_f32": 2.5e-7}


def scheme_of(dtype, ch_axis, group_size, **rest):
    fmt = Dtype[dtype].value
    if fmt.block:
        fmt = replace(fmt, block=group_size)
    mx = dtype == "mx"
    if mx and rest["mx_element_dtype"] != "int8":
        fmt = Dtype[rest["mx_element_dtype"]].value
    return Scheme(
        fmt,
        QSchemeType.per_group,
        axis=ch_axis,
        group=group_size,
        scale=E8M0 if mx else SCALE_FORMATS[rest.get("scale_format", "float32")],
        scale_mode=rest.get("scale_calculation_mode", "even"),
    )


@pytest.fixture(scope="module")
def tensors():
    return load_file(DATA / "block_formats.safetensors")


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case, about in CASES.items() for name in about["inputs"]],
)
def test_as_the_reference(case, name, tensors):
    x, expected = tensors[f"input.{name}"], tensors[f"{case}.{name}"].float()
    scheme = scheme_of(**CASES[case]["spec"])
    faked = fake_quantize(x, *dynamic_qparams(x, scheme), scheme)
    assert torch.allclose(faked, expected, rtol=TOLERANCE.get(case, 0.0), atol=0)
