"""Keys that are quantized as attention takes them, and rotated before."""

import copy
import io
import json
import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quark.torch import ModelImporter, save_params
from quark.torch.quantization.config.config import (
    Config,
    GPTQConfig,
    QuaRotConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.attention import key_routes
from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from tests import configurations
from tests.models.architectures import InDouble, small_config
from tests.models.architectures import build as build_small
from tests.unit.quantization.nn.caches import (
    FP8,
    GROUP,
    HEAD,
    IDS,
    INT8,
    R3,
    TOKEN,
    config_of,
    logits_of,
)

SPECS = {
    "fp8": FP8,
    "int8": INT8,
    "int8 per token": TOKEN,
    "int4 per token and head": GROUP,
    "int4 per head": HEAD,
}
ROTATIONS = {"as they are": None, "rotated": [R3]}


quantized = partial(configurations.quantized, data=[IDS])


# ---- what is computed ---------------------------------------------------------------------------


def to_fp8(x):
    scale = x.abs().amax() / 448
    return scale, (x / scale).to(torch.float8_e4m3fn).float() * scale


def test_keys_are_quantized_after_rotary_embedding(build, keys_of, attention):
    """Against a float model whose attention is given rounded keys and values."""
    scales = [[to_fp8(x)[0] for x in (key, value)] for _, key, value in keys_of(build())]
    model = quantized(build(), config_of(kv_cache_group=["*k_proj"]))  # none with the values
    for layer, (of_keys, of_values) in zip(model.model.layers, scales, strict=True):
        projections = layer.self_attn.k_proj, layer.self_attn.v_proj
        found = [projection.output_quantizer.scale for projection in projections]
        assert torch.equal(found[0], of_keys) and torch.equal(found[1], of_values)

    def by_hand(module, query, key, value, *args, **kwargs):
        pair = zip((key, value), scales[module.layer_idx], strict=True)
        key, value = ((x / s).to(torch.float8_e4m3fn).float() * s for x, s in pair)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

    expected = build()
    expected.set_attn_implementation(attention(by_hand))
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=0, atol=1e-6)
    assert float((logits_of(model) - logits_of(build())).abs().max()) > 1e-3


def test_scales_per_token_are_those_of_all_heads(build, keys_of, attention):
    def by_hand(module, query, key, value, *args, **kwargs):
        scale = key.abs().amax((1, 3), keepdim=True) / 448
        key = (key / scale).to(torch.float8_e4m3fn).float() * scale
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

    expected = build()
    expected.set_attn_implementation(attention(by_hand))
    spec = replace(TOKEN, dtype="fp8_e4m3")
    model = quantized(build(), config_of(spec, patterns=("*k_proj",)))
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=0, atol=1e-5)


