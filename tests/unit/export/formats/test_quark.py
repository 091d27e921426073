"""The section of Quark's own format, as other software reads it."""

import json

import pytest

from quark.torch import ModelImporter
from tests.configurations import config, spec


@pytest.fixture
def written(build, quantize, export):
    """The files of a model with weights and inputs like this, and the model."""

    def written(weight, inputs=None, **rest):
        model = quantize(build(num_hidden_layers=1), config(weight, inputs, **rest))
        return model, export(model)

    return written


def layers_of(path):
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    return section["global_quant_config"], section["layer_quant_config"]


def test_blocks_are_called_symmetric(written, build, export, logits):
    """vLLM reads fp8 in blocks if weights and inputs say so."""
    blocks = spec("fp8_e4m3", "per_block", block_size=(32, 32))
    inputs = spec("fp8_e4m3", "per_group", ch_axis=-1, group_size=32, is_dynamic=True)
    model, path = written(blocks, inputs)
    layer, _ = layers_of(path)
    weight = {key: layer["weight"][key] for key in ("qscheme", "block_size", "symmetric")}
    assert weight == {"qscheme": "per_block", "block_size": [32, 32], "symmetric": True}
    assert layer["input_tensors"]["symmetric"] is True
    loaded = ModelImporter(path).import_model_info(build(num_hidden_layers=1))
    assert logits(loaded).equal(logits(model))
    assert (export(loaded) / "config.json").read_bytes() == (path / "config.json").read_bytes()


def test_other_specifications_stay_as_they_are(written):
    """Neither integers in blocks nor floats per tensor get another value."""
    integers = spec("int8", "per_block", symmetric=False, block_size=(32, 32))
    _, path = written(
        integers, layer_quant_config={"*down_proj": config(spec("fp8_e4m3")).global_quant_config}
    )
    layer, others = layers_of(path)
    assert layer["weight"]["symmetric"] is False
    assert [other["weight"]["symmetric"] for other in others.values()] == [None]
