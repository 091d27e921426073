"""The observers a configuration may name, and plain statistics."""

import inspect
import math

import pytest
import torch

from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.spec_classes import SPEC_CLASSES
from quark.torch.quantization.observer import observer as plain
from quark.torch.quantization.observer.observer import (
    MovingAverageMinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    PerChannelPowOf2MinMaxObserver,
    PerTensorMinMaxObserver,
    PerTensorPowOf2MinMaxObserver,
    PlaceholderObserver,
)
from quark.torch.quantization.observer.registry import (
    OBSERVER_METHODS,
    OBSERVERS,
    observer_class,
)

DOCUMENTED = [
    "LSQObserver",
    "MovingAverageMinMaxObserver",
    "PerBlock2DMinMaxObserver",
    "PerBlockBFPObserver",
    "PerBlockMXBufferReuseObserver",
    "PerBlockMXDiffsObserver",
    "PerBlockMXObserver",
    "PerChannelMSEObserver",
    "PerChannelMinMaxObserver",
    "PerChannelPowOf2MinMSEObserver",
    "PerChannelPowOf2MinMaxObserver",
    "PerGroupMSEObserver",
    "PerGroupMinMaxObserver",
    "PerTensorHistogramObserver",
    "PerTensorHistogramObserverPro",
    "PerTensorMSEObserver",
    "PerTensorMinMaxObserver",
    "PerTensorPercentileObserver",
    "PerTensorPowOf2MinMSEObserver",
    "PerTensorPowOf2MinMaxObserver",
    "PlaceholderObserver",
    "TQTObserver",
]


class TestNames:
    def test_documented_observers_are_known(self):
        assert set(DOCUMENTED) <= set(OBSERVERS)

    @pytest.mark.parametrize("name", OBSERVERS)
    def test_each_resolves(self, name):
        cls = observer_class(name)
        assert issubclass(cls, ObserverBase)
        assert cls.__name__ == name
        spec = QuantizationSpec(
            "int8", name, is_dynamic=False, qscheme="per_tensor", symmetric=True
        )
        assert spec.observer_cls is cls
        assert QuantizationSpec.from_dict(spec.to_dict()) == spec
        assert spec.to_dict()["observer_cls"] == name

    def test_every_public_observer_has_a_name(self):
        classes = {
            n
            for n, c in vars(plain).items()
            if inspect.isclass(c) and issubclass(c, ObserverBase) and c.__module__ == plain.__name__
        }
        assert classes - set(OBSERVERS) == {"ObserverBase", "MinMaxObserver"}

    @pytest.mark.parametrize(
        ("method", "name"),
        [
            ("min_max", "PerTensorMinMaxObserver"),
            ("histogram", "PerTensorHistogramObserver"),
            ("histogrampro", "PerTensorHistogramObserverPro"),
            ("MSE", "PerTensorMSEObserver"),
            ("percentile", "PerTensorPercentileObserver"),
        ],
    )
    @pytest.mark.parametrize("cls", ["Int8PerTensorSpec", "FP8E4M3PerTensorSpec"])
    def test_methods(self, cls, method, name):
        assert OBSERVER_METHODS[method] == name
        spec = SPEC_CLASSES[cls](observer_method=method).to_quantization_spec()
        assert spec.observer_cls is observer_class(name)
        assert type(spec.make_observer()) is observer_class(name)

    def test_unknown_names_are_refused_with_the_nearest(self):
        with pytest.raises(ValueError, match="percentile"):
            SPEC_CLASSES["Int8PerTensorSpec"](observer_method="percentil").to_quantization_spec()
        with pytest.raises(ValueError, match="PerTensorMinMaxObserver"):
            QuantizationSpec("int8", "PerTensorMinMax", qscheme="per_tensor", symmetric=True)

    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({"dtype": "int8", "qscheme": "per_tensor"}, "PerTensorMinMaxObserver"),
            ({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}, "PerChannelMinMaxObserver"),
            (
                {"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32},
                "PerGroupMinMaxObserver",
            ),
            (
                {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32},
                "PerBlockMXObserver",
            ),
            (
                {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": (8, 8)},
                "PerBlock2DMinMaxObserver",
            ),
            ({"dtype": "bfloat16"}, "PlaceholderObserver"),
            ({"dtype": "mx", "mx_element_dtype": "int8", "ch_axis": -1}, "PerBlockMXObserver"),
            ({"dtype": "mx9", "ch_axis": -1, "group_size": 16}, "PerBlockBFPObserver"),
            ({"dtype": "bfp16", "ch_axis": -1}, "PerBlockBFPObserver"),
        ],
        ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
    )
    def test_defaults(self, fields, name):
        assert QuantizationSpec(**fields).observer_cls is observer_class(name)