def test_where_nothing_is_rotated_it_is_the_same_as_before(build):
    """OPT has no rotary embedding."""
    after, before = config_of(INT8), config_of(INT8)
    before.kv_cache_post_rope = False
    found = logits_of(quantized(build("opt"), after))
    torch.testing.assert_close(found, logits_of(quantized(build("opt"), before)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["phi3", "gpt_neox"])
def test_a_projection_that_gives_queries_and_values_too(name, keys_of):
    model = build_small(small_config(name), torch.float32)
    seen = keys_of(build_small(small_config(name), torch.float32))
    patterns = ("*qkv_proj", "*query_key_value")
    model = quantized(model, config_of(INT8, patterns=patterns))
    for route, (_, key, value) in zip(key_routes(model), seen, strict=True):
        attention = next(m for m in model.modules() if vars(m).get("config") is route)
        scale = attention.get_submodule(route.projection).output_quantizer.scale
        widest = torch.maximum(key.abs().max(), value.abs().max())
        assert torch.equal(scale, widest / 127.5)


@pytest.mark.parametrize("algorithms", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_cache_changes_nothing(spec, algorithms, build):
    model = build(dtype=torch.float64)
    model = quantized(model, config_of(spec, algorithms))
    expected = logits_of(model)
    cache, steps = None, []
    for part in IDS.split([5, 1, 1, 4, 1], 1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-5)


def test_generation_with_and_without_a_cache(build):
    model = quantized(build(dtype=torch.float64), config_of(INT8, [R3]))
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(
        model.generate(IDS, use_cache=True, **options),
        model.generate(IDS, use_cache=False, **options),
    )


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_the_attention_of_the_model_can_be_changed_later(build, rotation):
    model = quantized(build(num_hidden_layers=1), config_of(GROUP, rotation))
    expected = logits_of(model)
    model.set_attn_implementation("eager")
    found = model(IDS, output_attentions=True)
    torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-4)
    assert found.attentions[0].shape == (2, 4, 12, 12)
    assert float((found.logits.detach() - logits_of(build(num_hidden_layers=1))).abs().max()) > 1e-3


def test_copies(build):
    model = quantized(build(), config_of(INT8, [R3]))
    expected, twin, file = logits_of(model), copy.deepcopy(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    for layer in model.model.layers:
        layer.self_attn.k_proj.output_quantizer.scale *= 50
    assert not torch.allclose(logits_of(model), expected)
    for other in (twin, read):
        assert torch.equal(logits_of(other), expected)
        assert all(route.config is other.config for route in key_routes(other))


# ---- rotations ----------------------------------------------------------------------------------


def in_float(model):
    for module in model.modules():
        if isinstance(module, TensorQuantizer):
            module.enabled = False
    return model


# Architecture -> what to change, and what gives the keys.
ROTATED = {
    "llama": ("llama", {}, "k_proj"),
    "no power of two": ("llama", {"head_dim": 24}, "k_proj"),
    "blocks": ("llama", {"head_dim": 18}, "k_proj"),
    "qwen3": ("qwen3", {}, "k_proj"),
    "gemma2": ("gemma2", {}, "k_proj"),
    "mixtral": ("mixtral", {}, "k_proj"),
    "gpt_oss": ("gpt_oss", {}, "k_proj"),
    "phi3": ("phi3", {}, "qkv_proj"),
    "gpt_neox": ("gpt_neox", {}, "query_key_value"),
}


@pytest.mark.parametrize(("name", "changes", "projection"), ROTATED.values(), ids=ROTATED)
def test_rotated_queries_and_keys_give_the_same(name, changes, projection):
    model = build_small(small_config(name, **changes))
    split_experts(model)
    with InDouble():
        expected = logits_of(model)
    model = quantized(model, config_of(GROUP, [R3], patterns=(f"*{projection}",)))
    with InDouble():
        found = logits_of(in_float(model))
    assert all(route.rotates for route in key_routes(model)) and key_routes(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


@torch.no_grad()
def with_outliers(model, factor):
    """Make channels of keys larger by a factor, and those of queries as much smaller.

    Rotary embedding turns channels i and i + 32 of a head of 64 together.
    """
    for layer in model.model.layers:
        for name, by in (("q_proj", 1 / factor), ("k_proj", factor)):
            projection = layer.self_attn.get_submodule(name)
            projection.weight.view(-1, 64, projection.in_features)[:, [3, 35]] *= by
    return model


OUTLIERS = {
    "int4 per head": (replace(GROUP, group_size=64), 10),
    "int8": (INT8, 30),
    "int8 per token": (TOKEN, 30),
}


@pytest.mark.parametrize(("spec", "factor"), OUTLIERS.values(), ids=OUTLIERS)
def test_rotations_spread_outliers_of_keys(spec, factor, build):
    expected = logits_of(build(head_dim=64))
    same = logits_of(with_outliers(build(head_dim=64), factor))
    torch.testing.assert_close(same, expected, rtol=0, atol=1e-4)

    def error(*algorithms):
        config = config_of(spec, list(algorithms) or None, patterns=("*k_proj",))
        model = quantized(with_outliers(build(head_dim=64), factor), config)
        return float((logits_of(model) - expected).norm())

    assert error(R3) < 0.5 * error()


@pytest.mark.parametrize("post_rope", [False, True], ids=["before", "nothing quantized"])
def test_r3_is_skipped_where_no_keys_are_quantized(post_rope, build, caplog):
    config = config_of(FP8, [R3], layer=scheme("int8_wo"))
    config.kv_cache_post_rope = post_rope
    if post_rope:
        config.kv_cache_quant_config = {}
    with caplog.at_level(logging.WARNING):
        model = quantized(build(), config)
    assert "r3 is skipped" in caplog.text and not key_routes(model)
    assert ("changes nothing without kv_cache_quant_config" in caplog.text) is post_rope


ALGORITHMS = {
    "quarot, gptq": (scheme("int4_wo_32"), [QuaRotConfig(), GPTQConfig()]),
    "r3, smoothquant": (scheme("int8"), [R3, SmoothQuantConfig(alpha=0.5)]),
    "learned": (scheme("mxfp4"), [RotationConfig(r2=True, r3=True, trainable=True)]),
}


@pytest.mark.parametrize(("layer", "algorithms"), ALGORITHMS.values(), ids=ALGORITHMS)
def test_algorithms_and_keys_go_together(layer, algorithms, build, export, monkeypatch):
    monkeypatch.setattr("quark.torch.algorithm.rotation.spinquant.STEPS", 5)
    model = quantized(build(), config_of(INT8, algorithms, layer))
    expected = logits_of(model)
    read = ModelImporter(export(model), "safetensors").import_model_info(build())
    assert torch.equal(logits_of(read), expected)


def test_algorithms_see_keys_in_float(build):
    config = config_of(INT8, [RotationConfig(r2=True), GPTQConfig()], scheme("int4_wo_32"))
    after = dict(quantized(build(), config).named_parameters())
    config.kv_cache_post_rope = False
    for name, value in quantized(build(), config).named_parameters():
        assert torch.equal(after[name], value)


# ---- to a checkpoint and back -------------------------------------------------------------------


@pytest.mark.parametrize("algorithms", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("layer", ["int8", None])
@pytest.mark.sampled(3)
def test_a_model_comes_back_bit_by_bit(layer, spec, algorithms, build, export):
    layer = None if layer is None else scheme(layer)
    model = quantized(build(), config_of(spec, algorithms, layer))
    expected, path = logits_of(model), export(model)
    for device in ("cpu", "meta"):
        read = ModelImporter(path, "safetensors").import_model_info(build(device=device))
        assert torch.equal(logits_of(read), expected)
    loaded = AutoModelForCausalLM.from_pretrained(export(read), dtype="auto")
    assert torch.equal(logits_of(loaded), expected)
    assert all(route.rotates is bool(algorithms) for route in key_routes(loaded))
    again = ModelImporter(export(loaded), "safetensors").import_model_info(build())
    assert torch.equal(logits_of(again), expected)


def test_attention_that_is_asked_for_when_loading(build, export):
    path = export(quantized(build(num_hidden_layers=1), config_of(INT8, [R3])))
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation=name)
        for name in ("eager", "sdpa")
    ]
    found, expected = map(logits_of, models)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert models[0](IDS, output_attentions=True).attentions


def test_the_configuration_says_what_is_stored(build, export):
    config = config_of(FP8, [QuaRotConfig(r4=False)], scheme("fp8"))
    read = Config.from_dict(section(export(quantized(build(), config))))
    assert read.kv_cache_post_rope and read.algo_config[0].r3
    config.kv_cache_post_rope = False
    read = Config.from_dict(section(export(quantized(build(), config))))
    assert not read.kv_cache_post_rope and not read.algo_config[0].r3


def section(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def test_other_files_cannot_tell(build, export, tmp_path):
    layer = scheme("fp8")
    model = quantized(build(), config_of(FP8, [R3], layer))
    with pytest.raises(ValueError, match="cannot tell that keys are rotated"):
        export(model, custom_mode="compressed-tensors")
    with pytest.raises(ValueError, match="cannot tell that queries or keys are quantized"):
        save_params(model, "llama", export_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_architecture_without_the_interface_takes_no_checkpoint(build, export, unchanged):
    path = export(quantized(build(), config_of(FP8)))
    model = build()
    for layer in model.model.layers:
        del layer.self_attn.config
    with unchanged(model), pytest.raises(ValueError, match="not use the attention interface"):
        ModelImporter(path, "safetensors").import_model_info(model)
