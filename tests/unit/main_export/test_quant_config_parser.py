"""The parser that Transformers hands checkpoints of other methods to."""

import pytest

from quark.torch.export.main_export.quant_config_parser import QuantConfigParser


@pytest.mark.parametrize("method", ["awq", "fp8"])
def test_another_method_is_refused_by_name(method):
    with pytest.raises(ValueError, match=f"quant_method='{method}' is not read by this version"):
        QuantConfigParser.from_custom_config({"quant_method": method}, is_bias_quantized=False)
