"""Static scales of a key-value cache in checkpoints, most of them per head."""

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
PER_HEAD = ("fp8_per_head", "int8_per_head", "int4_per_head", "fp4_per_head")
STATIC = ("fp8", "int8_per_tensor_static", *PER_HEAD)
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
    list(zip(PER_HEAD, [("float", 8), ("int", 8), ("int", 4), ("float", 4)], strict=True)),
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
        (CT, cached("int8_per_token"), "its output is quantized"),
        (CT, cached("int8_per_tensor_static", post_rope=False), "keys after rotary embedding"),
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
        {"type": "int", "num_bits": 8, "strategy": "token"},
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


def test_readers_quantize_keys_after_rotary_embedding(build, quantize, export, caplog):
    """Scales of keys before it are written with a warning, and read as compressed-tensors does."""
    before, after = (
        quantize(build(), cached("fp8", post_rope=post_rope)) for post_rope in (False, True)
    )
    path = export(before, custom_mode=CT)
    assert "quantize with kv_cache_post_rope=True" in caplog.text
    caplog.clear()
    assert export(after, custom_mode=CT) != path and "kv_cache_post_rope" not in caplog.text
    read = ModelImporter(path, "safetensors").import_model_info(build())
    scales = [
        m.model.layers[0].self_attn.k_proj.output_quantizer.scale.flatten()
        for m in (read, before, after)
    ]
    assert torch.equal(scales[0], scales[1]) and not torch.equal(*scales[1:])
    for one, other in zip(read.model.layers, after.model.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            mine, theirs = (layer.self_attn.get_submodule(name) for layer in (one, other))
            mine.output_quantizer.scale.copy_(theirs.output_quantizer.scale)
    assert torch.equal(logits_of(read), logits_of(after))
