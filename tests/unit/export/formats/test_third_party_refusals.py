"""What the formats of other tools cannot hold is refused before a file is written."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelExporter
from quark.torch.export.conversion import convert
from quark.torch.quantization.config.config import (
    QuantizationConfig,
)
from tests.configurations import config, groups, preset, spec

CT = "compressed-tensors"
FP8 = spec("fp8_e4m3")
UINT8 = spec("uint8", symmetric=False)
CACHE = QuantizationConfig(output_tensors=FP8)
WITH_CACHE = {"kv_cache_quant_config": {"*k_proj": CACHE, "*v_proj": CACHE}}
EIGHT_BITS = QuantizationConfig(weight=groups("int8"))


@pytest.mark.parametrize(
    ("mode", "configuration", "said"),
    [
        ("awq", config(groups("int8")), "its weight is int8"),
        ("awq", config(groups("int4", size=None)), "its weight has no groups"),
        ("awq", preset("int8"), "its input is quantized"),
        ("awq", preset("int4_wo_32", **WITH_CACHE), "its output is quantized"),
        ("awq", config(groups("int4"), exclude=[]), "it is outside of the blocks"),
        (
            "awq",
            config(groups("uint4", False, zero_point_type="float32")),
            "its zero points are float32",
        ),
        ("gptq", preset("fp8"), "its input is quantized"),
        ("gptq", config(FP8), "its weight is fp8_e4m3"),
        (
            "gptq",
            config(groups("int4"), layer_quant_config={"*down_proj": EIGHT_BITS}),
            "has one scheme for all layers",
        ),
        (CT, preset("mx9"), "its weight is mx9"),
        (
            CT,
            config(groups("uint8", size=None), FP8),
            "its weight is uint8 per_channel and its",
        ),
        (CT, config(groups("int8", size=None, ch_axis=1)), "its weight is int8 per_channel"),
        (CT, config(groups("int8", size=None), UINT8), "its input is uint8 per_tensor"),
        ("fp8", config(FP8), "its input is not quantized"),
        ("fp8", preset("ptpc_fp8"), "its weight is per_channel"),
        ("fp8", preset("int8"), "its weight is int8"),
    ],
)
def test_what_a_format_cannot_hold(build, quantize, tmp_path, mode, configuration, said):
    model = quantize(build(), configuration)
    with pytest.raises(ValueError, match=said) as error:
        ModelExporter(tmp_path / "out").export_safetensors_model(model, custom_mode=mode)
    assert f"custom_mode='{mode}'" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_names_that_awq_would_confuse(build, quantize, export):
    model = quantize(build(), "int4_wo_32")
    model.model.layers[0].mlp.gate = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"mlp\.gate, in float, is part of .*mlp\.gate_proj"):
        export(model, custom_mode="awq")


def test_values_instead_of_codes(build, quantize, export):
    model = quantize(build(), "int4_wo_32")
    with pytest.raises(ValueError, match="stores codes: leave out weight_format"):
        export(model, custom_mode="gptq", weight_format="fake_quantized")
    with pytest.raises(ValueError, match="order of codes: leave out pack_method"):
        export(model, custom_mode="awq", pack_method="order")


def test_codes_outside_of_their_format(build, quantize, export, tmp_path):
    """int4 codes that are stored as bytes can be any byte: words would lose their high bits."""
    model = quantize(build(), preset("w_int4_per_group_a_int8_per_token_dynamic"))
    path = export(model, custom_mode=CT)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 100
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj .*codes of its weight reach .* to 100, those"):
        convert(path, tmp_path / "out", "quark")
    assert not (tmp_path / "out").exists()
