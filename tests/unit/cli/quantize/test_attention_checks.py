"""Checks that a model has the layers whose outputs are keys, values and queries."""

import pytest
from typer import BadParameter

from quark.cli.quantize.model_checks import check_outputs
from quark.torch import LLMTemplate

FUSED = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "phi3": "qkv_proj"}
ONE_HEAD_SIZE = {"num_key_value_heads": 4, "pad_token_id": 0}


def test_a_cache_of_projections_that_give_queries_too(build):
    model = build("phi3", pad_token_id=0, device="meta")
    template = LLMTemplate.get("phi3")
    config = template.get_config("int8_wo", kv_cache_scheme="fp8")
    with pytest.raises(BadParameter, match=r"qkv_proj: 128 outputs.* \(--kv_cache_post_rope\)"):
        check_outputs(model, config)
    config.kv_cache_post_rope = True
    check_outputs(model, config)


@pytest.mark.parametrize(("name", "layer"), FUSED.items(), ids=FUSED)
@pytest.mark.parametrize("scheme", ["fp8", "qkv_fp8", "qkv_int4_per_head"])
def test_attention_without_queries(scheme, name, layer, build):
    config = LLMTemplate.get(name).get_config("int8_wo", attention_scheme=scheme)
    said = rf"has no layers that match \*q_proj\. .*{layer} gives queries, keys and values together"
    with pytest.raises(BadParameter, match=said) as raised:
        check_outputs(build(name, device="meta", **ONE_HEAD_SIZE), config)
    assert raised.value.param_hint == "--attention_scheme"
    check_outputs(build(device="meta"), config)


def test_a_cache_of_fused_layers_with_other_names(build):
    config = LLMTemplate.get("gpt2").get_config("int8_wo", kv_cache_scheme="fp8")
    model = build("gpt2", device="meta")
    with pytest.raises(BadParameter, match=r"c_attn gives .* together.* --kv_cache_post_rope"):
        check_outputs(model, config)
    config.kv_cache_post_rope = True
    assert list(check_outputs(model, config).kv_cache_quant_config) == ["*.c_attn"]


def test_queries_without_keys_and_values(build):
    """Nobody gave ``--kv_cache_dtype``."""
    config = LLMTemplate.get("llama").get_config("int8_wo", attention_scheme="qkv_fp8")
    config.kv_cache_quant_config = {"*absent": config.kv_cache_quant_config["*k_proj"]}
    with pytest.raises(BadParameter, match=r"has no layers that match \*absent\. ") as raised:
        check_outputs(build(device="meta"), config)
    assert raised.value.param_hint == "--attention_scheme"
