"""Searches for the scale of each block of a weight."""

import numpy as np
import pytest
import torch

from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.spec_classes import OCP_MXFP4DiffsSpec, OCP_MXFP4Spec
from quark.torch.quantization.observer import scale_search as module
from quark.torch.quantization.observer.observer import MinMaxObserver
from quark.torch.quantization.observer.scale_search import (
    PerBlockMXDiffsObserver,
    PerChannelMSEObserver,
    PerChannelPowOf2MinMSEObserver,
    PerGroupMSEObserver,
    PerTensorPowOf2MinMSEObserver,
)

CHANNEL = {"qscheme": "per_channel", "ch_axis": 0}
COLUMN = {"qscheme": "per_channel", "ch_axis": 1}
GROUP = {"qscheme": "per_group", "ch_axis": -1, "group_size": 16}
ROWS = {"qscheme": "per_group", "ch_axis": 0, "group_size": 8}
TENSOR = {"qscheme": "per_tensor"}
GRANULARITIES = {"channel": CHANNEL, "column": COLUMN, "group": GROUP, "rows": ROWS}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def spec(dtype="int4", symmetric=True, **granularity):
    symmetric = None if dtype.startswith("fp") else symmetric
    return QuantizationSpec(dtype, is_dynamic=False, symmetric=symmetric, **granularity)


