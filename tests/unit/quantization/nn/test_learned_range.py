"""Trained scales: their gradients, their start, and what a state_dict keeps of them."""

import copy
import math

import pytest
import torch

from quark.torch.numerics.qdq import fake_quantize
from quark.torch.quantization.config.config import QATSpec, QuantizationSpec, TQTSpec
from quark.torch.quantization.nn.learned_range import make_quantizer

CPU = torch.device("cpu")


def make(qat_spec, shape=(), dtype="int4", is_parameter=False, **fields):
    fields = {"qscheme": "per_tensor", "symmetric": True, **fields}
    spec = QuantizationSpec(dtype, qat_spec=qat_spec, **fields)
    return make_quantizer(spec.for_parameter() if is_parameter else spec, shape, CPU).train()


def slopes(x, scale, largest=7):
    """Derivative of each fake-quantized value by the scale, in float64 (LSQ, equation 3)."""
    ratio = x.double() / scale.double()
    cut = torch.where(ratio < 0, -largest - 1.0, float(largest)).double()
    is_inside = (ratio >= -largest - 1) & (ratio <= largest)
    return torch.where(is_inside, ratio.round() - ratio, cut)


class TestGradients:
    def test_step_sizes_of_a_weight(self):
        channels = {"qscheme": "per_channel", "ch_axis": 0}
        quantizer = make(QATSpec(), (5,), is_parameter=True, **channels)
        weight = torch.randn(5, 30, requires_grad=True)
        factors = torch.randn(5, 30)
        (quantizer(weight) * factors).sum().backward()
        scale = quantizer.scale.unsqueeze(1)
        expected = (slopes(weight.detach(), scale) * factors).sum(1) / math.sqrt(30 * 7)
        torch.testing.assert_close(
            quantizer.learned_range.grad.double(), expected, rtol=1e-4, atol=1e-6
        )
        assert weight.grad.count_nonzero() > 100

    @pytest.mark.parametrize("shape", [(6, 30), (6, 3, 10)])
    def test_step_size_of_an_activation(self, shape):
        """n is the number of features of one sample."""
        quantizer = make(QATSpec())
        x, factors = torch.randn(shape), torch.randn(shape)
        (quantizer(x) * factors).sum().backward()
        expected = (slopes(x, quantizer.scale) * factors).sum() / math.sqrt(30 * 7)
        assert quantizer.learned_range.grad.item() == pytest.approx(expected.item(), rel=1e-4)

    def test_thresholds(self):
        quantizer = make(TQTSpec("_3SD"))
        x, factors = torch.randn(6, 30), torch.randn(6, 30)
        (quantizer(x) * factors).sum().backward()
        scale = quantizer.scale
        assert float(scale.log2()) % 1 == 0
        expected = (slopes(x, scale) * factors).sum() * float(scale) * math.log(2)
        assert quantizer.learned_range.grad.item() == pytest.approx(expected.item(), rel=1e-4)

    def test_a_threshold_moves_to_the_range_of_the_data(self):
        """The scale of least squared error is reached from both sides."""
        x = torch.randn(4, 500)
        scheme = make(TQTSpec()).scheme

        def error(exponent):
            y = fake_quantize(x, torch.tensor(2.0**exponent), None, scheme)
            return (y - x).square().sum().item()

        best = min(range(-6, 3), key=error)
        for start in (best - 3, best + 3):
            quantizer = make(TQTSpec("_3SD"))
            quantizer.scale = torch.tensor(2.0**start)
            optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.1)
            for _ in range(80):
                optimizer.zero_grad()
                (quantizer(x) - x).square().mean().backward()
                optimizer.step()
            assert abs(float(quantizer.scale.log2()) - best) <= 1

    def test_a_step_size_below_zero_recovers(self):
        quantizer = make(QATSpec())
        quantizer.scale = torch.tensor(0.1)
        with torch.no_grad():
            quantizer.learned_range.fill_(-0.1)
        y = quantizer(torch.ones(2, 4))
        assert float(quantizer.scale) > 0 and torch.isfinite(y).all()
        (1 - y).square().sum().backward()
        assert float(quantizer.learned_range.grad) < 0  # the scale grows

    def test_scales_of_a_narrow_type(self):
        quantizer = make(QATSpec(), scale_type="pof2")
        quantizer.scale = torch.tensor(0.3)
        assert float(quantizer.scale) == 0.25 and quantizer.learned_range.item() == pytest.approx(
            0.3
        )
        quantizer = make(QATSpec(), scale_type="bfloat16")
        quantizer.scale = torch.tensor(0.3)
        assert quantizer.scale.dtype == torch.bfloat16
        quantizer(torch.randn(3, 4)).sum().backward()
        assert quantizer.learned_range.grad.dtype == torch.float32


class TestStart:
    @pytest.mark.parametrize("qat_spec", [QATSpec(), TQTSpec()])
    def test_from_the_first_tensor(self, qat_spec):
        quantizer, x = make(qat_spec), torch.randn(8, 16)
        assert quantizer.scale is None and bool(quantizer.learned_range.isnan())
        with pytest.raises(RuntimeError, match=r"no value yet: call model.train\(\)"):
            quantizer.eval()(x)
        quantizer.train()(x)
        observer = quantizer.spec.make_observer()
        observer(x)
        first = observer.calculate_qparams()[0]
        assert torch.equal(quantizer.scale, first)
        quantizer(100 * x)  # the second changes nothing
        assert torch.equal(quantizer.scale, first)

    def test_every_process_would_have_its_own(self, monkeypatch):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(RuntimeError, match="pass a dataloader"):
            make(QATSpec())(torch.randn(2, 2))

    def test_asymmetric_codes(self):
        quantizer = make(QATSpec(), dtype="uint8", symmetric=False)
        x = torch.tensor([[-1.0, 0.0, 0.5, 3.0]])
        y = quantizer(x)
        assert int(quantizer.zero_point) == 64
        torch.testing.assert_close(y, x, atol=0.01, rtol=0)


@pytest.mark.parametrize("qat_spec", [QATSpec(), TQTSpec()])
def test_state_and_copies(qat_spec):
    quantizer, x = make(qat_spec, dtype="uint8"), torch.randn(8, 16)
    empty = copy.deepcopy(quantizer)
    before = copy.deepcopy(quantizer.state_dict())
    quantizer(x)
    with torch.no_grad():
        quantizer.learned_range.mul_(1.7)
    assert empty.scale is None
    empty.load_state_dict(quantizer.state_dict())
    for other in (empty, copy.deepcopy(quantizer)):
        assert torch.equal(other(x), quantizer(x))
        assert other.learned_range is not quantizer.learned_range
    # A state from before the start is a range without a start again.
    empty.load_state_dict(before, strict=False)
    assert empty.scale is None
