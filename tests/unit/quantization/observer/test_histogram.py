"""Histograms that merge exactly, and what they clip."""

import itertools

import numpy as np
import pytest
import torch

from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.observer import histogram as module
from quark.torch.quantization.observer.histogram import (
    BINS,
    HistogramObserver,
    PerTensorHistogramObserver,
    PerTensorHistogramObserverPro,
    PerTensorMSEObserver,
    PerTensorPercentileObserver,
)
from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver


def spec(dtype="int8", symmetric=True):
    symmetric = None if dtype.startswith("fp") else symmetric
    return QuantizationSpec(dtype, is_dynamic=False, qscheme="per_tensor", symmetric=symmetric)


def observed(*batches, cls=HistogramObserver, of=None, **options):
    observer = cls(of or spec(), **options)
    for batch in batches:
        observer(batch)
    return observer


def state(observer):
    return observer.counts.tolist(), observer.limit, observer.lo, observer.hi


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Data whose largest values lie below, on and above powers of two, on either side.
PIECES = {
    "normal": normal(3000),
    "wide": normal(500, seed=1) * 70,
    "power of two": torch.tensor([4.0, 1.5, 2.0, -0.25]),
    "negative power of two": torch.tensor([-8.0, 3.0, -2.0]),
    "next power of two": torch.tensor([8.0, -8.0, 7.5]),
    "zeros": torch.zeros(7),
    "tiny": normal(40, seed=2) * 1e-5,
    "subnormal": torch.tensor([1e-40, -2e-41]),
    "huge": torch.tensor([1e6, -2e5]),
    "empty": torch.empty(0),
}


