"""What cannot be written is refused before the model is quantized."""

from collections import namedtuple

import pytest

from quark.torch import files
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.writability import check_exports, stored_size
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from tests.configurations import spec


def check(model, config, place, container="hf_format", **settings):
    check_exports(model, config, place, {container: ExportSettings(**settings)})


@pytest.mark.parametrize(
    ("config", "container", "settings", "said"),
    [
        ("fp8", "hf_format", {"custom_mode": "awq"}, "custom_mode='awq' cannot hold .*q_proj"),
        ("int8_wo", "hf_format", {"custom_mode": "fp8"}, "custom_mode='fp8' cannot hold"),
        ("fp8", "gguf", {"tokenizer_path": "."}, "GGUF cannot hold .*q_proj"),
        ("uint4_wo_32", "gguf", {"tokenizer_path": "gone"}, "has no tokenizer"),
        ("uint4_wo_32", "gguf", {}, "give tokenizer_path"),
        ("int4_wo_24", "hf_format", {}, r"group_size=24 does not divide its 64"),
    ],
)
def test_refused(build, config_of, tmp_path, unchanged, config, container, settings, said):
    model = build()
    with unchanged(model), pytest.raises(ValueError, match=said):
        check(model, config_of(config), tmp_path / "out", container, **settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [mode for mode in FORMATS if mode != "quark"])
def test_quantized_inputs_of_float_weights(build, tmp_path, mode):
    """No other tool has such layers: its checkpoint would say that the weights are quantized."""
    inputs = QuantizationConfig(input_tensors=spec("fp8_e4m3"))
    layers = {"*q_proj": inputs}
    of_some = Config(scheme("fp8"), exclude=["lm_head"], layer_quant_config=layers)
    for config in (Config(inputs, exclude=["lm_head"]), of_some):
        with pytest.raises(ValueError, match=f"custom_mode='{mode}' cannot hold .*q_proj"):
            check(build(), config, tmp_path / "out", custom_mode=mode)
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_written_leaves_no_trace(build, config_of, tmp_path, unchanged, caplog):
    model = build("tied")
    with unchanged(model):
        check(model, config_of("uint4_wo_32"), tmp_path / "out", custom_mode="awq")
    assert not hasattr(model, "quant_config") and not caplog.records
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["int4_wo_32", "fp8", "mxfp4", "ptpc_int8"])
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_the_size_is_that_of_the_file(build, config_of, quantize, export, name, kind):
    estimate = stored_size(build(kind), config_of(name))
    file = export(quantize(build(kind), name)) / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size - header == estimate


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("torchao", "int4_wo_32"),
        ("awq", "uint4_wo_32"),
        ("mlx", "uint4_wo_32"),
        ("modelopt", "fp8"),
    ],
)
def test_other_layouts_take_other_sizes(build, config_of, quantize, export, tmp_path, mode, name):
    """A byte holds one code of torchao, and two of others."""
    estimate = stored_size(build(), config_of(name), mode=mode)
    file = export(quantize(build(), name), custom_mode=mode) / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size - header == estimate
    if mode == "torchao":
        assert estimate > 1.3 * stored_size(build(), config_of(name))


def test_stacked_experts_are_counted_as_they_are_written(build, quantize, export):
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = Config(scheme("int8_wo", 32), exclude=["lm_head"])
    estimate = stored_size(build("mixtral", **sizes), config)
    file = export(quantize(build("mixtral", **sizes), config)) / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size - header == estimate


def test_a_full_disk(build, config_of, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    needed = stored_size(build(), config_of("int8_wo"))
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage(1, 1, needed))
    check(build(), config_of("int8_wo"), tmp_path / "out")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage(1, 1, needed - 1))
    with pytest.raises(OSError, match=r"free, but .* will be written: make room"):
        check(build(), config_of("int8_wo"), tmp_path / "out")


def test_a_quantized_model(build, quantize, tmp_path):
    model = quantize(build(), "fp8")
    check(model, None, tmp_path / "out")
    with pytest.raises(ValueError, match="custom_mode='awq' cannot hold"):
        check(model, None, tmp_path / "out", custom_mode="awq")
