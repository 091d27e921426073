"""Inputs and outputs under settled scales per channel, there and back."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from quark.torch import ModelExporter, ModelImporter, ModelQuantizer
from quark.torch.export import JsonExporterConfig
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec

FORMATS = {
    "int8": ("int8", True),
    "int8 asymmetric": ("int8", False),
    "uint4 asymmetric": ("uint4", False),
    "int3": ("int3", True),
    "int16": ("int16", True),
    "fp8": ("fp8_e4m3", True),
}
LAYER = "model.layers.1.self_attn.k_proj"


def channels(name="int8", axis=-1):
    dtype, symmetric = FORMATS[name]
    return QuantizationSpec(
        dtype, qscheme="per_channel", ch_axis=axis, symmetric=symmetric, is_dynamic=False
    )


def config(spec, *tensors, **rest):
    weight = QuantizationSpec("int8", qscheme="per_channel", ch_axis=0, is_dynamic=False)
    layer = QuantizationConfig(weight=weight, **dict.fromkeys(tensors, spec))
    return Config(layer, exclude=["lm_head"], **rest)


@pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
@pytest.mark.parametrize("tensor", ["input_tensors", "output_tensors"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(6)
def test_what_is_imported_computes_what_was_exported(
    build, quantize, logits, export, name, tensor, weight_format
):
    model = quantize(build(), config(channels(name), tensor))
    path = export(model, weight_format=weight_format)
    loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
    assert not logits(model).equal(logits(quantize(build(), config(None))))
    assert logits(loaded).equal(logits(model))
    of_transformers = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert logits(of_transformers).equal(logits(model))
    again = export(loaded, weight_format=weight_format)
    one, two = (load_file(p / "model.safetensors") for p in (path, again))
    assert one.keys() == two.keys() and all(x.equal(two[n]) for n, x in one.items())


@pytest.mark.parametrize("axis", [-1, 2])
def test_stored_scales(build, quantize, export, batches, axis):
    """One for each output: the largest magnitude seen, shared out over the codes."""
    seen = []
    model = build()
    hook = model.get_submodule(LAYER).register_forward_hook(lambda *a: seen.append(a[2]))
    for batch in batches:
        model(batch)
    hook.remove()
    quantized = config(None)
    layer = QuantizationConfig(output_tensors=channels("int8", axis))
    quantized = Config(QuantizationConfig(), layer_quant_config={LAYER: layer})
    stored = load_file(export(quantize(model, quantized)) / "model.safetensors")
    largest = torch.cat([x.flatten(0, 1) for x in seen]).abs().amax(0)
    torch.testing.assert_close(stored[f"{LAYER}.output_scale"], largest / 127.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("post_rope", [False, True])
def test_the_cache(build, quantize, logits, export, post_rope):
    cache = QuantizationConfig(output_tensors=channels("int8 asymmetric"))
    layers = {"*k_proj": cache, "*v_proj": cache}
    model = quantize(
        build(), config(None, kv_cache_quant_config=layers, kv_cache_post_rope=post_rope)
    )
    path = export(model)
    loaded = ModelImporter(path, "safetensors").import_model_info(build(device="meta"))
    assert logits(loaded).equal(logits(model))


class Mixed(nn.Module):
    """Operators whose channels lie along several axes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.conv = nn.Conv1d(8, 12, 3, groups=2)
        self.plane = nn.Conv2d(1, 4, 3)
        self.wide = nn.ConvTranspose2d(4, 6, 3)
        self.out = nn.Linear(7, 5)

    def forward(self, ids):
        x = self.conv(self.embed(ids).transpose(1, 2))
        return self.out(self.wide(self.plane(x.unsqueeze(1))))


MIXED = {"embed": -1, "conv": 1, "plane": 1, "wide": -3, "out": -1}


@pytest.mark.parametrize("tensor", ["input_tensors", "output_tensors"])
def test_every_operator(tmp_path, tensor):
    layers = {
        name: QuantizationConfig(**{tensor: channels("uint4 asymmetric", axis)})
        for name, axis in MIXED.items()
        if (name, tensor) != ("embed", "input_tensors")
    }
    ids = torch.arange(18).reshape(2, 9) % 16
    torch.manual_seed(0)
    model = ModelQuantizer(Config(layer_quant_config=layers)).quantize_model(Mixed(), [ids])
    ModelExporter(tmp_path / "out").export_safetensors_model(ModelQuantizer.freeze(model))
    loaded = ModelImporter(tmp_path / "out", "safetensors").import_model_info(Mixed())
    with torch.no_grad():
        assert loaded(ids).equal(model(ids))
        torch.manual_seed(0)
        assert not loaded(ids).equal(Mixed()(ids))


def test_scales_of_places_instead_of_channels(build, quantize, tmp_path):
    """They fit inputs of one length alone."""
    data = [torch.arange(3, 13).unsqueeze(0)]
    model = quantize(build(), config(channels(axis=1), "output_tensors"), data)
    for options in ({}, {"weight_format": "fake_quantized"}):
        exporter = ModelExporter(JsonExporterConfig(**options), tmp_path / "out")
        with pytest.raises(ValueError, match="its output has 10 scales along ch_axis=1, but 64 ch"):
            exporter.export_safetensors_model(model)
    assert not (tmp_path / "out").exists()
