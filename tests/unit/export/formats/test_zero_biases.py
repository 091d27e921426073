"""Biases of zeros, which AutoGPTQ stores for every layer that it quantizes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelImporter
from tests.configurations import config, groups

LAYER = "model.layers.1.mlp.up_proj"
INT4 = config(groups("int4"))


@pytest.fixture
def with_biases(build, quantize, export):
    """Add biases of zeros to a checkpoint, but for one value of one layer."""

    def write(value):
        path = export(quantize(build(), INT4), custom_mode="gptq")
        tensors = load_file(path / "model.safetensors")
        names = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
        assert len(names) == 14
        for name in names:
            tensors[f"{name}.bias"] = torch.zeros(tensors[f"{name}.qweight"].shape[1])
        tensors[f"{LAYER}.bias"][3] = value
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    return write


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_biases_of_zeros_are_left_out(device, with_biases, build, quantize, logits):
    read = ModelImporter(with_biases(0), "safetensors").import_model_info(build(device=device))
    assert read.get_submodule(LAYER).bias is None
    assert logits(read).equal(logits(quantize(build(), INT4)))


def test_other_biases_are_an_error(with_biases, build):
    path = with_biases(0.25)
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.bias.* unexpected"):
        ModelImporter(path, "safetensors").import_model_info(build())
