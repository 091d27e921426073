"""Checkpoints for compressed-tensors, opened and computed by compressed-tensors itself."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import LLMTemplate, ModelImporter
from quark.torch.quantization.config.algo import (
    GPTQConfig,
    OnlineRotationConfig,
    RotationConfig,
    SparseGPTConfig,
)
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from tests.configurations import config, groups, preset
from tests.interop.test_other_tools import load  # noqa: F401 - a fixture

pytestmark = pytest.mark.client("compressed_tensors")
CT = "compressed-tensors"
INT8 = preset("int8").global_quant_config
MIXED = {"*down_proj": INT8, "*q_proj": preset("mxfp8").global_quant_config}
WEIGHTS = {
    **{f"int{bits}": config(groups(f"int{bits}")) for bits in range(2, 9)},
    **{f"int{bits} per channel": config(groups(f"int{bits}", size=None)) for bits in (5, 7)},
    "signed": config(groups("int4", signed_scales=True)),
    "W4A8": preset("w_int4_per_group_a_int8_per_token_dynamic"),
    "W4AFP8": preset("w_int4_per_group_a_fp8_per_token_dynamic"),
    "MXFP4": preset("mxfp4"),
    "MXFP6": preset("mxfp6_e2m3"),
    "MXFP8": preset("mxfp8"),
    "MXFP4 with MXFP8 inputs": preset("w_mxfp4_a_mxfp8"),
    "several": preset("int4_wo_32", layer_quant_config=MIXED),
}


def decompressed(path):
    """Weights of a checkpoint by the compressors of compressed-tensors, by layer."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    section = json.loads((path / "config.json").read_text())["quantization_config"]
    tensors = load_file(path / "model.safetensors")
    layers = {n.rpartition(".")[0] for n in tensors if n.endswith(".weight_scale")}
    weights = {}
    for scheme in QuantizationConfig(**section).config_groups.values():
        names = layers if scheme.targets == ["Linear"] else scheme.targets
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        for name in names:
            parts = {k.removeprefix(f"{name}."): t for k, t in tensors.items() if name in k}
            weights[name] = compressor.decompress(parts, scheme)["weight"]
    return weights


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(build, quantize, export, case):
    model = quantize(build(), WEIGHTS[case])
    weights = decompressed(export(model, custom_mode=CT))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantizedLayer)}
    assert weights.keys() == layers.keys() and len(layers) == 14
    for name, layer in layers.items():
        assert weights[name].float().equal(layer.weight), name


@pytest.mark.parametrize("case", ["int4", "int8 in words", "fp8", "MXFP4"])
def test_two_of_four_weights(build, quantize, export, case):
    """Zeros of pruning are zeros in their codes too, and come back as they were."""
    layers = {
        "int8 in words": config(groups("int8")),
        "fp8": preset("fp8"),
        **{name: WEIGHTS[name] for name in ("int4", "MXFP4")},
    }[case]
    model = quantize(build(), replace(layers, algo_config=[SparseGPTConfig(), GPTQConfig()]))
    path = export(model, custom_mode=CT)
    weights = decompressed(path)
    back = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
    for name, weight in weights.items():
        assert weight.float().equal(model.get_submodule(name).weight), name
        stored = back.get_submodule(name).quantized_tensor("weight").value(torch.float32)
        assert stored.equal(weight.float()), name
        kept = (weight.float() != 0).unflatten(-1, (-1, 4)).sum(-1)
        assert kept.max() <= 2 and kept.float().mean() > 1, name
    assert len(weights) == 14


@pytest.mark.parametrize("case", ["int5", "int6", "int7", "MXFP6"])
def test_same_outputs(build, quantize, export, load, logits, case):  # noqa: F811
    """Weights in blocks with exponents become bfloat16 there."""
    dtype = torch.bfloat16 if case.startswith("MX") else torch.float32
    model = quantize(build(dtype=dtype), WEIGHTS[case])
    assert logits(load(export(model, custom_mode=CT))).equal(logits(model))


