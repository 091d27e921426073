"""Scales per head of a key-value cache in checkpoints."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import ModelImporter
from quark.torch.export.formats.compressed_tensors import CompressedTensorsFormat
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.config.presets import scheme

CT = "compressed-tensors"
STATIC = ("fp8_per_head", "int8_per_head", "int4_per_head", "fp4_per_head")
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(4))


def cached(*names, post_rope=True):
    """Quantize keys and values by one scheme, or by a scheme each."""
    config = Config(scheme("int4_wo_32", 32), exclude=["lm_head"])
    for pattern, name in zip(("*k_proj", "*v_proj"), (names * 2)[:2], strict=True):
        before = config.kv_cache_quant_config
        config = with_kv_cache(config, [pattern], name, post_rope=post_rope)
        cache = {**before, **config.kv_cache_quant_config}
        config = replace(config, kv_cache_quant_config=cache, kv_cache_group=[])
    return config


@torch.no_grad()
def logits_of(model):
    return model(IDS).logits


@pytest.mark.parametrize("mode", ["quark", CT])
@pytest.mark.parametrize("name", STATIC)
@pytest.mark.sampled(2, covers=True)
def test_a_model_comes_back_bit_by_bit(name, mode, build, quantize, export):
    model = quantize(build(), cached(name))
    path = export(model, custom_mode=mode)
    for device in ("cpu", "meta"):
        read = ModelImporter(path, "safetensors").import_model_info(build(device=device))
        assert torch.equal(logits_of(read), logits_of(model))
    again = export(read, custom_mode=mode)
    for file in ("model.safetensors", "config.json"):
        assert (again / file).read_bytes() == (path / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "kind"),
    list(zip(STATIC, [("float", 8), ("int", 8), ("int", 4), ("float", 4)], strict=True)),
)
def test_compressed_tensors_has_a_strategy_for_it(name, kind, build, quantize, export):
    model = quantize(build(), cached(name))
    path = export(model, custom_mode=CT)
    tensors = load_file(path / "model.safetensors")
    attention = model.model.layers[1].self_attn
    for letter in "kv":
        scale = attention.get_submodule(f"{letter}_proj").output_quantizer.scale
        stored = tensors[f"model.layers.1.self_attn.{letter}_scale"]
        assert stored.shape == (2, 1, 1) and torch.equal(stored.flatten(), scale)
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    cache = section["kv_cache_scheme"]
    assert cache["strategy"] == "attn_head" and (cache["type"], cache["num_bits"]) == kind
    assert cache["symmetric"] is True and cache["dynamic"] is False


@pytest.mark.parametrize(
    ("mode", "configuration", "said"),
    [
        (CT, cached("int8_per_head", post_rope=False), "keys after rotary embedding: quantize"),
        (CT, cached("int8_per_head", "fp8_per_head"), "one scheme for all keys and values"),
        (CT, cached("int8_per_token_head"), "its output is quantized"),
        (CT, cached("int8_per_tensor_static"), "its output is quantized"),
        ("fp8", cached("fp8_per_head"), "its output is quantized"),
        ("modelopt", cached("fp8_per_head"), "its output is quantized"),
    ],
)
def test_caches_that_a_format_cannot_hold(mode, configuration, said, build, quantize, export):
    model = quantize(build(), configuration)
    with pytest.raises(ValueError, match=said):
        export(model, custom_mode=mode)


FP8_PER_HEAD = {"type": "float", "num_bits": 8, "strategy": "attn_head"}


@pytest.mark.parametrize(
    "cache",
    [
        FP8_PER_HEAD | {"symmetric": False},
        FP8_PER_HEAD | {"dynamic": True},
        FP8_PER_HEAD | {"num_bits": 6},
        FP8_PER_HEAD | {"strategy": ["attn_head"]},
        {"type": "int", "num_bits": 8, "strategy": "tensor"},
        "fp8",
    ],
)
def test_caches_that_are_not_read(cache):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {"weights": weights, "targets": ["Linear"], "format": "pack-quantized"}
    section = {"config_groups": {"group_0": group}, "kv_cache_scheme": cache}
    with pytest.raises(ValueError, match=r"kv_cache_scheme=.* is not supported, only static fp8"):
        CompressedTensorsFormat.parse_section(section)
    section["kv_cache_scheme"] = FP8_PER_HEAD
    config = CompressedTensorsFormat.parse_section(section)
    assert config.kv_cache_post_rope
    assert config.kv_cache_quant_config["*k_proj"].output_tensors.group_size is None


@pytest.mark.parametrize("top", [None, "dense", "pack-quantized", "mixed-precision"])
@pytest.mark.parametrize("target", ["LlamaAttention", "re:.*self_attn$"])
def test_quantized_queries_are_not_read(target, top):
    """Attention as compressed-tensors quantizes it: a group of inputs, without weights."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {"weights": weights, "targets": ["Linear"], "format": "pack-quantized"}
    attention = {"input_activations": FP8_PER_HEAD, "targets": [target]}
    section = {"config_groups": {"group_0": group, "group_1": attention}, "format": top}
    section["kv_cache_scheme"] = FP8_PER_HEAD
    with pytest.raises(ValueError, match=r"as attention does for its queries.*kv_cache_scheme"):
        CompressedTensorsFormat.parse_section(section)
    del section["config_groups"]["group_1"]
    assert CompressedTensorsFormat.parse_section(section).kv_cache_post_rope
