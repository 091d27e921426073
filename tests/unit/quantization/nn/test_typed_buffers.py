"""Quantized models that are converted to another type keep their codes and scales."""

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import import_model_from_safetensors
from quark.torch.quantization.nn.typed_buffers import TypedBuffers

SCHEMES = ("int8", "int4_wo_32", "nvfp4", "mxfp4", "w_uint4_per_group_asym")


def stored(directory):
    """Tensors of the quantized layers of a checkpoint; biases and norms follow the model."""
    tensors = load_file(directory / "model.safetensors")
    return {k: v for k, v in tensors.items() if "_scale" in k or "_zero_point" in k or "proj" in k}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_loaded", [False, True], ids=["frozen", "loaded"])
def test_codes_and_scales_stay(build, quantize, export, scheme, dtype, is_loaded):
    model = quantize(build(), scheme)
    directory = export(model)
    if is_loaded:
        model = import_model_from_safetensors(None, directory)
    assert_same(stored(export(model.to(dtype))), stored(directory))


def test_buffers_move():
    module = TypedBuffers()
    module.register_buffer("scale", torch.tensor([0.1]))
    module.register_buffer("absent", None)
    moved = module.to("meta", torch.float16)
    assert (moved.scale.device.type, moved.scale.dtype) == ("meta", torch.float32)