def per_tensor(dtype="int8"):
    return QuantizationSpec(dtype, is_dynamic=False, qscheme="per_tensor", symmetric=True)


class TestPlainStatistics:
    def test_moving_average(self):
        observer = MovingAverageMinMaxObserver(per_tensor(), averaging_constant=0.25)
        for lo, hi in ((-1.0, 2.0), (-3.0, 1.0), (-2.0, 8.0)):
            observer(torch.tensor([lo, 0.0, hi]))
        assert float(observer.lo) == -1.625  # (-1 · 3 - 3) / 4 = -1.5; (-1.5 · 3 - 2) / 4
        assert float(observer.hi) == 3.3125  # (2 · 3 + 1) / 4 = 1.75; (1.75 · 3 + 8) / 4
        assert float(observer.calculate_qparams()[0]) == pytest.approx(3.3125 / 127.5)

    def test_moving_average_follows_slowly_by_default(self):
        observer = MovingAverageMinMaxObserver(per_tensor())
        observer(torch.tensor([0.0, 1.0]))
        observer(torch.tensor([0.0, 2.0]))
        assert float(observer.hi) == pytest.approx(1.01)

    @pytest.mark.parametrize("amax", [0.01, 0.7, 1.0, 127.5, 150.0, 180.4, 5000.0])
    def test_nearest_power_of_two(self, amax):
        observer = PerTensorPowOf2MinMaxObserver(per_tensor())
        observer(torch.tensor([-amax, amax / 2]))
        scale = float(observer.calculate_qparams()[0])
        assert scale == 2.0 ** round(math.log2(amax / 127.5))

    def test_nearest_powers_of_two_of_channels(self):
        spec = QuantizationSpec(
            "int8", is_dynamic=False, qscheme="per_channel", ch_axis=0, symmetric=True
        )
        x = torch.randn(16, 8) * torch.logspace(-3, 3, 16)[:, None]
        observer, exact = PerChannelPowOf2MinMaxObserver(spec), PerChannelMinMaxObserver(spec)
        observer(x), exact(x)
        expected = exact.calculate_qparams()[0].log2().round().exp2()
        assert observer.calculate_qparams()[0].tolist() == expected.tolist()

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_nan_and_infinity_are_refused(self, bad):
        observer = PerTensorMinMaxObserver(per_tensor())
        observer(torch.tensor([1.0, bad]))
        observer(torch.tensor([1.0, 2.0]))  # later data does not hide them
        with pytest.raises(FloatingPointError, match="NaN or infinite"):
            observer.calculate_qparams()

    @pytest.mark.parametrize("name", [n for n in DOCUMENTED if n != "PlaceholderObserver"])
    def test_each_forgets(self, name):
        fields = {"qscheme": "per_tensor", "symmetric": True}
        if name == "PerBlockMXDiffsObserver":
            fields = {
                "qscheme": "per_group",
                "ch_axis": -1,
                "group_size": 4,
                "scale_format": "e8m0",
            }
        observer = QuantizationSpec(
            "fp4" if "Diffs" in name else "int8", name, is_dynamic=False, **fields
        ).make_observer()
        x = torch.randn(4, 8)
        assert observer.is_empty
        assert observer(x) is x
        assert not observer.is_empty
        observer.reset()
        assert observer.is_empty
        with pytest.raises(RuntimeError, match="No data was observed"):
            observer.calculate_qparams()

    def test_placeholder(self):
        observer = PlaceholderObserver(QuantizationSpec("bfloat16"))
        observer(torch.tensor([torch.nan]))
        assert not observer.is_empty
        assert observer.calculate_qparams() == (None, None)
