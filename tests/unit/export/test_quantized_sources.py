"""A quantized source gives the same files in memory, read in parts, and from files to files."""

import pytest
import torch

from quark.torch import ModelExporter
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.file_to_file import quantize_files
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.graph.residency import residency_of
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.nn.packed import PackedLayer
from tests.configurations import config as config_of
from tests.configurations import groups, preset, quantized
from tests.unit.export.formats.test_sources import QWEN, oss, publish_fp8

published = oss  # a fixture
MADE = {
    "quark": ("quark", preset("fp8", kv_cache_quant_config={})),
    "awq": ("awq", config_of(groups("uint4", False))),
    "gptq": ("gptq", config_of(groups("int4"))),
    "compressed-tensors": ("compressed-tensors", preset("int8")),
}
SOURCES = [*MADE, "fp8 blocks", "mxfp4"]


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture
def source(request, build, batches, tmp_path):
    """The directory of a quantized model of a tool."""
    if request.param == "mxfp4":
        return request.getfixturevalue("published")[0]
    if request.param == "fp8 blocks":
        model = build("qwen3_moe", torch.bfloat16, **QWEN)
        return publish_fp8(model, tmp_path / "fp8", 16, activation_scheme="dynamic")[0]
    mode, config = MADE[request.param]
    model = quantized(build(dtype=torch.bfloat16), config, batches)
    ModelExporter(None, tmp_path / "made").export_safetensors_model(model, custom_mode=mode)
    return tmp_path / "made"


@pytest.mark.parametrize("source", SOURCES, indirect=True)
@pytest.mark.sampled(3)
def test_files(source, tmp_path):
    config = preset("int8_wo", exclude=["lm_head", "*.0.*"])
    expected = None
    for bound in (None, 1 << 40):
        model = load_in_float(source, max_memory=bound)
        if bound is not None:
            residency_of(model).limit = 0
        ModelExporter(None, tmp_path / f"{bound}").export_safetensors_model(
            quantized(model, config), max_shard_size="40KB"
        )
        written = contents(tmp_path / f"{bound}")
        assert expected is None or written == expected
        expected = written
    settings = ExportSettings(max_shard_size="40KB")
    quantize_files(config, source, tmp_path / "files", settings)
    assert contents(tmp_path / "files") == expected
    assert sum(name.endswith(".safetensors") for name in expected) > 1


@pytest.mark.parametrize(
    "source",
    ["awq", *(pytest.param(n, marks=pytest.mark.nightly) for n in SOURCES if n != "awq")],
    indirect=True,
)
def test_an_algorithm(source, batches, tmp_path):
    written = []
    for bound in (None, 1 << 40):
        model = load_in_float(source, max_memory=bound)
        if bound is not None:
            residency_of(model).limit = residency_of(model).activation_limit = 0
        model = quantized(model, preset("int8_wo", GPTQConfig()), batches)
        ModelExporter(None, tmp_path / f"{bound}").export_safetensors_model(model)
        written.append(contents(tmp_path / f"{bound}"))
    assert written[0] == written[1]


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_layers_in_float_have_the_values_and_scheme_of_the_source(source, tmp_path):
    config = preset("int8_wo", exclude=["lm_head", "*.0.*"])
    quantize_files(config, source, tmp_path / "out", ExportSettings())
    before, after = load_checkpoint(source), load_checkpoint(tmp_path / "out")
    layers = {
        name: layer
        for name, layer in before.named_modules()
        if isinstance(layer, PackedLayer) and name.startswith("model.layers.0.")
    }
    assert len(layers) >= 4
    for name, layer in layers.items():
        same = after.get_submodule(name)
        assert same.quant_config == layer.quant_config
        assert torch.equal(same.value("weight"), layer.value("weight")), name
    other = after.get_submodule(next(iter(layers)).replace(".0.", ".1."))
    assert other.quant_config.weight.dtype.name == "int8"
