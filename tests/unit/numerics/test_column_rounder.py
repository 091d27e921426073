"""One column after another gives what the whole matrix gives, bit for bit."""

import pytest
import torch

from quark.torch.quantization.config.config import (
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    QuantizationSpec,
)
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.nn.quantizer import TensorQuantizer

EACH_ONCE = {  # each format of weights
    str(spec): name for name in scheme_names() if (spec := scheme(name, 32).weight).fmt.scaled
}
SPECS = {
    **{name: scheme(name, 32).weight for name in EACH_ONCE.values()},
    "tensor": Int8PerTensorSpec().to_quantization_spec(),
    "groups of rows": Int4PerGroupSpec(ch_axis=0, group_size=3).to_quantization_spec(),
    "blocks": QuantizationSpec(
        dtype="fp8_e4m3", qscheme="per_block", block_size=(4, 32), is_dynamic=False
    ),
    "floor": QuantizationSpec(
        dtype="int4", qscheme="per_channel", ch_axis=0, is_dynamic=False, round_method="floor"
    ),
}


def calibrated(spec, weight, transposed):
    quantizer = TensorQuantizer(spec.for_parameter(transposed))
    quantizer.observer(weight)
    quantizer.compute_scales(weight)
    return quantizer


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("inputs", [64, 80], ids=["whole groups", "a group cut short"])
@pytest.mark.parametrize("name", SPECS)
def test_columns_are_those_of_the_matrix(name, inputs, transposed):
    spec = SPECS[name]
    weight = torch.randn(12, inputs) * torch.logspace(-2, 1, 12).unsqueeze(1)
    weight = weight.T.contiguous() if transposed else weight
    axis = 0 if transposed else 1
    quantizer = calibrated(spec, weight, transposed)
    expected = quantizer.freeze_(weight.clone())
    columns = quantizer.column_rounder(tuple(weight.shape), lambda x: x.T if transposed else x)
    found = [columns(weight.select(axis, i), i) for i in range(inputs)]
    assert torch.equal(torch.stack(found, axis), expected)
    rows = torch.tensor([7, 2, 11])
    some, picked = columns.select_rows(rows), weight.index_select(1 - axis, rows)
    found = [some(picked.select(axis, i), i) for i in range(inputs)]
    assert torch.equal(torch.stack(found, axis), expected.index_select(1 - axis, rows))


def test_values_beyond_the_range_saturate():
    weight = torch.randn(4, 32)
    quantizer = calibrated(scheme("int4_wo_32").weight, weight, False)
    column = quantizer.column_rounder((4, 32), lambda x: x)(weight[:, 3] * 1000, 3)
    scale = quantizer.scale[:, 0]
    assert torch.equal(column, torch.where(weight[:, 3] > 0, 7, -8) * scale)


def test_the_column_is_left_as_it_was():
    weight = torch.randn(4, 32)
    column = weight[:, 0].clone()
    quantizer = calibrated(scheme("mxfp4").weight, weight, False)
    quantizer.column_rounder((4, 32), lambda x: x)(column, 0)
    assert torch.equal(column, weight[:, 0])
