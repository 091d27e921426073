"""What was imported and is exported again is the same checkpoint, word by word and bit by bit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quark.torch import ModelExporter, ModelImporter
from quark.torch.export import JsonExporterConfig
from quark.torch.quantization.config.config import (
    AWQConfig,
    Config,
    FP8E4M3PerTensorSpec,
    QuantizationConfig,
    RotationConfig,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.presets import scheme

FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()
CACHE = QuantizationConfig(output_tensors=FP8)
KEYS, VALUES = "*.k_proj", "*.v_proj"


def of(name, exclude=("lm_head",), **rest):
    return Config(scheme(name, 32), exclude=list(exclude), **rest)


CACHED = {"kv_cache_quant_config": {KEYS: CACHE, VALUES: CACHE}}
# Name -> configuration, options of the export.
CASES = {
    "int8": (of("int8"), {}),
    "int4 in order": (of("int4_wo_32"), {"pack_method": "order"}),
    "values": (of("uint4_wo_32"), {"weight_format": "fake_quantized"}),
    "mxfp4": (of("mxfp4"), {}),
    "mx9": (of("mx9"), {}),
    "two levels": (of("nvfp4"), {}),
    "cache": (of("fp8", **CACHED), {}),
    "cache of one group": (of("fp8", **CACHED, kv_cache_group=["*self_attn.[kv]_proj"]), {}),
    "cache with a floor": (of("fp8", **CACHED, min_kv_scale=0.25), {}),
    "cache by the exporter": (
        of("fp8", **CACHED),
        {"kv_cache_group": ["*self_attn.[kv]_proj"], "min_kv_scale": 0.5},
    ),
    "cache after rotary embedding": (of("fp8", **CACHED, kv_cache_post_rope=True), {}),
    "cache of layers in float": (of("fp8", exclude=["lm_head", KEYS], **CACHED), {}),
    "rotation": (of("int8", algo_config=[RotationConfig(r1=False, r4=True)]), {}),
    "rotated keys": (
        of("fp8", algo_config=[RotationConfig(r3=True)], **CACHED, kv_cache_post_rope=True),
        {},
    ),
    "several algorithms": (
        of("int8", algo_config=[SmoothQuantConfig(alpha=0.4), AWQConfig()]),
        {},
    ),
    "mixed": (
        of("int4_wo_32", layer_quant_config={"*down*": scheme("fp8", 32), "*1.*": scheme("int8")}),
        {},
    ),
    "mixed by order": (
        of("fp8", layer_quant_config={"*up_proj": scheme("int8"), "*": scheme("int8_wo")}),
        {},
    ),
    "excluded": (of("int8", exclude=["lm_head", "*.0.*", "*o_proj", "nothing"]), {}),
    "by type": (
        of("int8_wo", layer_type_quant_config={torch.nn.Embedding: scheme("int8_wo")}),
        {},
    ),
    "merged scales": (
        of("fp8"),
        {"weight_merge_groups": [["*q_proj", "*k_proj", "*v_proj"], ["*gate_proj", "*up_proj"]]},
    ),
}


def by_importer(path, build):
    return ModelImporter(path, "safetensors").import_model_info(build(device="meta"))


def by_transformers(path, build):
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto")


@pytest.mark.parametrize("read", [by_importer, by_transformers])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(6)
def test_configuration_and_tensors(build, quantize, tmp_path, case, read):
    config, options = CASES[case]
    model = quantize(build(), config)
    lasting = {n: v for n, v in options.items() if n in ("pack_method", "weight_format")}
    described, stored = [], []
    for name, given in (("one", options), ("two", lasting), ("three", lasting)):
        path = tmp_path / name
        ModelExporter(JsonExporterConfig(**given), path).export_safetensors_model(model)
        described.append(json.loads((path / "config.json").read_text())["quantization_config"])
        stored.append(load_file(path / "model.safetensors"))
        model = read(path, build)
    assert described[1:] == [described[0]] * 2
    for again in stored[1:]:
        assert again.keys() == stored[0].keys()
        assert all(tensor.equal(again[name]) for name, tensor in stored[0].items())
