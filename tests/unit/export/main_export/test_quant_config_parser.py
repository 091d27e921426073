"""The parser that Transformers hands checkpoints of other methods to."""

import pytest

from quark.torch.export.main_export.quant_config_parser import QuantConfigParser
from quark.torch.quantization.config.type import Dtype


@pytest.mark.parametrize(
    ("section", "dtype", "excluded"),
    [
        (
            {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["lm_head"]},
            Dtype.uint4,
            ["*lm_head*"],
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
            Dtype.fp8_e4m3,
            ["lm_head"],
        ),
    ],
    ids=["awq", "fp8"],
)
def test_what_other_methods_stand_for(section, dtype, excluded):
    config = QuantConfigParser.from_custom_config(section, is_bias_quantized=False)
    assert config.global_quant_config.weight.dtype is dtype
    assert config.exclude == excluded


def test_an_unknown_method_is_refused_by_name():
    with pytest.raises(ValueError, match="'other'"):
        QuantConfigParser.from_custom_config({"quant_method": "other"})
