"""Queries that are quantized as attention takes them."""

import copy
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quark.torch import LLMTemplate, ModelImporter, ModelQuantizer, save_params
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.attention import attention_routes
from quark.torch.quantization.preparation import quantized_layers
from tests import configurations
from tests.models.architectures import build as build_small
from tests.models.architectures import small_config, tokens
from tests.unit.quantization.nn.caches import FP8, HEAD, IDS, INT8, R3, TOKEN, config_of, logits_of

SPECS = {"fp8": FP8, "int8": INT8, "int8 per token": TOKEN, "int4 per head": HEAD}

quantized = partial(configurations.quantized, data=[IDS])


def queries_of(spec=FP8, patterns=("*q_proj",), **rest):
    """A configuration that quantizes queries after rotary embedding, and what is given."""
    layer = QuantizationConfig(output_tensors=spec)
    return Config(query_quant_config=dict.fromkeys(patterns, layer), exclude=["lm_head"], **rest)


def with_queries(config, spec=FP8):
    return replace(config, query_quant_config=queries_of(spec).query_quant_config)


def to_fp8(x, scale):
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("qscheme", ["per_tensor", "per_head"])
def test_queries_are_quantized_after_rotary_embedding(qscheme, build, keys_of, attention):
    """Against a float model whose attention is given rounded queries."""
    axes = (0, 1, 2, 3) if qscheme == "per_tensor" else (0, 2, 3)
    scales = [q.abs().amax(axes, keepdim=True) / 448 for q, *_ in keys_of(build())]
    model = quantized(build(), queries_of(replace(FP8, qscheme=qscheme)))
    for layer, expected in zip(model.model.layers, scales, strict=True):
        found = layer.self_attn.q_proj.output_quantizer.scale
        assert torch.equal(found.flatten(), expected.flatten())

    def by_hand(module, query, *args, **kwargs):
        query = to_fp8(query, scales[module.layer_idx])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)

    expected = build()
    expected.set_attn_implementation(attention(by_hand))
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=0, atol=1e-6)
    assert float((logits_of(model) - logits_of(build())).abs().max()) > 1e-3


def test_a_scheme_of_queries_keys_and_values(build, keys_of):
    config = LLMTemplate.get("llama").get_config("int8_wo", attention_scheme="qkv_fp8_per_head")
    config = replace(config, global_quant_config=QuantizationConfig(), layer_quant_config={})
    seen = keys_of(build())
    model = quantized(build(), config)
    layer = model.model.layers[0].self_attn  # later layers take other inputs
    for projection, heads in zip((layer.q_proj, layer.k_proj, layer.v_proj), seen[0], strict=True):
        scale = projection.output_quantizer.scale
        assert torch.equal(scale, heads.abs().amax((0, 2, 3)) / 448)


def test_statistics_of_queries_in_float_choose_the_scales_of_the_cache(build):
    """A search of scales of 4 bits takes keys and values as without quantized queries."""
    cached = config_of(HEAD)
    plain, both = (quantized(build(), c) for c in (cached, with_queries(cached, HEAD)))
    for one, other in zip(plain.model.layers, both.model.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            scales = [
                layer.self_attn.get_submodule(name).output_quantizer.scale for layer in (one, other)
            ]
            assert torch.equal(*scales)


@pytest.mark.parametrize("algorithms", [None, [R3]], ids=["as they are", "rotated"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.sampled(2, covers=True)
def test_a_model_comes_back_bit_by_bit(spec, algorithms, build, export):
    model = quantized(build(), with_queries(config_of(spec, algorithms, scheme("int8")), spec))
    expected, path = logits_of(model), export(model)
    for device in ("cpu", "meta"):
        read = ModelImporter(path, "safetensors").import_model_info(build(device=device))
        assert torch.equal(logits_of(read), expected)
    loaded = AutoModelForCausalLM.from_pretrained(export(read), dtype="auto")
    assert torch.equal(logits_of(loaded), expected)
    assert torch.equal(logits_of(copy.deepcopy(loaded)), expected)
    routes = attention_routes(loaded)
    assert [(r.projection, r.queries) for r in routes] == [("k_proj", "q_proj")] * 2


def test_queries_alone_come_back(build, export):
    model = quantized(build(), queries_of())
    path = export(model)
    read = ModelImporter(path, "safetensors").import_model_info(build())
    assert torch.equal(logits_of(read), logits_of(model))
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    assert list(section["query_quant_config"]) == ["*q_proj"]
    assert Config.from_dict(section).query_quant_config == queries_of().query_quant_config
    other = json.loads((export(quantized(build(), config_of())) / "config.json").read_text())
    assert "query_quant_config" not in other["quantization_config"]


def test_excluded_layers_have_queries_too(build):
    config = with_queries(Config(scheme("int8_wo"), exclude=["lm_head", "*q_proj"]))
    layer = quantized(build(), config).model.layers[0].self_attn.q_proj
    assert layer.quant_config == QuantizationConfig(output_tensors=FP8)


REFUSED = {
    "bloom": ("bloom", "*query_key_value", "does not use the attention interface"),
    "together": ("phi3", "*qkv_proj", "qkv_proj does not compute them alone"),
    "with a gate": ("qwen3_next", "*q_proj", "q_proj does not compute them alone"),
    "keys": ("llama", "*k_proj", "k_proj does not compute them"),
    "elsewhere": ("llama", "*o_proj", "o_proj does not compute them"),
    "not reached": ("gemma3", "*vision_tower*q_proj", "its q_proj did not run"),
}


@pytest.mark.parametrize(("name", "pattern", "said"), REFUSED.values(), ids=REFUSED)
def test_refused_before_any_work(name, pattern, said, unchanged):
    model = build_small(small_config(name), torch.float32)
    config = queries_of(TOKEN, patterns=(pattern,))
    with unchanged(model), pytest.raises(ValueError, match=rf"query_quant_config: .*{said}"):
        ModelQuantizer(config).quantize_model(model, [tokens()])
    assert not attention_routes(model)


def test_other_files_cannot_tell(build, tmp_path):
    model = quantized(build(), queries_of())
    with pytest.raises(ValueError, match="cannot tell that queries or keys are quantized after"):
        save_params(model, "llama", export_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_queries_of_a_vision_tower_stay_in_float():
    model = build_small(small_config("gemma3"), torch.float32)
    model = configurations.quantized(model, queries_of(TOKEN), [tokens()])
    names = [n for n, layer in quantized_layers(model) if layer.quant_config.output_tensors]
    assert names and not any("vision" in name for name in names)