@pytest.mark.parametrize("case", ["W4A8", "MXFP8", "several"])
def test_close_outputs(build, quantize, export, load, logits, case):  # noqa: F811
    """Inputs are rounded by other rules: ties at the largest value, exponents of MXFP8."""
    model = quantize(build(dtype=torch.bfloat16), WEIGHTS[case])
    theirs, ours = (logits(m).float() for m in (load(export(model, custom_mode=CT)), model))
    assert (theirs - ours).abs().median() < 0.05 * ours.std()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [64, 20])
def test_words(bits, count):
    """Their words are ours, for codes at both ends of the range too."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    from quark.torch.export.formats.layouts.dense_words import pack_words

    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (7, count), dtype=torch.int8)
    codes[0, :2] = torch.tensor([-half, half - 1])
    assert pack_to_int32(codes, bits).equal(pack_words((codes + half).to(torch.uint8), bits))


@pytest.mark.parametrize("case", ["W4A8", "MXFP6", "MXFP8", "several"])
def test_what_they_write(build, quantize, export, load, logits, tmp_path, case):  # noqa: F811
    """Their own ``save_pretrained`` of such a model is read here."""
    model = quantize(build(), WEIGHTS[case])
    theirs = load(export(model, custom_mode=CT))
    theirs.save_pretrained(tmp_path / "theirs")
    back = ModelImporter(tmp_path / "theirs", "safetensors").import_model_info(build(device="meta"))
    assert logits(back).equal(logits(model))


def write_preset(model, name, path):
    """Quantize a model by a preset of compressed-tensors and let it write the checkpoint."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = {"group_0": preset_name_to_scheme(name, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            args, weight = layer.quantization_scheme.weights, layer.weight.data
            blocks = weight.unflatten(-1, (-1, args.group_size))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
            layer.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    compressor.decompress_model(model)
    model.float()  # MX weights become bfloat16, which has their values


