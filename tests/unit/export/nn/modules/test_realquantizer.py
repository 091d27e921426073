"""The quantizers that vLLM 0.9 makes for MX layers."""

import pytest
import torch
from safetensors.torch import load_file

from quark.torch.export.nn.modules import realquantizer
from quark.torch.kernel import mx
from quark.torch.quantization.config.config import (
    FP8E4M3PerTensorSpec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
)
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.configurations import config


@pytest.mark.parametrize("spec", [OCP_MXFP4Spec, OCP_MXFP6E2M3Spec])
def test_packed_weights_of_a_checkpoint(spec, build, quantize, export):
    """The calls of vLLM: the specification as its dictionary, then ``scale.data`` is assigned."""
    weight = spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    model = quantize(build(), config(weight))
    stored = load_file(export(model) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    scale = stored[f"{name}.weight_scale"]
    quantizer = realquantizer.get_real_quantizer(
        qspec=QuantizationSpec.from_dict(weight.to_dict()),
        quantizer=None,
        real_quantized=True,
        reorder=False,
        float_dtype=torch.bfloat16,
        scale_shape=scale.shape,
        zero_point_shape=None,
    )
    quantizer.scale.data = scale
    values = quantizer(stored[f"{name}.weight"])
    assert torch.equal(values, model.get_submodule(name).weight.bfloat16())


def test_inputs_are_rounded_in_their_own_blocks():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    qspec = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec()
    quantizer = realquantizer.get_real_quantizer(qspec, None, real_quantized=False)
    assert torch.equal(quantizer(x), mx.qdq_mxfp4(x, "even"))
    assert not list(quantizer.state_dict())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"qspec": FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec()},
            "fp8_e4m3 per_tensor",
        ),
        ({"quantizer": torch.nn.Identity()}, "Leave them None"),
        ({"zero_point_shape": (2,)}, "Leave them None"),
        ({"real_quantized": True}, "need scale_shape"),
    ],
)
def test_what_it_does_not_make(given, said):
    qspec = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    with pytest.raises(ValueError, match=said):
        realquantizer.get_real_quantizer(**{"qspec": qspec, "quantizer": None, **given})