class TestCounts:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_against_numpy(self, dtype):
        x = (normal(20000) * 3).to(dtype)
        found = observed(x)
        assert found.limit in (8.0, 16.0)
        edges = np.linspace(-found.limit, found.limit, 2 * BINS + 1)  # exact in float64
        expected, _ = np.histogram(x.double().numpy(), edges)
        assert found.counts.tolist() == expected.tolist()
        assert (found.lo, found.hi) == (x.min().item(), x.max().item())

    @pytest.mark.parametrize(
        ("amax", "limit"), [(3.99, 4.0), (4.0, 8.0), (-4.0, 8.0), (1e-3, 2.0**-9), (0.5, 1.0)]
    )
    def test_limit_is_the_next_power_of_two(self, amax, limit):
        assert observed(torch.tensor([amax, amax / 3])).limit == limit

    def test_more_than_a_piece(self, monkeypatch):
        x = normal(1000)
        whole = observed(x)
        monkeypatch.setattr(module, "CHUNK", 17)
        assert state(observed(x)) == state(whole)

    def test_values_keep_their_bin_when_the_range_doubles(self):
        x = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
        small, large = observed(x), observed(x, torch.tensor([1000.0]))
        assert (small.limit, large.limit) == (4.0, 1024.0)
        index = (x.double() * BINS / 1024).floor().long() + BINS
        expected = torch.bincount(index, minlength=2 * BINS)
        expected[BINS + 1000 * BINS // 1024] += 1
        assert large.counts.tolist() == expected.tolist()

    def test_growth_beyond_all_bins(self):
        x = torch.tensor([-1.0, -1.0, 0.5])
        found = observed(x, torch.tensor([2.0**40]))
        used = found.counts.nonzero().flatten().tolist()
        assert used == [BINS - 1, BINS, BINS + BINS // 2]
        assert found.counts[used].tolist() == [2, 1, 1]

    def test_an_empty_tensor_changes_nothing(self):
        assert observed(torch.empty(0)).is_empty
        x = normal(50)
        assert state(observed(x, torch.empty(3, 0))) == state(observed(x))

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize(
        "cls", [PerTensorMSEObserver, PerTensorPercentileObserver, PerTensorHistogramObserver]
    )
    def test_nan_and_infinity_are_refused_and_leave_no_trace(self, cls, bad):
        x = normal(50)
        observer = observed(x, cls=cls)
        before = state(observer)
        with pytest.raises(FloatingPointError, match="NaN or infinite"):
            observer(torch.tensor([0.0, bad, 1.0]))
        assert state(observer) == before

    @pytest.mark.parametrize("cls", [PerTensorMSEObserver, PerTensorPercentileObserver])
    def test_no_scale_without_data(self, cls):
        observer = observed(normal(5), cls=cls)
        observer.reset()
        assert observer.is_empty
        with pytest.raises(RuntimeError, match="No data was observed"):
            observer.calculate_qparams()

    @pytest.mark.parametrize("amax", [1e-44, 1e-38, 1.5e38])
    @pytest.mark.parametrize("cls", [PerTensorMSEObserver, PerTensorPercentileObserver])
    def test_the_ends_of_float32(self, cls, amax):
        x = normal(1000).clamp(-1, 1) * amax
        scale, _ = observed(x, cls=cls, of=spec("int4")).calculate_qparams()
        eps = torch.finfo(torch.float32).eps
        assert scale.item() == pytest.approx(max(eps, x.abs().max().item() / 7.5), rel=0.3)

    @pytest.mark.parametrize("cls", [PerTensorMSEObserver, PerTensorPercentileObserver])
    def test_nothing_but_zeros(self, cls):
        scale, zero_point = observed(torch.zeros(9), cls=cls).calculate_qparams()
        assert scale == torch.finfo(torch.float32).eps
        assert zero_point == 0


class TestMerging:
    @pytest.mark.parametrize(("one", "other"), list(itertools.permutations(PIECES, 2)))
    def test_batches_are_their_concatenation(self, one, other):
        parts = [PIECES[one], PIECES[other]]
        together = observed(torch.cat(parts))
        assert state(observed(*parts)) == state(together)
        first, second = (observed(part) for part in parts)
        first.merge(second)
        assert state(first) == state(together)

    @pytest.mark.parametrize(
        "order", list(itertools.permutations(("normal", "wide", "next power of two"))), ids="-".join
    )
    def test_associative(self, order):
        a, b, c = (observed(PIECES[name]) for name in order)
        left = [observed(PIECES[name]) for name in order]
        b.merge(c)
        a.merge(b)
        left[0].merge(left[1])
        left[0].merge(left[2])
        assert state(a) == state(left[0])

    def test_more_than_float32_can_count(self):
        """2**24 + 1 is where a float32 counter stops."""
        many = 2**24
        observer, other = observed(torch.tensor([0.1])), observed(torch.tensor([0.1, 0.1, -0.05]))
        for each in (observer, other):
            each.counts *= many
        observer.merge(other)
        observer(torch.tensor([0.1]))
        used = observer.counts.nonzero().flatten()
        assert observer.counts[used].tolist() == [many, 3 * many + 1]
        observer(torch.tensor([100.0]))  # both fall in the bins around zero now, and add up
        assert observer.counts.sum() == 4 * many + 2

    def test_merging_does_not_change_the_other(self):
        other = observed(PIECES["wide"])
        before = state(other)
        observed(PIECES["huge"]).merge(other)
        assert state(other) == before


class TestPercentile:
    @pytest.fixture(params=["normal", "skewed", "positive", "negative"])
    def data(self, request):
        x = normal(200_000)
        return {
            "normal": x,
            "skewed": x.exp() - 1.5,
            "positive": x.abs() + 0.5,
            "negative": -x.abs() - 0.5,
        }[request.param]

    @pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9])
    def test_two_tails(self, data, percentile):
        asymmetric = spec("uint8", symmetric=False)
        observer = observed(
            data, cls=PerTensorPercentileObserver, of=asymmetric, percentile=percentile
        )
        tail = (1 - percentile / 100) / 2
        expected = np.quantile(data.double().numpy(), [tail, 1 - tail])
        width = observer.limit / BINS
        assert np.abs(np.array(observer.clipped()) - expected).max() <= 1.5 * width
        lo, hi = min(expected[0], 0), max(expected[1], 0)
        scale, zero_point = observer.calculate_qparams()
        assert scale.item() == pytest.approx((hi - lo) / 255, abs=3 * width / 255)
        assert zero_point.item() == pytest.approx(-lo / scale.item(), abs=2)

    @pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9])
    def test_magnitudes(self, data, percentile):
        observer = observed(data, cls=PerTensorPercentileObserver, percentile=percentile)
        expected = np.quantile(data.abs().double().numpy(), percentile / 100)
        width = observer.limit / BINS
        scale, zero_point = observer.calculate_qparams()
        assert scale.item() * 127.5 == pytest.approx(expected, abs=1.5 * width)
        assert zero_point == 0

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_all_is_the_minimum_and_maximum(self, data, symmetric):
        of = spec("int8", symmetric)
        found = observed(data, cls=PerTensorPercentileObserver, of=of, percentile=100)
        expected = observed(data, cls=PerTensorMinMaxObserver, of=of)
        assert found.calculate_qparams() == expected.calculate_qparams()

    def test_an_outlier_is_cut_by_default(self):
        x = torch.cat([normal(100_000), torch.tensor([1000.0])])
        scale, _ = observed(x, cls=PerTensorPercentileObserver).calculate_qparams()
        assert scale * 127.5 < 6

    @pytest.mark.parametrize("percentile", [0, -1, 100.1])
    def test_refused(self, percentile):
        with pytest.raises(ValueError, match="above 0 and up to 100"):
            PerTensorPercentileObserver(spec(), percentile=percentile)


def rounded(x, scale, zero_point, lowest, highest):
    """Quantize and dequantize integers, in float64 apart from the code under test."""
    codes = np.clip(np.round(x / scale) + zero_point, lowest, highest)
    return (codes - zero_point) * scale


RANGES = {"int2": (-2, 1), "int4": (-8, 7), "int8": (-128, 127), "uint4": (0, 15)}


