"""Checkpoints verified with the software they are for, where it is installed."""

import pytest

from quark.torch import ModelExporter
from quark.torch.export import convert
from quark.torch.export.containers.safetensors import Safetensors
from quark.torch.quantization.config.algo import OnlineRotationConfig, RotationConfig
from tests.configurations import config, half_groups, preset

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
CT = "compressed-tensors"


PACKAGES = {"awq": "gptqmodel", "gptq": "gptqmodel", CT: "compressed_tensors"}
CASES = [
    pytest.param(*case, marks=pytest.mark.client(PACKAGES[case[0]]))
    for case in (
        ("awq", "uint4", False),
        ("awq", "int4", True),
        ("gptq", "uint4", False),
        ("gptq", "int3", True),
        ("gptq", "int8", True),
        (CT, "int4", True),
        (CT, "int8", True),
    )
]


@pytest.mark.parametrize(("mode", "dtype", "symmetric"), CASES)
@pytest.mark.sampled(2)
def test_exports(build, quantize, tmp_path, mode, dtype, symmetric):
    exporter = ModelExporter(None, tmp_path / "out", verify=True)
    model = quantize(build(**WIDE), config(half_groups(dtype, symmetric)))
    exporter.export_safetensors_model(model, custom_mode=mode)
    verdict = exporter.verdict
    assert PACKAGES[mode].replace("_", "-") in verdict.reader and not verdict.note
    assert verdict.difference < 0.1 * verdict.spread


@pytest.mark.parametrize(("mode", "dtype", "symmetric"), CASES)
@pytest.mark.sampled(2)
def test_conversions(build, quantize, tmp_path, mode, dtype, symmetric):
    model = quantize(build(**WIDE), config(half_groups(dtype, symmetric)))
    ModelExporter(tmp_path / "in").export_safetensors_model(model)
    verdict = convert(tmp_path / "in", tmp_path / "out", mode, verify=True)
    assert PACKAGES[mode].replace("_", "-") in verdict.reader and not verdict.note


@pytest.mark.client("compressed_tensors")
def test_what_the_software_cannot_load_is_read_here_and_said(build, quantize, tmp_path):
    """compressed-tensors 0.20 in Transformers does not load packed zero points."""
    exporter = ModelExporter(None, tmp_path / "out", verify=True)
    exporter.export_safetensors_model(
        quantize(build(**WIDE), config(half_groups("uint4", False))), custom_mode=CT
    )
    assert exporter.verdict.reader == "this package" and exporter.verdict.difference == 0
    assert "Transformers does not open it" in exporter.verdict.note


@pytest.mark.client("compressed_tensors")
def test_rotations_of_inputs(build, quantize, tmp_path):
    """Transformers leaves them out; they are added by compressed-tensors before the comparison."""
    online = OnlineRotationConfig(online_rotation_layers=["*_proj"])
    rotations = RotationConfig(r2=True, rotation_size=32, online_config=online)
    exporter = ModelExporter(None, tmp_path / "out", verify=True)
    model = quantize(build(), preset("int4_wo_32", rotations))
    exporter.export_safetensors_model(model, custom_mode=CT)
    verdict = exporter.verdict
    assert "compressed-tensors" in verdict.reader and not verdict.note
    assert verdict.difference < 1e-3 * verdict.spread
    assert "quark" in Safetensors().load_code(tmp_path / "out")
