"""Ranges that follow tensors in training mode, against averages in float64 and calibration."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quark.torch.quantization.config.config import (
    QuantizationConfig,
    QuantizationSpec,
    ScaleQuantSpec,
)
from quark.torch.quantization.nn.operators import QuantLinear
from quark.torch.quantization.nn.quantizer import TensorQuantizer

TENSOR = {"qscheme": "per_tensor", "is_dynamic": False}
INT8 = QuantizationSpec("int8", **TENSOR, symmetric=True)
UINT8 = QuantizationSpec("uint8", **TENSOR, symmetric=False)
ROWS = QuantizationSpec("int4", qscheme="per_channel", ch_axis=0, symmetric=True)
MXFP4 = QuantizationSpec(
    "fp4", qscheme="per_group", ch_axis=-1, group_size=32, scale_format="e8m0", is_dynamic=True
)
NVFP4 = QuantizationSpec.of_stages(
    ScaleQuantSpec(
        QuantizationSpec("fp4", qscheme="per_group", ch_axis=-1, group_size=16, is_dynamic=True),
        QuantizationSpec("fp8_e4m3", **TENSOR),
    ).to_quantization_spec()
)


def calibrated(spec, x):
    """A quantizer of activations with the range of a tensor."""
    quantizer = TensorQuantizer(spec)
    quantizer.observer(x)
    quantizer.compute_scales()
    return quantizer


def linear(**specs):
    layer = QuantLinear.from_float(nn.Linear(64, 8), QuantizationConfig(**specs))
    layer.weight_quantizer.observer(layer.weight)
    layer.weight_quantizer.compute_scales(layer.weight)
    layer.weight_quantizer.observer.reset()
    return layer


def averages(lo, hi, tensors, constant=0.01):
    for x in tensors:
        lo += constant * (float(x.min()) - lo)
        hi += constant * (float(x.max()) - hi)
    return lo, hi


class TestWeights:
    @pytest.mark.parametrize(
        "spec", [ROWS, MXFP4, NVFP4, QuantizationSpec("int8", "PerTensorMSEObserver", **TENSOR)]
    )
    def test_scales_follow_each_step(self, spec):
        layer, x = linear(weight=spec).train(), torch.randn(4, 64)
        for factor in (3.0, 0.5):
            with torch.no_grad():
                layer.weight.mul_(factor).add_(0.01 * torch.randn_like(layer.weight))
            fresh = copy.deepcopy(layer.weight_quantizer).eval()
            fresh.updates = 0
            fresh.observer.reset()
            fresh.observer(layer.weight)
            fresh.compute_scales(layer.weight)
            y = layer(x)
            assert torch.equal(layer.weight_quantizer.scale, fresh.scale)
            assert torch.equal(y, nn.functional.linear(x, fresh(layer.weight), layer.bias))
            if spec is NVFP4:
                assert torch.equal(layer.weight_quantizer.scale_2, fresh.scale_2)

    def test_a_weight_that_grew_is_not_cut_in_evaluation_either(self):
        """The optimizer steps after the last forward pass of training."""
        layer, x = linear(weight=ROWS).train(), torch.eye(64)
        layer(x)
        with torch.no_grad():
            layer.weight.mul_(4)
        y = layer.eval()(x) - layer.bias
        torch.testing.assert_close(
            y.T, layer.weight, atol=layer.weight.abs().max().item() / 14, rtol=0
        )

    def test_a_calibrated_layer_in_evaluation_stays(self):
        layer = linear(weight=ROWS).eval()
        scale = layer.weight_quantizer.scale.clone()
        with torch.no_grad():
            layer.weight.mul_(4)
        layer(torch.randn(2, 64))
        assert torch.equal(layer.weight_quantizer.scale, scale)


class TestActivations:
    def test_new_quantizers_wait_for_train(self):
        layer = linear(weight=ROWS, input_tensors=INT8)
        assert layer.training and not layer.input_quantizer.is_following
        assert layer.train().input_quantizer.is_following
        assert not layer.eval().input_quantizer.is_following

    @pytest.mark.parametrize("constant", [0.01, 0.5])
    def test_moving_average(self, constant):
        quantizer = calibrated(UINT8, torch.tensor([-1.0, 3.0])).train()
        quantizer.averaging_constant = constant
        tensors = [torch.randn(50) * scale + 1 for scale in (1, 5, 2)]
        for x in tensors:
            quantizer(x)
        # The first scale is 4 / 255 with the zero point 64: the codes span [-64, 191] * 4 / 255.
        lo, hi = averages(-64 * 4 / 255, 191 * 4 / 255, tensors, constant)
        scale = (hi - lo) / 255
        assert float(quantizer.scale) == pytest.approx(scale, rel=1e-5)
        assert int(quantizer.zero_point) == round(-lo / scale)
        assert quantizer.updates == 3

    def test_symmetric_floats_and_evaluation(self):
        quantizer = calibrated(
            QuantizationSpec("fp8_e4m3", **TENSOR), torch.tensor([-2.0, 2.0])
        ).train()
        x = 10 * torch.randn(100)
        quantizer(x)
        lo, hi = averages(-2.0, 2.0, [x])
        assert float(quantizer.scale) == pytest.approx(max(-lo, hi) / 448, rel=1e-6)
        scale = quantizer.scale.clone()
        quantizer.eval()(100 * x)
        assert torch.equal(quantizer.scale, scale)

    def test_the_last_update(self):
        quantizer = calibrated(INT8, torch.tensor([-1.0, 1.0])).train()
        quantizer.last_update = 2
        scales = []
        for _ in range(4):
            quantizer(torch.full((3,), 9.0))
            scales.append(float(quantizer.scale))
        assert scales[0] < scales[1] == scales[2] == scales[3]

    def test_channels(self):
        spec = QuantizationSpec(
            "int8", qscheme="per_channel", ch_axis=-1, symmetric=True, is_dynamic=False
        )
        quantizer = calibrated(spec, torch.ones(2, 3)).train()
        quantizer(torch.tensor([[1.0, 2.0, 3.0]]))
        expected = torch.tensor([1.0, 1.01, 1.02]) / 127.5
        torch.testing.assert_close(quantizer.scale, expected)

    def test_values_that_are_not_finite_do_not_count(self):
        for spec in (INT8, QuantizationSpec("int8", "PerTensorMSEObserver", **TENSOR)):
            quantizer = calibrated(spec, torch.randn(100)).train()
            before = float(quantizer.scale)
            quantizer(torch.tensor([1.0, torch.inf]))
            quantizer(torch.tensor([1.0, torch.nan]))
            assert float(quantizer.scale) == pytest.approx(before, rel=1e-6)

    def test_other_observers_decide_on_the_range(self):
        """Outliers that a percentile cuts move no range."""
        spec = QuantizationSpec("int8", "PerTensorPercentileObserver", **TENSOR, symmetric=True)
        x = torch.randn(100_000)
        x[0] = 1000
        quantizer = calibrated(spec, x).train()
        before = float(quantizer.scale)
        quantizer(x)
        assert float(quantizer.scale) == pytest.approx(before, rel=0.01)

    def test_powers_of_two_stay_such(self):
        spec = QuantizationSpec("int8", "PerTensorPowOf2MinMSEObserver", **TENSOR, symmetric=True)
        quantizer = calibrated(spec, torch.randn(1000)).train()
        quantizer.averaging_constant = 0.3
        for _ in range(9):
            quantizer(20 * torch.randn(1000))
            assert float(quantizer.scale.log2()) % 1 == 0
        assert float(quantizer.scale) > 0.1

    def test_the_tensor_scale_of_two_levels(self):
        quantizer = calibrated(NVFP4, torch.linspace(-1, 1, 64).reshape(2, 32)).train()
        quantizer(torch.full((2, 32), 3.0))
        assert float(quantizer.scale_2) == pytest.approx(1.02 / (6 * 448), rel=1e-5)
        assert quantizer.scale is None

    def test_dynamic_scales_have_no_state(self):
        quantizer = TensorQuantizer(MXFP4).train()
        quantizer(torch.randn(2, 64))
        assert quantizer.updates == 0 and not quantizer.state_dict()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_activation_is_followed_once(use_reentrant):
    plain = linear(weight=ROWS, input_tensors=INT8)
    plain.input_quantizer.scale, plain.input_quantizer.zero_point = (
        torch.tensor(0.01),
        torch.tensor(0),
    )
    plain.train()
    again = copy.deepcopy(plain)
    x = torch.randn(4, 64, requires_grad=True)
    y = checkpoint(again, x, use_reentrant=use_reentrant)
    assert torch.equal(y, plain(x))
    y.square().sum().backward()
    plain(x).square().sum()  # the gradients below are of the first pass
    assert again.input_quantizer.updates == 1 == again.weight_quantizer.updates
    reference = copy.deepcopy(again)
    reference.input_quantizer.is_fixed = True
    reference.zero_grad()
    reference(x).square().sum().backward()
    assert torch.equal(reference.weight.grad, again.weight.grad)


def test_state_and_copies():
    layer = linear(weight=ROWS, input_tensors=UINT8)
    x = torch.randn(4, 64)
    layer.input_quantizer.observer(x)
    layer.input_quantizer.compute_scales()
    fresh = copy.deepcopy(layer)
    names = {n for n, _ in layer.named_buffers()}
    layer.train()
    for scale in (1, 3, 2):
        layer(scale * x)
    layer.input_quantizer.is_fixed = True
    assert {n for n, _ in layer.named_buffers()} == names  # of averages of the model, for example

    bare = QuantLinear.from_float(nn.Linear(64, 8), layer.quant_config)  # has no scales yet
    state, after = copy.deepcopy(layer.state_dict()), copy.deepcopy(layer)
    after.input_quantizer.is_fixed = False
    after(5 * x)
    for other in (fresh, bare, copy.deepcopy(layer)):
        other.load_state_dict(state)
        assert (other.input_quantizer.updates, other.input_quantizer.is_fixed) == (3, True)
        other.train().input_quantizer.is_fixed = False
        assert torch.equal(other(5 * x), copy.deepcopy(after).eval()(5 * x))
    # A state from before training: no averages.
    untrained = linear(weight=ROWS, input_tensors=UINT8)
    untrained.load_state_dict({k: v for k, v in layer.state_dict().items() if "range_" not in k})
    other.load_state_dict(untrained.state_dict())
    assert other.input_quantizer.range_lo is None and other.input_quantizer.updates == 0
