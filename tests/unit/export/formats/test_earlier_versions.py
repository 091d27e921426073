"""Checkpoints of versions before 1.0 that do not hold the model that was quantized."""

from dataclasses import replace

import pytest

from quark.torch.export.formats.earlier_versions import check_readable, is_earlier
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.configurations import config, groups, spec

FP4 = QuantizationSpec("fp4", qscheme="per_group", ch_axis=-1, group_size=16, is_dynamic=False)
TWO_LEVELS = QuantizationSpec.of_stages([FP4, spec("fp8_e5m3", is_scale_quant=True)])
FLOAT_ZEROS = groups("uint4", False, zero_point_type="float32")
INT8 = spec("int8", "per_channel", True)


def tokens(dtype, axis=1, **rest):
    return spec(dtype, "per_channel", **{"is_dynamic": True, "ch_axis": axis, **rest})


LOST = {
    "modulo 256": config(TWO_LEVELS),
    "fractions are lost": config(FLOAT_ZEROS),
    "before it was quantized": config(replace(FP4, is_dynamic=True)),
    "negative values became 0": config(INT8, tokens("uint8", symmetric=True)),
    "only ch_axis=1": config(INT8, tokens("fp8_e4m3", axis=-1)),
}
CODES = JsonExporterConfig()
VALUES = JsonExporterConfig(weight_format="fake_quantized")


@pytest.mark.parametrize("reason", LOST)
def test_refused(reason):
    made = LOST[reason]
    for version in ("0.8", "0.13", None):
        with pytest.raises(ValueError, match=reason):
            check_readable(replace(made, version=version), CODES)
    check_readable(made, CODES)  # the current version


def test_in_a_pattern():
    layers = {"*down_proj": LOST["fractions are lost"].global_quant_config}
    with pytest.raises(ValueError, match="fractions are lost"):
        check_readable(replace(config(INT8), layer_quant_config=layers, version="0.13"), CODES)


def test_values_keep_what_codes_lose():
    for reason in ("modulo 256", "fractions are lost"):
        check_readable(replace(LOST[reason], version="0.13"), VALUES)


def test_readable():
    for inputs in (None, tokens("int8", symmetric=True), tokens("uint8", symmetric=False)):
        check_readable(replace(config(INT8, inputs), version="0.13"), CODES)


def test_attention_in_any_version():
    check_readable(replace(config(INT8), softmax_quant_spec=spec("fp8_e4m3")), CODES)
    with pytest.raises(ValueError, match="softmax_quant_spec: probabilities take a float"):
        check_readable(replace(config(INT8), softmax_quant_spec=INT8), CODES)


def test_versions():
    assert is_earlier(Config(version="0.13")) and is_earlier(Config(version=None))
    assert not is_earlier(Config()) and not is_earlier(Config(version="10.0"))
