"""Checkpoints in the layout of ModelOpt."""

import json

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import ModelExporter, ModelImporter
from quark.torch.export.conversion import convert
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from tests.configurations import config, groups, preset, spec

LAYER = "model.layers.0.self_attn.k_proj"
FP8 = spec("fp8_e4m3")
CACHE = QuantizationConfig(output_tensors=FP8)
WITH_CACHE = {"kv_cache_quant_config": {"*k_proj": CACHE, "*v_proj": CACHE}}


@pytest.fixture
def made(build, quantize, export):
    def made(name, **rest):
        model = quantize(build(), preset(name, **rest))
        return model, export(model, custom_mode="modelopt")

    return made


OTHER, MAIN = "hf_quant_config.json", "config.json"


def set_other(**values):
    return OTHER, lambda data: data["quantization"].update(values)


def set_main(**values):
    return MAIN, lambda data: data["quantization_config"].update(values)


def change(path, name, edit):
    described = json.loads((path / name).read_text())
    edit(described)
    (path / name).write_text(json.dumps(described))


def test_tensors(made):
    model, path = made("nvfp4")
    tensors = load_file(path / "model.safetensors")
    stored = {name.removeprefix(f"{LAYER}."): tensor for name, tensor in tensors.items()}
    described = {n: (stored[n].dtype, tuple(stored[n].shape)) for n in stored if "." not in n}
    assert described == {
        "weight": (torch.uint8, (32, 32)),
        "weight_scale": (torch.float8_e4m3fn, (32, 4)),
        "weight_scale_2": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    }
    layer = model.get_submodule(LAYER)
    assert stored["input_scale"].equal(layer.input_quantizer.scale_2)


def test_settings(made):
    _, path = made("nvfp4")
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"weights": args, "input_activations": args, "targets": ["Linear"]}
    assert section["config_groups"] == {"group_0": group}
    assert (section["quant_method"], section["quant_algo"]) == ("modelopt", "NVFP4")
    other = json.loads((path / "hf_quant_config.json").read_text())
    assert other["quantization"] == {
        "exclude_modules": ["lm_head"],
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "quant_algo": "NVFP4",
    }


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_settings_in_the_other_file_alone(made, build, logits, name):
    model, path = made(name, **WITH_CACHE)
    assert f"{LAYER}.k_scale" in load_file(path / "model.safetensors")
    change(path, "config.json", lambda c: c.pop("quantization_config"))
    loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
    assert logits(loaded).equal(logits(model))


def test_a_conversion_does_not_copy_the_other_file(made, tmp_path):
    _, path = made("fp8")
    convert(path, tmp_path / "out", "fp8")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    convert(tmp_path / "out", tmp_path / "back", "modelopt")
    assert (tmp_path / "back" / "hf_quant_config.json").is_file()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ((OTHER, lambda data: data.update(quantization=[])), "expected an object"),
        (set_other(quant_algo="FP8"), "has quant_algo="),
        (set_other(exclude_modules=[]), "has ignore="),
        (set_main(quant_algo="W4A8_AWQ"), "quant_algo="),
        (set_main(group_size=32), "group_size=32"),
        (set_main(kv_cache_scheme="NVFP4"), "kv_cache_scheme='NVFP4' is not supported"),
        (set_main(ignore="lm_head"), "ignore=|not a list"),
    ],
)
def test_settings_that_are_not_read(made, build, where, said):
    _, path = made("nvfp4")
    change(path, *where)
    with pytest.raises(ValueError, match=said):
        ModelImporter(path, "safetensors").import_model_info(build(device="meta"))


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        (config(groups("int4")), "its weight is int4 per_group"),
        (preset("fp8", layer_quant_config={"*down_proj": scheme("int8")}), "its weight is int8"),
        (config(FP8, spec("fp8_e4m3", is_dynamic=True)), "its input is fp8_e4m3 per_tensor"),
    ],
)
def test_what_it_cannot_hold(build, quantize, tmp_path, configuration, said):
    model = quantize(build(), configuration)
    with pytest.raises(ValueError, match=said):
        ModelExporter(tmp_path / "out").export_safetensors_model(model, custom_mode="modelopt")
    assert not (tmp_path / "out").exists()


MIXED = {"*down_proj": scheme("mxfp8"), "*o_proj": scheme("nvfp4_weight_only")}


def test_settings_of_several_schemes(made):
    """Each layer is listed with its scheme, as ModelOpt does."""
    _, path = made("nvfp4", layer_quant_config=MIXED)
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    layers = section["quantized_layers"]
    assert section["quant_algo"] == "MIXED_PRECISION" and len(layers) == 2 * 7
    assert layers["model.layers.1.mlp.down_proj"] == {"quant_algo": "MXFP8", "group_size": 32}
    assert layers[LAYER] == {"quant_algo": "NVFP4", "group_size": 16}
    targets = {g["weights"]["num_bits"]: g["targets"] for g in section["config_groups"].values()}
    assert targets[8] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    other = json.loads((path / "hf_quant_config.json").read_text())
    assert other["quantization"] == {
        "exclude_modules": ["lm_head"],
        "kv_cache_quant_algo": None,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }


@pytest.mark.parametrize("removed", [None, OTHER, MAIN])
def test_several_schemes_come_back(made, build, logits, removed):
    """By both files and by each of them alone."""
    model, path = made("fp8", layer_quant_config=MIXED | {"*q_proj": scheme("nvfp4")}, **WITH_CACHE)
    if removed == MAIN:
        change(path, MAIN, lambda c: c.pop("quantization_config"))
    elif removed:
        (path / OTHER).unlink()
    loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
    assert logits(loaded).equal(logits(model))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (None, "needs quantized_layers"),
        ({}, "needs quantized_layers"),
        ({LAYER: "FP8"}, "needs quantized_layers"),
        ({LAYER: {"quant_algo": "W4A8_AWQ"}}, "quant_algo='W4A8_AWQ' is not supported"),
        ({LAYER: {"quant_algo": "NVFP4", "group_size": 32}}, "group_size=32 is not supported"),
        ({LAYER: {"quant_algo": ["FP8"]}}, "is not supported"),
    ],
)
def test_layers_that_are_not_read(made, build, layers, said):
    _, path = made("nvfp4")
    (path / OTHER).unlink()
    change(path, *set_main(quant_algo="MIXED_PRECISION", quantized_layers=layers))
    with pytest.raises(ValueError, match=said):
        ModelImporter(path, "safetensors").import_model_info(build(device="meta"))


def test_names_that_vllm_would_confuse(build, quantize, export):
    model = quantize(build(), preset("nvfp4"))
    model.model.layers[0].mlp.gate = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"mlp\.gate, in float, is part of .*mlp\.gate_proj"):
        export(model, custom_mode="modelopt")