def weight(rows=24, columns=64):
    """Normal values with an outlier in every fifth row, and rows of very different size."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[::5, 3] *= 12
    return x * torch.logspace(-3, 2, rows)[:, None]


def blocks_of(x, granularity):
    """Cut a matrix in blocks apart from the code under test: [blocks, elements]."""
    size = granularity.get("group_size")
    if granularity["qscheme"] == "per_tensor":
        return x.reshape(1, -1)
    if granularity["ch_axis"] == 1:
        return x.T
    if granularity["ch_axis"] == 0 and size:
        return x.reshape(-1, size, x.shape[1]).permute(0, 2, 1).reshape(-1, size)
    return x.reshape(-1, size) if size else x


def qparams(cls, x, of):
    observer = cls(of)
    observer(x)
    scale, zero_point = observer.calculate_qparams()
    zero_point = torch.zeros(1) if zero_point is None else zero_point
    return scale, scale.double().reshape(-1, 1).numpy(), zero_point.double().reshape(-1, 1).numpy()


def errors(x, scale, zero_point, dtype):
    """Squared error of each block."""
    x = x.double().numpy()
    if dtype == "fp4":
        codes = np.abs(x) / scale
        return (np.abs(codes[..., None] - FP4).min(-1) ** 2).sum(1) * scale[..., 0] ** 2
    lowest, highest = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127)}[dtype]
    codes = np.clip(np.round(x / scale) + zero_point, lowest, highest)
    return (((codes - zero_point) * scale - x) ** 2).sum(1)


class TestRanges:
    @pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
    @pytest.mark.parametrize(
        ("dtype", "symmetric"), [("int4", True), ("int4", False), ("uint4", False), ("fp4", True)]
    )
    @pytest.mark.parametrize("cls", [PerChannelMSEObserver, PerGroupMSEObserver])
    def test_no_block_is_worse_than_its_range(self, cls, dtype, symmetric, granularity):
        x, of = weight(), spec(dtype, symmetric, **granularity)
        blocks = blocks_of(x, granularity)
        shaped, *found = qparams(cls, x, of)
        expected, *plain = qparams(MinMaxObserver, x, of)
        assert shaped.shape == expected.shape
        found, plain = errors(blocks, *found, dtype), errors(blocks, *plain, dtype)
        assert (found <= plain * (1 + 1e-5)).all()
        assert np.mean(found / plain) < 0.97

    def test_near_the_best_of_all_thresholds(self):
        x, of = weight(), spec("int4", **CHANNEL)
        found = errors(x, *qparams(PerChannelMSEObserver, x, of)[1:], "int4")
        amax = x.abs().amax(1, keepdim=True).double().numpy()
        tried = [errors(x, amax * s / 7.5, 0, "int4") for s in np.linspace(0.2, 1, 400)]
        assert (found <= np.min(tried, 0) * 1.1).all()
        assert found.sum() <= np.min(tried, 0).sum() * 1.02

    def test_known_optimum_of_a_normal_distribution(self):
        x = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))
        x *= torch.tensor([[1e-3], [1.0], [7.0], [1e4]])
        scale, *_ = qparams(PerChannelMSEObserver, x, spec("int4", **CHANNEL))
        clip = scale * 7 / x.std(1)
        assert clip.numpy() == pytest.approx([2.36] * 4, rel=0.05)

    def test_pieces_of_any_height(self, monkeypatch):
        x, of = weight(), spec("int4", **GROUP)
        expected = qparams(PerGroupMSEObserver, x, of)[0]
        monkeypatch.setattr(module, "CHUNK", 40)
        assert qparams(PerGroupMSEObserver, x, of)[0].equal(expected)

    def test_weights_of_a_convolution(self):
        of = spec("int4", **GROUP).for_parameter()
        x = weight(6, 32)
        expected = qparams(PerGroupMSEObserver, x, of)[0]
        assert expected.shape == (6, 2)
        assert qparams(PerGroupMSEObserver, x.reshape(6, 8, 2, 2), of)[0].equal(expected)

    def test_half_precision(self):
        x, of = weight().bfloat16(), spec("int4", **CHANNEL)
        expected = qparams(PerChannelMSEObserver, x.float(), of)[0]
        assert qparams(PerChannelMSEObserver, x, of)[0].equal(expected)

    def test_zeros_give_the_scale_of_zeros(self):
        x = torch.zeros(3, 16)
        x[1] = 1
        scale, *_ = qparams(PerChannelMSEObserver, x, spec("int4", **CHANNEL))
        assert scale[[0, 2]].tolist() == [torch.finfo(torch.float32).eps] * 2

    def test_the_last_tensor_counts(self):
        observer, fresh = (PerChannelMSEObserver(spec("int4", **CHANNEL)) for _ in range(2))
        observer(weight() * 9)
        for each in (observer, fresh):
            each(weight())
        observer(torch.empty(0, 4))
        assert observer.calculate_qparams()[0].equal(fresh.calculate_qparams()[0])

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_nan_and_infinity_are_refused(self, bad):
        x = weight()
        x[3, 3] = bad
        with pytest.raises(FloatingPointError, match="NaN or infinite"):
            PerChannelMSEObserver(spec("int4", **CHANNEL))(x)


class TestPowersOfTwo:
    CASES = ((PerTensorPowOf2MinMSEObserver, TENSOR), (PerChannelPowOf2MinMSEObserver, CHANNEL))

    @pytest.mark.parametrize(("cls", "granularity"), CASES, ids=["tensor", "channel"])
    @pytest.mark.parametrize("dtype", ["int4", "int8"])
    def test_best_of_all(self, cls, granularity, dtype):
        x, of = weight()[8:], spec(dtype, **granularity)
        shaped, scale, zero_point = qparams(cls, x, of)
        assert shaped.dtype == torch.float32
        assert (torch.frexp(shaped)[0] == 0.5).all()
        blocks = blocks_of(x, granularity)
        found = errors(blocks, scale, zero_point, dtype)
        every = [errors(blocks, np.array([[2.0**e]]), 0, dtype) for e in range(-24, 10)]
        assert found == pytest.approx(np.min(every, 0), rel=1e-5)

    def test_zero_points_follow_the_scale(self):
        x, of = weight().abs(), spec("uint4", symmetric=False, **CHANNEL)
        shaped, _, zero_point = qparams(PerChannelPowOf2MinMSEObserver, x, of)
        assert (torch.frexp(shaped)[0] == 0.5).all()
        assert (zero_point == 0).all()  # nothing is negative


class TestSharedExponents:
    def test_the_better_of_two(self):
        x = weight(24, 64)
        of = OCP_MXFP4DiffsSpec(ch_axis=-1).to_quantization_spec()
        assert of.observer_cls is PerBlockMXDiffsObserver
        shaped, scale, zero_point = qparams(PerBlockMXDiffsObserver, x, of)
        assert shaped.shape == (24, 2)
        blocks = x.reshape(-1, 32)
        top = np.ceil(np.log2(blocks.abs().amax(1, keepdim=True).double().numpy())) - 2
        both = np.stack([errors(blocks, 2.0 ** (top - i), 0, "fp4") for i in range(2)])
        assert np.isin(np.log2(scale) - top, (0, -1)).all()
        assert errors(blocks, scale, zero_point, "fp4") == pytest.approx(both.min(0), rel=1e-5)
        picked = {int(v) for v in (np.log2(scale) - top).flatten()}
        assert picked == {0, -1}  # the data tells the two apart

    @pytest.mark.parametrize("mode", ["even", "floor", "ceil"])
    def test_no_block_is_worse_than_by_rule(self, mode):
        x = weight(240, 64)
        of = OCP_MXFP4Spec(ch_axis=-1, scale_calculation_mode=mode, is_dynamic=False)
        of = of.to_quantization_spec()
        blocks = x.reshape(-1, 32)
        found = errors(blocks, *qparams(PerBlockMXDiffsObserver, x, of)[1:], "fp4")
        plain = errors(blocks, *qparams(MinMaxObserver, x, of)[1:], "fp4")
        assert (found <= plain * (1 + 1e-5)).all()
        assert found.sum() < plain.sum()

    def test_smallest_exponent(self):
        of = OCP_MXFP4DiffsSpec(ch_axis=-1).to_quantization_spec()
        scale = qparams(PerBlockMXDiffsObserver, torch.zeros(2, 32), of)[0]
        assert scale.tolist() == [[2.0**-127]] * 2


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_ranges_in_which_no_value_is_cut_are_tried(dtype):
    x = torch.randn(32, 9, generator=torch.Generator().manual_seed(0))  # depthwise 3 by 3 kernels
    uncut = x.abs().amax(1, keepdim=True).double().numpy() / {"int4": 7, "int8": 127}[dtype]
    _, scale, zero_point = qparams(PerChannelMSEObserver, x, spec(dtype, **CHANNEL))
    searched, rounded = (errors(x, s, zero_point, dtype) for s in (scale, uncut))
    assert (searched <= 1.02 * rounded).mean() > 0.95
    assert np.isclose(scale, uncut, rtol=1e-3).any()