def integer_error(x, qparams, dtype):
    scale, zero_point = (float(p) for p in qparams)
    x = x.double().numpy()
    return ((rounded(x, scale, zero_point, *RANGES[dtype]) - x) ** 2).mean()


SAMPLES = {
    "normal": normal(20_000),
    "laplace": normal(20_000) * normal(20_000, seed=3),
    "outlier": torch.cat([normal(20_000), torch.tensor([40.0, -60.0])]),
    "positive": normal(20_000).abs(),
    "skewed": (normal(20_000) * 0.7).exp() - 0.3,
    "uniform": torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 2 - 1,
    "few": normal(5),
    "one value": torch.full((100,), -0.7),
}


class TestSquaredError:
    @pytest.mark.parametrize("name", SAMPLES)
    @pytest.mark.parametrize(
        ("dtype", "symmetric"), [("int4", True), ("int4", False), ("uint4", False), ("int8", True)]
    )
    @pytest.mark.sampled(2, covers=True)
    def test_never_worse_than_the_minimum_and_maximum(self, name, dtype, symmetric):
        x, of = SAMPLES[name], spec(dtype, symmetric)
        errors = [
            integer_error(x, observed(x, cls=cls, of=of).calculate_qparams(), dtype)
            for cls in (PerTensorMSEObserver, PerTensorMinMaxObserver)
        ]
        slack = 1e-3 * float(x.abs().max()) / 2**8  # half a bin, as an error of the values
        assert errors[0] <= errors[1] * 1.01 + slack**2

    @pytest.mark.parametrize("name", ["normal", "laplace", "outlier", "skewed"])
    @pytest.mark.parametrize("dtype", ["int2", "int4", "int8"])
    def test_near_the_best_of_all_thresholds(self, name, dtype):
        x = SAMPLES[name]
        found = integer_error(
            x, observed(x, cls=PerTensorMSEObserver, of=spec(dtype)).calculate_qparams(), dtype
        )
        lowest, highest = RANGES[dtype]
        amax = float(x.abs().max())
        scales = np.linspace(0.2, 1, 400) * amax / ((highest - lowest) / 2)
        best = min(integer_error(x, (s, 0), dtype) for s in scales)
        assert found <= best * 1.02

    @pytest.mark.parametrize("name", ["normal", "skewed", "positive"])
    def test_near_the_best_of_all_pairs_of_thresholds(self, name):
        x = SAMPLES[name]
        of = spec("uint4", symmetric=False)
        found = integer_error(
            x, observed(x, cls=PerTensorMSEObserver, of=of).calculate_qparams(), "uint4"
        )
        lo, hi = min(0.0, float(x.min())), max(0.0, float(x.max()))
        best = np.inf
        for a, b in itertools.product(np.linspace(0.2, 1, 50), repeat=2):
            scale = (b * hi - a * lo) / 15
            best = min(best, integer_error(x, (scale, np.round(-a * lo / scale)), "uint4"))
        assert found <= best * 1.03

    @pytest.mark.parametrize(
        ("dtype", "clip", "error"),
        [
            ("int2", 1.04, 0.1498),
            ("int3", 1.80, 0.0406),
            ("int4", 2.36, 0.01176),
            ("fp4", 2.9, 0.01272),
        ],
    )
    def test_the_known_optimum_of_a_normal_distribution(self, dtype, clip, error):
        """The largest positive value that a code stands for, in standard deviations."""
        of = spec(dtype)
        x = normal(400_000)
        scale, _ = observed(x, cls=PerTensorMSEObserver, of=of).calculate_qparams()
        largest = of.fmt.max_value if of.fmt.is_float else of.fmt.qmax
        assert float(scale) * largest == pytest.approx(clip, rel=0.05)
        if dtype == "fp4":
            grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            y = np.abs(x.double().numpy()) / float(scale)
            found = (np.abs(y[:, None] - grid).min(1) ** 2).mean() * float(scale) ** 2
        else:
            codes = np.clip(np.round(x.double().numpy() / float(scale)), of.fmt.qmin, of.fmt.qmax)
            found = ((codes * float(scale) - x.double().numpy()) ** 2).mean()
        assert found == pytest.approx(error, rel=0.02)

    def test_batches_in_any_order(self):
        parts = [SAMPLES[name] for name in ("normal", "outlier", "skewed")]
        found = {
            tuple(map(float, observed(*order, cls=PerTensorMSEObserver).calculate_qparams()))
            for order in itertools.permutations(parts)
        }
        assert len(found) == 1

    @pytest.mark.parametrize("cls", [PerTensorHistogramObserver, PerTensorHistogramObserverPro])
    def test_histogram_is_another_name(self, cls):
        x, of = SAMPLES["outlier"], spec("int4")
        expected = observed(x, cls=PerTensorMSEObserver, of=of).calculate_qparams()
        assert observed(x, cls=cls, of=of).calculate_qparams() == expected
