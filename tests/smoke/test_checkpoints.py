"""Every checkpoint format and every container: written, read, and the same outputs."""

from importlib.util import find_spec

import pytest
import torch

from quark.demo.text import model_directory
from quark.torch import ModelExporter, ModelImporter, export_gguf, export_onnx
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.recognition import open_checkpoint
from tests.configurations import config, half_groups

pytestmark = pytest.mark.smoke
SCHEMES = ("int4_wo_32", "fp8", "mxfp8")  # every format holds one of them


@pytest.fixture
def model(build, quantize):
    return lambda name="int4_wo_32", **sizes: quantize(build(num_hidden_layers=1, **sizes), name)


@pytest.mark.parametrize("mode", [name for name in FORMATS if name != "mxfp4"])  # of experts
def test_a_format(model, build, logits, tmp_path, mode):
    exporter = ModelExporter(tmp_path / "out")
    for scheme in SCHEMES:
        written = model(scheme)
        try:
            exporter.export_safetensors_model(written, custom_mode=mode)
        except ValueError as error:  # before anything is written
            assert f"custom_mode='{mode}'" in str(error)
        else:
            break
    empty = build(num_hidden_layers=1, device="meta")
    read = ModelImporter(tmp_path / "out", "safetensors").import_model_info(empty)
    assert logits(read).equal(logits(written))


def test_the_native_format(model, build, logits, tmp_path):
    written = model()
    ModelExporter(tmp_path / "out").export_quark_model(written)
    read = ModelImporter(tmp_path / "out").import_model_info(build(num_hidden_layers=1))
    assert logits(read).equal(logits(written))


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
def test_gguf(model, logits, tmp_path):
    written = model(config(half_groups("int4")), vocab_size=2048)
    export_gguf(written, tmp_path / "out", "small", model_directory())
    read = open_checkpoint(tmp_path / "out" / "small.gguf").fill()
    assert logits(read).equal(logits(written))


def test_onnx(quantize, run_onnx, tmp_path):
    written = quantize(torch.nn.Sequential(torch.nn.Linear(64, 8)), "int4_wo_32", None)
    x = torch.randn(3, 64)
    export_onnx(written, tmp_path / "out", x)
    torch.testing.assert_close(run_onnx(tmp_path / "out", x)[0], written(x), rtol=0, atol=1e-4)
