"""Queries, keys and values that compressed-tensors quantizes: groups for attention modules."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import LLMTemplate, ModelImporter
from quark.torch.export.formats.compressed_tensors import CompressedTensorsFormat
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import kv_cache_scheme, scheme
from quark.torch.quantization.nn.attention import attention_routes

CT = "compressed-tensors"
SCHEMES = {  # attention_scheme -> type, bits and strategy
    "qkv_fp8": ("float", 8, "tensor"),
    "qkv_fp8_per_head": ("float", 8, "attn_head"),
    "qkv_int8_per_head": ("int", 8, "attn_head"),
    "qkv_int4_per_head": ("int", 4, "attn_head"),
    "qkv_fp4_per_head": ("float", 4, "attn_head"),
}
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(4))
HEAD = {"type": "float", "num_bits": 8, "strategy": "attn_head"}
ATTENTION = "LlamaAttention", r"re:.*self_attn$", "model.layers.0.self_attn"
INT4 = {
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "targets": ["Linear"],
    "format": "pack-quantized",
}


def attended(name="qkv_fp8", weights="int4_wo_32", **rest):
    """Queries, keys and values by one scheme, weights by another or in float."""
    layer = QuantizationConfig() if weights is None else scheme(weights, 32)
    config = LLMTemplate.get("llama").get_config("int8_wo", attention_scheme=name)
    config = replace(config, global_quant_config=layer, layer_quant_config={}, float_parts=[])
    return replace(config, exclude=["lm_head"], **rest)


@torch.no_grad()
def logits_of(model):
    return model(IDS).logits


def section_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def rewritten(path, change):
    """Change the section of config.json in place."""
    data = json.loads((path / "config.json").read_text())
    change(data["quantization_config"])
    (path / "config.json").write_text(json.dumps(data))


def read(path, build, device="cpu"):
    return ModelImporter(path, "safetensors").import_model_info(build(device=device))


@pytest.mark.parametrize("weights", ["int4_wo_32", "int8", None])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.sampled(2, covers=True)
def test_a_model_comes_back_bit_by_bit(name, weights, build, quantize, export):
    model = quantize(build(), attended(name, weights))
    path = export(model, custom_mode=CT)
    for device in ("cpu", "meta"):
        back = read(path, build, device)
        assert torch.equal(logits_of(back), logits_of(model))
        assert all(route.projection and route.queries for route in attention_routes(back))
    again = export(back, custom_mode=CT)
    for file in ("model.safetensors", "config.json"):
        assert (again / file).read_bytes() == (path / file).read_bytes()
    own = export(back)
    assert torch.equal(logits_of(read(own, build)), logits_of(model))


@pytest.mark.parametrize(("name", "kind"), SCHEMES.items())
def test_what_is_written(name, kind, build, quantize, export):
    path = export(quantize(build(), attended(name)), custom_mode=CT)
    section, tensors = section_of(path), load_file(path / "model.safetensors")
    weights, attention = section["config_groups"].values()
    assert weights["targets"] == ["Linear"] and weights["weights"]["num_bits"] == 4
    assert attention["targets"] == ["LlamaAttention"]  # vLLM knows it by this name
    assert attention["weights"] is attention["output_activations"] is None
    args = attention["input_activations"]
    assert (args["type"], args["num_bits"], args["strategy"]) == kind
    assert args["symmetric"] is True and args["dynamic"] is False
    assert section["kv_cache_scheme"] == args
    for letter, heads in zip("qkv", (4, 2, 2), strict=True):
        scale = tensors[f"model.layers.1.self_attn.{letter}_scale"]
        assert scale.shape == ((1,) if kind[2] == "tensor" else (heads, 1, 1))


def test_weights_in_float(build, quantize, export):
    path = export(quantize(build(), attended(weights=None)), custom_mode=CT)
    section = section_of(path)
    assert section["format"] == "dense" and list(section["config_groups"]) == ["group_0"]
    assert len(section["ignore"]) == 15  # all linear layers
    weight = load_file(path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(weight, build().model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize(
    "targets", [[f"model.layers.{i}.self_attn" for i in (0, 1)], [ATTENTION[1]]]
)
@pytest.mark.parametrize("top", ["dense", "pack-quantized", "mixed-precision"])
def test_other_targets(targets, top, build, quantize, export):
    """As llm-compressor writes them, without a format of their own."""
    model = quantize(build(), attended("qkv_fp8_per_head"))
    path = export(model, custom_mode=CT)

    def change(section):
        section["config_groups"]["group_1"] = {"targets": targets, "input_activations": HEAD}
        section["format"] = top
        del section["kv_cache_scheme"]

    rewritten(path, change)
    assert torch.equal(logits_of(read(path, build)), logits_of(model))


def test_ignored_attention(build, quantize, export):
    """An attention module that is ignored keeps the cache of ``kv_cache_scheme`` alone."""
    model = quantize(build(), attended())
    path = export(model, custom_mode=CT)
    name = "model.layers.1.self_attn"

    rewritten(path, lambda section: section["ignore"].append(name))
    tensors = load_file(path / "model.safetensors")
    del tensors[f"{name}.q_scale"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    back = read(path, build)
    assert [(r.projection, r.queries) for r in attention_routes(back)] == [
        ("k_proj", "q_proj"),
        ("k_proj", None),
    ]
    queries = model.get_submodule(name).q_proj
    queries.output_quantizer.enabled = False
    assert torch.equal(logits_of(back), logits_of(model))
    with pytest.raises(ValueError, match=r"of all attention modules or of none, and those of .*1"):
        export(back, custom_mode=CT)


def test_a_full_name_comes_before_a_class():
    """So compressed-tensors looks for the scheme of a module."""
    int8 = HEAD | {"type": "int"}
    groups = {
        "a": {"targets": [ATTENTION[0]], "input_activations": HEAD},
        "b": {"targets": [ATTENTION[2]], "input_activations": int8},
    }
    config = CompressedTensorsFormat.parse_section({"config_groups": groups | {"c": INT4}})
    for entries in (config.query_quant_config, config.kv_cache_quant_config):
        first, last = (list(entries.values())[i].output_tensors.dtype.value for i in (0, -1))
        assert (first.name, last.name) == ("int8", "fp8_e4m3")


def test_scales_that_are_missing(build, quantize, export):
    path = export(quantize(build(), attended()), custom_mode=CT)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_scale"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.output_quantizer\.scale"):
        read(path, build)


def test_targets_that_the_model_does_not_have(build, quantize, export):
    path = export(quantize(build(), attended()), custom_mode=CT)
    targets = ["model.layers.0.self_attn", "model.layers.7.self_attn"]
    rewritten(path, lambda section: section["config_groups"]["group_1"].update(targets=targets))
    with pytest.raises(ValueError, match=r"no layer of the model matches .*layers\.7\.self_attn"):
        read(path, build)


@pytest.mark.parametrize("target", ATTENTION)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"symmetric": False}, "input_activations of attention=.* is not supported, only static"),
        ({"dynamic": True}, "input_activations of attention=.* is not supported, only static"),
        ({"strategy": "token"}, "input_activations of attention=.* is not supported, only static"),
        ({"num_bits": 6}, "input_activations of attention=.* is not supported, only static"),
    ],
)
def test_schemes_that_are_not_read(target, change, said):
    groups = {"a": {"targets": [target], "input_activations": HEAD | change}, "b": INT4}
    with pytest.raises(ValueError, match=said):
        CompressedTensorsFormat.parse_section({"config_groups": groups})


@pytest.mark.parametrize(
    "group",
    [
        {"targets": ["Linear"], "input_activations": HEAD},
        {"targets": ["re:.*self_attn"], "input_activations": HEAD},  # its layers match too
        {"targets": ["LlamaAttention"]},
        {"targets": ["LlamaAttention"], "input_activations": HEAD, "output_activations": HEAD},
    ],
    ids=["inputs of layers", "layers inside", "nothing", "outputs"],
)
def test_groups_that_are_not_attention(group):
    with pytest.raises(ValueError, match=r"quantizes no weights, and is not one of attention"):
        CompressedTensorsFormat.parse_section({"config_groups": {"a": group, "b": INT4}})


FP8 = QuantizationConfig(output_tensors=kv_cache_scheme("fp8"))
DYNAMIC = QuantizationConfig(output_tensors=kv_cache_scheme("fp8_dynamic"))
ON_QUERIES = LLMTemplate.get("llama").get_config(
    "int8_wo", attention_scheme="fp8", kv_cache_scheme="fp8"
)
REFUSED = {
    "probabilities": (ON_QUERIES, "cannot tell that probabilities of attention are quantized"),
    "before rotary embedding": (
        replace(ON_QUERIES, softmax_quant_spec=None),
        "q_proj and 1 more: its output is quantized",
    ),
    "dynamic": (attended(query_quant_config={"*q_proj": DYNAMIC}), "its output is quantized"),
    "queries alone": (
        Config(scheme("int8_wo"), exclude=["lm_head"], query_quant_config={"*q_proj": FP8}),
        "has one scheme for queries, keys and values, but the queries of .* k_proj is None",
    ),
    "other keys": (
        attended("qkv_int8_per_head", query_quant_config={"*q_proj": FP8}),
        "has one scheme for queries, keys and values, but the queries of .* k_proj is",
    ),
    "keys before it": (
        attended(kv_cache_post_rope=False),
        "has queries, keys and values after rotary embedding: quantize with kv_cache_post_rope",
    ),
}


@pytest.mark.parametrize(("configuration", "said"), REFUSED.values(), ids=REFUSED)
def test_attention_that_cannot_be_written(configuration, said, build, quantize, export):
    model = quantize(build(), configuration)
    with pytest.raises(ValueError, match=said):
        export(model, custom_mode=CT)


@pytest.mark.parametrize("mode", ["fp8", "modelopt", "awq"])
def test_other_layouts_have_no_queries(mode, build, quantize, export):
    weights = "int4_wo_32" if mode == "awq" else "fp8"
    model = quantize(build(), attended(weights=weights))
    with pytest.raises(ValueError, match="its output is quantized"):
        export(model, custom_mode=mode)
