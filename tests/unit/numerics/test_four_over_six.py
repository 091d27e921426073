"""Scales of fp4 inputs under which the largest value of a block is 4 or 6, whichever loses less."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.export.formats.layer_checks import common_problem
from quark.torch.export.onnx.activations import activation_problem
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.products import compiled_inputs, native_inputs

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
NVFP4 = scheme("nvfp4")
CHOSEN = NVFP4.input_tensors.changed(four_over_six=True)
UNIT = torch.tensor(0.004)


def values(rows=32, dtype=torch.float32):
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    x[3, :16] = 0
    return x.to(dtype)


def rounded(x, unit):
    """By the definition, in float64: both scales in e4m3, both roundings, the smaller error."""
    blocks = x.double().view(-1, 16)
    amax, found = blocks.abs().amax(1, keepdim=True), []
    for most in (6, 4):
        stored = (amax.float() / most / unit).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        scale = stored.double() * unit.double()
        nearest = FP4[((blocks.abs() / scale).unsqueeze(-1) - FP4).abs().argmin(-1)]
        found.append(nearest * scale * blocks.sign())
    errors = [(f - blocks).square().sum(1, keepdim=True) for f in found]
    takes_four = errors[1] < errors[0]
    return torch.where(takes_four, found[1], found[0]).view(x.shape), takes_four


def test_blocks_take_what_loses_less():
    x = values()
    found = fake_quantize(x, *dynamic_qparams(x, CHOSEN.scheme, UNIT), CHOSEN.scheme)
    expected, takes_four = rounded(x, UNIT)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert 0.2 < takes_four.float().mean() < 0.8
    usual = replace(CHOSEN.scheme, four_over_six=False)
    other = fake_quantize(x, *dynamic_qparams(x, usual, UNIT), usual)
    assert (found - x).square().sum() < 0.95 * (other - x).square().sum()


def test_an_example():
    """5 and 6 under the scale 1 are 4 and 6; under 1.5 they are 4.5 and 6."""
    block = torch.tensor([[6.0, 5, 4.5] + [0] * 13])
    scale, _ = dynamic_qparams(block, CHOSEN.scheme, torch.tensor(0.25))
    assert scale.flatten().tolist() == [1.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_batches_nor_runtimes_change_a_bit(dtype):
    x = values(dtype=dtype)
    whole = fake_quantize(x, *dynamic_qparams(x, CHOSEN.scheme, UNIT), CHOSEN.scheme)
    parts = [
        fake_quantize(row, *dynamic_qparams(row, CHOSEN.scheme, UNIT), CHOSEN.scheme)
        for row in x.split(1)
    ]
    assert torch.equal(torch.cat(parts), whole)
    for kernels in (native_inputs, compiled_inputs):
        assert kernels.fake_quantize(x, None, None, CHOSEN.scheme, UNIT) is None


def test_a_model_keeps_the_choice():
    layer = QuantizationConfig(weight=NVFP4.weight, input_tensors=CHOSEN)
    model, x = nn.Sequential(nn.Linear(64, 32, bias=False)).eval(), values()
    model = ModelQuantizer(Config(layer)).quantize_model(model, [x])
    unit = model[0].input_quantizer.scale_2
    weight = model[0].weight_quantizer.fake_quantize_copy(model[0].weight)
    expected = rounded(x, unit)[0].float() @ weight.T
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert QuantizationSpec.from_dict(CHOSEN.to_dict()) == CHOSEN
    assert "four_over_six" not in str(NVFP4.input_tensors.to_dict())


def test_formats_of_others_refuse_it():
    layer = QuantizationConfig(weight=NVFP4.weight, input_tensors=CHOSEN)
    model = nn.Sequential(nn.Linear(64, 32))
    model = ModelQuantizer(Config(layer)).quantize_model(model, [values()])
    assert "four_over_six" in common_problem(model[0], (nn.Linear,))
    assert "four_over_six" in activation_problem(CHOSEN)
    assert activation_problem(NVFP4.input_tensors) is None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nvfp4", {"is_dynamic": False}, "dynamic fp4 per group"),
        ("nvfp4", {"group_size": -1}, "with a positive group_size"),
        ("fp8", {}, "dynamic fp4 per group"),
        ("mxfp4", {}, "not powers of two"),
    ],
)
def test_what_has_no_choice_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        scheme(name).input_tensors.changed(four_over_six=True, **changes)


def test_weights_have_scales_that_algorithms_choose():
    with pytest.raises(ValueError, match=r"weight: four_over_six=True is for inputs and outputs"):
        QuantizationConfig(weight=CHOSEN)
