"""Options of trained ranges: what they choose, what is refused, and that files keep them."""

import pytest

from quark.torch.quantization.config.config import (
    Config,
    Int8PerTensorSpec,
    QATSpec,
    QuantizationConfig,
    QuantizationSpec,
    TQTSpec,
)
from quark.torch.quantization.config.type import TQTThresholdInitMeth
from quark.torch.quantization.observer.lsq_observer import LSQObserver
from quark.torch.quantization.observer.scale_search import PerTensorPowOf2MinMSEObserver
from quark.torch.quantization.observer.tqt_observer import TQTObserver

TENSOR = {"dtype": "int8", "qscheme": "per_tensor", "symmetric": True}
CHANNEL = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}
_3SD, _KL_J = TQTThresholdInitMeth._3SD, TQTThresholdInitMeth._KL_J


@pytest.mark.parametrize(
    ("fields", "training", "observer"),
    [
        ({"qat_spec": QATSpec()}, "lsq", LSQObserver),
        ({"qat_spec": TQTSpec()}, "tqt", TQTObserver),
        ({"observer_cls": LSQObserver}, "lsq", LSQObserver),
        ({"observer_cls": "TQTObserver"}, "tqt", TQTObserver),
        (
            {"qat_spec": TQTSpec(), "observer_cls": PerTensorPowOf2MinMSEObserver},
            "tqt",
            PerTensorPowOf2MinMSEObserver,
        ),
        (
            {"qat_spec": QATSpec(), "observer_cls": "PerTensorMSEObserver", "scale_type": "pof2"},
            "lsq",
            None,
        ),
        ({}, None, None),
    ],
)
def test_what_is_trained(fields, training, observer):
    spec = QuantizationSpec(**TENSOR, **fields)
    assert spec.range_training == training
    assert observer is None or spec.observer_cls is observer
    assert spec.for_parameter().range_training == training
    assert QuantizationSpec.from_dict(spec.to_dict()) == spec


def test_first_threshold():
    spec = QuantizationSpec(**TENSOR, qat_spec=TQTSpec())
    assert spec.threshold_init is _KL_J and spec.for_parameter().threshold_init is _3SD
    assert QuantizationSpec(**CHANNEL, qat_spec=TQTSpec()).threshold_init is _3SD
    given = QuantizationSpec(**TENSOR, qat_spec=TQTSpec(threshold_init_meth="_3SD"))
    assert given.threshold_init is _3SD
    assert QuantizationSpec.from_dict(given.to_dict()).threshold_init is _3SD


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**TENSOR, "is_dynamic": True, "qat_spec": QATSpec()}, "leave out is_dynamic"),
        ({"dtype": "bfloat16", "observer_cls": LSQObserver}, "need integers or floats"),
        (
            {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
            | {"scale_format": "e8m0", "qat_spec": QATSpec()},
            "need integers or floats",
        ),
        (
            {"dtype": "mx6", "ch_axis": -1, "is_dynamic": False, "qat_spec": QATSpec()},
            "need integers or floats",
        ),
        ({**TENSOR, "observer_cls": LSQObserver, "qat_spec": TQTSpec()}, "goes with"),
        ({**TENSOR, "observer_cls": TQTObserver, "qat_spec": QATSpec()}, "goes with"),
        ({**TENSOR, "symmetric": False, "qat_spec": TQTSpec()}, "symmetric integer"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "qat_spec": TQTSpec()}, "integer"),
        ({**CHANNEL, "qat_spec": TQTSpec(_KL_J)}, "one scale per tensor: use _3SD"),
        (
            {**TENSOR, "observer_cls": "PerTensorMSEObserver", "qat_spec": TQTSpec(_3SD)},
            "threshold_init_meth is for TQTObserver, got PerTensorMSEObserver",
        ),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantizationSpec(**fields)


def test_a_configuration_in_a_file():
    spec = QuantizationSpec(**TENSOR, qat_spec=TQTSpec(_3SD))
    config = Config(QuantizationConfig(weight=spec, input_tensors=spec))
    data = config.to_dict()
    assert Config.from_dict(data) == config
    assert data["global_quant_config"]["weight"]["qat_spec"] == {
        "name": "TQTSpec",
        "threshold_init_meth": "_3SD",
    }
    # Without training the key is absent, as in the files of other versions.
    plain = Config(QuantizationConfig(weight=Int8PerTensorSpec().to_quantization_spec()))
    assert "qat_spec" not in plain.to_dict()["global_quant_config"]["weight"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "TQTSpek"}, "TQTSpec"),
        ({"name": "TQTSpec", "threshold": "_3SD"}, "threshold_init_meth"),
        ({"name": "TQTSpec", "threshold_init_meth": "_2SD"}, "_3SD"),
        ({"threshold_init_meth": "_3SD"}, "an object with a name"),
        ("os:system", "an object with a name"),
    ],
)
def test_unknown_names_in_a_file(value, message):
    data = QuantizationSpec(**TENSOR).to_dict() | {"qat_spec": value}
    with pytest.raises(ValueError, match=message):
        QuantizationSpec.from_dict(data)
