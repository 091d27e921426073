"""Quantized queries, keys and values in ONNX files: ONNX Runtime gives the logits of torch."""

from dataclasses import replace

import pytest
import torch

from quark.torch import LLMTemplate, ModelExporter
from quark.torch.quantization.config.config import QuantizationConfig
from tests.configurations import quantized

DATA = torch.tensor([[5, 9, 2, 40, 11, 7, 33], [3, 8, 60, 12, 1, 22, 4]])
SCHEMES = {  # attention_scheme -> scheme of the cache, where the name does not say it
    "qkv_fp8": None,
    "qkv_fp8_per_head": None,
    "qkv_int8_per_head": None,
    "qkv_int4_per_head": None,
    "qkv_fp4_per_head": None,
    "fp8": "fp8",  # queries before rotary embedding, and probabilities
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.sampled(2)
def test_onnx_runtime_quantizes_queries_as_torch_does(name, build, tmp_path, run_onnx):
    """Other tokens than those of the calibration and of the trace; weights are in float."""
    template = LLMTemplate.get("llama")
    config = template.get_config("int8_wo", None, SCHEMES[name], attention_scheme=name)
    config = replace(config, global_quant_config=QuantizationConfig())
    in_float = replace(config, query_quant_config={}, layer_quant_config={})
    model, other = (quantized(build(), c, [DATA]) for c in (config, in_float))
    ModelExporter(tmp_path).export_onnx_model(model, DATA)
    tokens = DATA.flip(1)
    (result,) = run_onnx(tmp_path, tokens)
    with torch.no_grad():
        expected, without = (m(tokens).logits for m in (model, other))
    assert float((result - expected).abs().max()) < 1e-5
    assert float((result - without).abs().max()) > 1e-3  # queries are quantized
