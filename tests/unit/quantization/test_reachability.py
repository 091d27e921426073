"""Layers that the data does not reach, for want of images, stay in float."""

import logging

import pytest
import torch

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.preparation import quantized_layers
from tests.models.vision_language import build, images, text


def quantize(name, scheme, data, **options):
    """The model, and the names of its quantized layers."""
    model = build(name)
    config = LLMTemplate.get(name).get_config(scheme, float_parts=[], **options)
    ModelQuantizer(config).quantize_model(model, data)
    return model, {name for name, _ in quantized_layers(model)}


@pytest.mark.parametrize(
    ("scheme", "options"), [("fp8", {}), ("int4_wo_32", {"algorithm": "gptq"})], ids=["fp8", "gptq"]
)
def test_text_alone_leaves_the_tower_in_float(scheme, options, caplog):
    before = build("llava")
    model, names = quantize("llava", scheme, [text()], **options)
    assert names
    assert all(name.startswith("model.language_model.") for name in names)
    assert "data does not reach the vision tower" in caplog.text
    with torch.no_grad():
        towers = [m.model.vision_tower(images("llava")["pixel_values"]) for m in (before, model)]
    assert torch.equal(towers[0].last_hidden_state, towers[1].last_hidden_state)
    patterns = model.quant_config.exclude
    assert "model.multi_modal_projector.linear_1" in patterns


@pytest.mark.parametrize(
    "data",
    [[images("llava")], [text(), images("llava")], iter([text(), images("llava")])],
    ids=["images", "both", "an iterator"],
)
def test_images_reach_the_tower(data, caplog):
    caplog.set_level(logging.WARNING)
    _, names = quantize("llava", "fp8", data)
    assert {name.split(".")[1] for name in names} == {
        "language_model",
        "vision_tower",
        "multi_modal_projector",
    }
    assert "stay in float" not in caplog.text


def test_blocks_that_attend_to_images(caplog):
    """Cross-attention is a block of the language model, and runs with images only."""
    _, with_images = quantize("mllama", "fp8", [images("mllama")], kv_cache_scheme="fp8")
    model, names = quantize("mllama", "fp8", [text()], kv_cache_scheme="fp8")
    idle = with_images - names
    assert "model.language_model.layers.1.cross_attn.k_proj" in idle
    blocks = {name[: name.index(".", len("model.language_model.layers."))] for name in names}
    assert blocks == {f"model.language_model.layers.{n}" for n in (0, 2)}
    assert "model.language_model.layers.0.self_attn.k_proj" in model.quant_config.layer_quant_config
    assert "stay in float" in caplog.text


def test_without_data_every_layer_is_quantized():
    _, names = quantize("llava", "int4_wo_32", None)
    assert any("vision_tower" in name for name in names)


def test_layers_of_a_reached_part_still_need_data(unchanged):
    model = build("llava")
    model.model.vision_tower.unused = torch.nn.Linear(64, 64)
    model(**images("llava"))  # Transformers adds attributes to models that run first
    config = LLMTemplate.get("llava").get_config("fp8", float_parts=[])
    expected = r"No data reached model\.vision_tower\.unused"
    with unchanged(model), pytest.raises(ValueError, match=expected):
        ModelQuantizer(config).quantize_model(model, [images("llava")])
