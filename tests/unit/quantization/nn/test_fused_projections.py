"""One projection that gives queries, keys and values, with a quantized cache."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quark.torch import ModelImporter, ModelQuantizer
from quark.torch.quantization.checks import check_cached_outputs
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.fused_layers import fused_layers, with_fused_layers
from tests import configurations
from tests.models.architectures import build as build_small
from tests.models.architectures import small_config
from tests.unit.quantization.nn.caches import FP8, HEAD, IDS, INT8, TOKEN, config_of, logits_of

GROUP = {"kv_cache_group": ["*k_proj", "*v_proj"]}
PHI3 = {"pad_token_id": 0}
FUSED = ("*qkv_proj", "*c_attn")
BY_HEAD = {"fp8": replace(FP8, qscheme="per_head"), "int4": HEAD}

quantized = partial(configurations.quantized, data=[IDS])


def test_scales_of_heads_are_those_of_keys_and_values(build, keys_of, attention):
    """Against a float model whose attention is given rounded keys and values."""
    seen = keys_of(build("phi3", **PHI3))
    scales = [torch.cat([k, v], 1).abs().amax((0, 2, 3)) / 448 for _, k, v in seen]
    model = quantized(build("phi3", **PHI3), config_of(BY_HEAD["fp8"], patterns=FUSED))
    for layer, expected in zip(model.model.layers, scales, strict=True):
        found = layer.self_attn.qkv_proj.output_quantizer.scale
        assert len(found) == 8 and torch.equal(found[4:], expected)

    def by_hand(module, query, key, value, *args, **kwargs):
        scale = scales[module.layer_idx].view(2, 2, 1, 1)
        pair = zip((key, value), scale, strict=True)
        key, value = ((x / s).to(torch.float8_e4m3fn).float() * s for x, s in pair)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

    expected = build("phi3", **PHI3)
    expected.set_attn_implementation(attention(by_hand))
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
@pytest.mark.parametrize("spec", BY_HEAD.values(), ids=BY_HEAD)
def test_scales_of_heads_come_back_bit_by_bit(spec, name, build, export):
    changes = PHI3 if name == "phi3" else {}
    model = quantized(build(name, **changes), config_of(spec, layer=scheme("int8"), patterns=FUSED))
    expected, path = logits_of(model), export(model)
    for device in ("cpu", "meta"):
        outline = build(name, device=device, **changes)
        read = ModelImporter(path, "safetensors").import_model_info(outline)
        assert torch.equal(logits_of(read), expected)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert torch.equal(logits_of(loaded), expected)


def before_rope(spec=FP8, patterns=("*k_proj", "*v_proj"), **rest):
    return replace(config_of(spec, patterns=patterns, **rest), kv_cache_post_rope=False)


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
@pytest.mark.parametrize("spec", [FP8, TOKEN], ids=["fp8", "int8 per token"])
def test_queries_are_not_quantized_with_keys_and_values(spec, name, build, unchanged):
    """``*v_proj`` matches ``qkv_proj``."""
    model = build(name, **(PHI3 if name == "phi3" else {}))
    config = before_rope(spec, patterns=("*v_proj", "*c_attn"))
    outputs = {"phi3": "128 outputs, of which 64", "gpt2": "192 outputs, of which 128"}[name]
    with unchanged(model), pytest.raises(ValueError, match=rf"{outputs}.*post_rope=True"):
        ModelQuantizer(config).quantize_model(model, iter([IDS]))
    with pytest.raises(ValueError, match=outputs):
        check_cached_outputs(model.to("meta"), config)


@pytest.mark.parametrize("patterns", [("*k_proj", "*v_proj"), ("*k_proj",)])
def test_layers_that_give_keys_and_values_alone(patterns, build):
    quantized(build(), before_rope(patterns=patterns))


def test_a_pattern_that_names_queries_too(build):
    with pytest.raises(ValueError, match=r"q_proj and .*v_proj: 128 outputs, of which 64"):
        quantized(build(), before_rope(patterns=("*q_proj", "*k_proj", "*v_proj")))


OTHER_NAMES = {"gpt2": "*.c_attn", "gpt_neox": "*.query_key_value", "gpt_bigcode": "*.c_attn"}


@pytest.mark.parametrize(("name", "pattern"), OTHER_NAMES.items(), ids=OTHER_NAMES)
@pytest.mark.parametrize("spec", [FP8, BY_HEAD["int4"]], ids=["fp8", "int4 per head"])
def test_fused_layers_of_other_names_are_found(spec, name, pattern, build, export):
    model = quantized(build(name), config_of(spec, layer=scheme("int8"), **GROUP))
    expected, path = logits_of(model), export(model)
    named = config_of(spec, layer=scheme("int8"), patterns=[pattern])
    assert torch.equal(expected, logits_of(quantized(build(name), named)))
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    assert list(section["kv_cache_quant_config"]) == [pattern]
    assert section["export"]["kv_cache_group"] == [pattern]
    read = ModelImporter(path, "safetensors").import_model_info(build(name))
    assert torch.equal(logits_of(read), expected)


@pytest.mark.parametrize("name", ["llama", "opt", "bert", "bloom"])
def test_no_layer_gives_queries_keys_and_values(name, build):
    model = build_small(small_config("bloom")) if name == "bloom" else build(name, device="meta")
    config = config_of(patterns=("*absent",))
    assert not fused_layers(model) and with_fused_layers(config, model) is config


def test_patterns_that_match_or_differ_are_kept(build):
    model = build("gpt2", device="meta")
    other = config_of(patterns=("*v_proj",)).kv_cache_quant_config
    mixed = replace(
        config_of(INT8, patterns=("*k_proj",)),
        kv_cache_quant_config={
            **config_of(INT8, patterns=("*k_proj",)).kv_cache_quant_config,
            **other,
        },
    )
    for config in (config_of(patterns=("*c_attn",)), before_rope(), mixed):
        assert with_fused_layers(config, model) is config
