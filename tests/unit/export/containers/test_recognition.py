"""Which container a path is: one rule for every function."""

import shutil

import pytest

from quark.demo.text import model_directory
from quark.torch import ModelExporter
from quark.torch.export import convert, verify
from quark.torch.export.containers.base import ExportSettings, get_container
from quark.torch.export.containers.registry import CONTAINERS
from quark.torch.export.onnx.writer import OnnxOptions
from quark.torch.export.recognition import (
    load_checkpoint,
    open_checkpoint,
    read_contents,
    recognize_container,
)


@pytest.fixture(scope="module")
def written(build, quantize, tmp_path_factory):
    """A model, and a directory of each container."""
    pytest.importorskip("gguf")
    pytest.importorskip("onnxscript")
    root = tmp_path_factory.mktemp("containers")
    model = quantize(build(vocab_size=2048, num_hidden_layers=1), "int4_wo_32", None)
    # One shape: tracing sizes of any length takes three times as long.
    graph = OnnxOptions(dynamic_shapes={})
    settings = ExportSettings(tokenizer_path=model_directory(), graph=graph)
    for name in CONTAINERS:
        ModelExporter(root / name).export(name, model, settings)
    return model, root


@pytest.mark.parametrize("name", CONTAINERS)
def test_each_is_recognized(written, name):
    assert recognize_container(written[1] / name).name == name


@pytest.mark.parametrize("name", [n for n in CONTAINERS if get_container(n).has_config_json])
def test_what_is_beside_a_checkpoint_does_not_change_it(written, tmp_path, name):
    """``--model_export`` can write several containers to one directory."""
    _, root = written
    shutil.copytree(root / name, tmp_path / "out")
    for other in (n for n in CONTAINERS if not get_container(n).has_config_json):
        shutil.copytree(root / other, tmp_path / "out", dirs_exist_ok=True)
    assert recognize_container(tmp_path / "out").name == name
    assert recognize_container(tmp_path / "out" / "model.gguf").name == "gguf"
    assert recognize_container(tmp_path / "out" / "quark_model.onnx").name == "onnx"


def test_two_checkpoints_in_a_directory_are_refused_everywhere(written, tmp_path):
    model, root = written
    path = tmp_path / "out"
    for name in ("hf_format", "quark_format"):
        shutil.copytree(root / name, path, dirs_exist_ok=True)
    for use in (
        recognize_container,
        open_checkpoint,
        read_contents,
        load_checkpoint,
        lambda path: verify(path, model),
        lambda path: convert(path, tmp_path / "target", "awq"),
    ):
        with pytest.raises(ValueError, match="holds two checkpoints, a directory of safetensors"):
            use(path)


def test_what_is_written_alone_is_not_read(written, tmp_path):
    path = written[1] / "onnx"
    for use in (open_checkpoint, read_contents, lambda p: convert(p, tmp_path / "out", "quark")):
        with pytest.raises(ValueError, match="is an ONNX file, which is written but not read"):
            use(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), r"has no config\.json"),
        (lambda path: path.write_text("x"), "is of no known kind: give a checkpoint"),
        (lambda path: None, "does not exist: give a checkpoint"),
    ],
    ids=["empty", "file", "nothing"],
)
def test_what_is_no_checkpoint(tmp_path, make, said):
    make(tmp_path / "it")
    with pytest.raises(FileNotFoundError, match=said):
        recognize_container(tmp_path / "it")
