"""First ranges of training, against their formulas and a search with other code."""

import math

import pytest
import torch

from quark.torch.quantization.config.config import QATSpec, QuantizationSpec, TQTSpec
from quark.torch.quantization.observer.lsq_observer import LSQObserver
from quark.torch.quantization.observer.tqt_observer import TQTObserver


def spec_of(qat_spec, dtype="int8", qscheme="per_tensor", **fields):
    fields = {"symmetric": None if dtype.startswith("fp") else True, **fields}
    return QuantizationSpec(dtype, qscheme=qscheme, qat_spec=qat_spec, **fields)


class TestStepSize:
    @pytest.mark.parametrize(
        ("dtype", "largest"), [("int2", 1), ("int4", 7), ("int8", 127), ("fp8_e4m3", 448)]
    )
    def test_formula(self, dtype, largest):
        x = torch.randn(30, 20)
        observer = spec_of(QATSpec(), dtype).make_observer()
        assert isinstance(observer, LSQObserver)
        observer(x)
        expected = 2 * x.double().abs().mean() / math.sqrt(largest)
        assert float(observer.calculate_qparams()[0]) == pytest.approx(float(expected), rel=1e-6)

    def test_of_groups_and_batches(self):
        group = {"qscheme": "per_group", "ch_axis": -1, "group_size": 10}
        x = torch.randn(30, 20)
        observer = spec_of(QATSpec(), "int4", **group).make_observer()
        observer(x)
        means = x.double().abs().reshape(30, 2, 10).mean(-1)
        scale = observer.calculate_qparams()[0]
        torch.testing.assert_close(scale, (2 * means / math.sqrt(7)).float())

        observer = spec_of(QATSpec(), "int4").make_observer()
        for part in x.split([4, 26]):
            observer(part)
        whole = spec_of(QATSpec(), "int4").make_observer()
        whole(x)
        torch.testing.assert_close(observer.calculate_qparams()[0], whole.calculate_qparams()[0])

    def test_an_asymmetric_range_holds_all_values(self):
        observer = spec_of(QATSpec(), "uint8", symmetric=False).make_observer()
        observer(torch.tensor([-1.0, 0.0, 3.0]))
        scale, zero_point = observer.calculate_qparams()
        assert float(scale) == pytest.approx(4 / 255) and int(zero_point) == 64

    def test_zeros_and_powers_of_two(self):
        observer = spec_of(QATSpec()).make_observer()
        observer(torch.zeros(4))
        assert float(observer.calculate_qparams()[0]) > 0
        observer = spec_of(QATSpec(), scale_type="pof2").make_observer()
        observer(torch.full((4,), 3.0))  # 2 * 3 / sqrt(127) = 0.53
        assert float(observer.calculate_qparams()[0]) == 0.5


class TestThreshold:
    def test_three_standard_deviations(self):
        x = torch.randn(50, 40) * torch.logspace(-2, 2, 50).unsqueeze(1) + 0.1
        channels = {"qscheme": "per_channel", "ch_axis": 0}
        observer = spec_of(TQTSpec(), "int4", **channels).make_observer()
        assert isinstance(observer, TQTObserver)
        for part in x.split(20, 1):
            observer(part)
        wide = x.double()
        threshold = wide.mean(1).abs() + 3 * wide.std(1, correction=0)
        expected = 2 ** threshold.log2().ceil() / 8
        assert observer.calculate_qparams()[0].tolist() == expected.tolist()

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("tail", [0.0, 40.0])
    def test_least_divergence(self, bits, tail):
        x = torch.randn(3000)
        x[0] = tail
        observer = spec_of(TQTSpec(), f"int{bits}").make_observer()
        for part in x.split(1000):
            observer(part)
        scale = float(observer.calculate_qparams()[0])

        # The same search value by value, over the bins of a histogram of its own.
        limit = 2.0 ** math.ceil(math.log2(float(x.abs().max())))
        width = limit / 2048
        counts = {}
        for value in x.tolist():
            bin_ = math.floor(value / width)
            counts[bin_] = counts.get(bin_, 0) + 1

        def divergence(exponent):
            step = 2.0**exponent / 2 ** (bits - 1)
            levels = {}
            for bin_, count in counts.items():
                code = round((bin_ + 0.5) * width / step)
                code = min(max(code, -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)
                levels.setdefault(code, []).append(count)
            total = 0.0
            for members in levels.values():
                q = sum(members) / len(members) / len(x)
                total += sum((n / len(x) - q) * math.log(n / len(x) / q) for n in members)
            return total

        top = round(math.log2(limit))
        best = min(range(top, top - 10, -1), key=lambda e: round(divergence(e), 12))
        assert scale == 2.0**best / 2 ** (bits - 1)
        assert tail == 0.0 or bits == 8 or best < top  # the outlier is cut by four bits

    def test_unsigned_codes_have_their_zero_in_the_middle(self):
        observer = spec_of(TQTSpec("_3SD"), "uint8").make_observer()
        observer(torch.linspace(-1, 1, 99))  # 3 * 0.577 -> 2
        scale, zero_point = observer.calculate_qparams()
        assert (float(scale), int(zero_point)) == (2 / 128, 128)

    @pytest.mark.parametrize("method", ["_3SD", "_KL_J"])
    def test_bad_values_and_no_values(self, method):
        observer = spec_of(TQTSpec(method)).make_observer()
        with pytest.raises(FloatingPointError, match="NaN or infinite"):
            observer(torch.tensor([1.0, torch.nan]))
        with pytest.raises(RuntimeError, match="No data was observed"):
            observer.calculate_qparams()
        observer(torch.zeros(0))
        assert observer.is_empty
        observer(torch.zeros(4))
        assert 0 < float(observer.calculate_qparams()[0]) < 1e-20