@pytest.mark.parametrize("name", ["W4AFP8", "MXFP4XFP8"])
def test_presets_with_inputs_that_are_read_alone(build, tmp_path, name):
    """Weights are those of their compressor, and inputs are quantized as they do."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    theirs = build(**sizes)
    write_preset(theirs, name, tmp_path / "theirs")
    read = ModelImporter(tmp_path / "theirs", "safetensors").import_model_info(build(**sizes))
    layers = {n: m for n, m in theirs.named_modules() if hasattr(m, "quantization_scheme")}
    assert len(layers) == 14
    for path, layer in layers.items():
        own = read.get_submodule(path)
        assert own.quantized_tensor("weight").value(torch.float32).equal(layer.weight), path
        x = torch.randn(2, 3, layer.in_features)  # theirs are batches of tokens
        expected = layer(x)
        assert not expected.equal(x @ layer.weight.T)  # they quantize inputs too
        torch.testing.assert_close(own(x), expected, rtol=0, atol=1e-4)


ROTATED = RotationConfig(
    r2=True,
    rotation_size=32,
    online_config=OnlineRotationConfig(online_rotation_layers=["*_proj"]),
)


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("name", ["int4_wo_32", "w_int4_per_group_a_int8_per_token_dynamic"])
def test_rotations(build, quantize, export, logits, name, is_random):
    """Transformers loads codes and scales, compressed-tensors adds the transforms.

    Rotations of the residual stream and of values are in the weights.
    """
    from compressed_tensors.transform import TransformConfig, apply_transform_config
    from transformers import AutoModelForCausalLM

    options = replace(ROTATED, random_r1=is_random)
    model = quantize(build(), preset(name, options))
    path = export(model, custom_mode=CT)
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert (logits(loaded) - logits(model)).abs().median() > 0.1  # it ignores transforms
    apply_transform_config(loaded, TransformConfig(**section["transform_config"]))
    stored = {k: t for k, t in load_file(path / "model.safetensors").items() if "_input." in k}
    keys = loaded.load_state_dict(stored, strict=False)
    assert len(stored) == 14 and not keys.unexpected_keys
    difference = (logits(loaded) - logits(model)).abs()
    if name == "int4_wo_32":
        assert difference.max() < 1e-4
    assert difference.median() < 0.01 * logits(model).std()


@pytest.mark.parametrize("name", ["fp8_per_head", "int8_per_head", "int4_per_head", "fp4_per_head"])
def test_caches_per_head(build, quantize, export, name):
    """compressed-tensors quantizes keys after rotary embedding, and values, under our scales."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import DynamicCache

    cached = with_kv_cache(preset("int4_wo_32"), ["*k_proj", "*v_proj"], name, post_rope=True)
    model = quantize(build(), cached)
    path = export(model, custom_mode=CT)
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    plain = quantize(build(), preset("int4_wo_32"))
    expected = build()
    expected.load_state_dict(plain.state_dict(), strict=False)
    section["config_groups"] = {}
    apply_quantization_config(expected, QuantizationConfig(**section))
    tensors = load_file(path / "model.safetensors")
    scales = {k: t for k, t in tensors.items() if k.endswith((".k_scale", ".v_scale"))}
    assert not expected.load_state_dict(scales, strict=False).unexpected_keys and len(scales) == 4
    ids = torch.arange(3, 13).view(1, -1)
    with torch.no_grad():
        found = model(ids).logits
        cache = DynamicCache(config=expected.config)
        result = expected(ids, past_key_values=cache, use_cache=True).logits
        assert (plain(ids).logits - result).abs().max() > 1e-3
    torch.testing.assert_close(found, result, rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", ["int4_wo_32", "int8", "fp8", None])
@pytest.mark.parametrize(
    "name",
    ["qkv_fp8", "qkv_fp8_per_head", "qkv_int8_per_head", "qkv_int4_per_head", "qkv_fp4_per_head"],
)
@pytest.mark.sampled(3, covers=True)
def test_attention(build, quantize, export, load, logits, tmp_path, name, weights):  # noqa: F811
    """It quantizes queries, keys and values as we do, and what it writes is read here."""
    layer = QuantizationConfig() if weights is None else preset(weights).global_quant_config
    config = LLMTemplate.get("llama").get_config("int8_wo", attention_scheme=name)
    config = replace(config, global_quant_config=layer, layer_quant_config={})
    model = quantize(build(), replace(config, exclude=["lm_head"], float_parts=[]))
    theirs = load(export(model, custom_mode=CT))
    theirs.save_pretrained(tmp_path / "theirs")
    back = ModelImporter(tmp_path / "theirs", "safetensors").import_model_info(build(device="meta"))
    assert logits(back).equal(logits(model))
    assert theirs.config._attn_implementation == "ct_hooked_attention"
    plain = build() if weights is None else quantize(build(), preset(weights))
    assert (logits(plain) - logits(theirs)).abs().max() > 1e-3
    torch.testing.assert_close(logits(theirs), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8", "int8_per_tensor_static"])
def test_caches_with_one_scale(build, quantize, export, load, logits, name):  # noqa: F811
    cached = with_kv_cache(preset("int4_wo_32"), ["*k_proj", "*v_proj"], name, post_rope=True)
    model = quantize(build(), cached)
    theirs = load(export(model, custom_mode=CT))
    assert (logits(quantize(build(), preset("int4_wo_32"))) - logits(theirs)).abs().max() > 1e-3
    torch.testing.assert_close(logits(theirs), logits(model), rtol=0, atol=1e-4)


def test_a_cache_is_read_as_compressed_tensors_computes_it(
    build,
    quantize,
    export,
    load,  # noqa: F811
    logits,
):
    """Keys are quantized after rotary embedding there, whatever their scales were made of."""
    cached = with_kv_cache(preset("int4_wo_32"), ["*k_proj", "*v_proj"], "fp8")
    path = export(quantize(build(), cached), custom_mode=CT)
    back = ModelImporter(path, "safetensors").import_model_info(build())
    torch.testing.assert_close(logits(back), logits(load(path)), rtol=0, atol=1e-4)
