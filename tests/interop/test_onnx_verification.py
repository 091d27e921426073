"""ONNX files opened again by ONNX Runtime: what is right passes, what is wrong is not kept."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

from quark.torch import ModelExporter, ModelQuantizer
from quark.torch.export import verify
from quark.torch.export.onnx.runtime import OnnxSession
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.usefixtures("onnx_operators")
TOKENS = torch.arange(32).reshape(2, 16)  # as ``verify`` makes them


def exported(model, path, inputs=TOKENS, **options):
    exporter = ModelExporter(None, path, verify=True)
    exporter.export_onnx_model(model, inputs, **options)
    return exporter.verdict


def change(path, ending, how):
    """Change the tensors of a file whose names end so."""
    graph = onnx.load(path)
    for tensor in graph.graph.initializer:
        if tensor.name.endswith(ending):
            values = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(how(values), tensor.name))
    onnx.save(graph, path)


@pytest.fixture(scope="module")
def written(build, quantize, tmp_path_factory):
    """Return a model of one block, its exported directory and the verdict; each scheme once.

    The graph takes one shape: tracing any takes three times as long.
    """
    results = {}

    def written(name):
        if name not in results:
            model = quantize(build(num_hidden_layers=1), name)
            path = tmp_path_factory.mktemp(name) / "out"
            results[name] = model, path, exported(model, path, dynamic_shapes={})
        return results[name]

    return written


@pytest.mark.parametrize("name", ["uint4_wo_32", "ptpc_int8", "mxfp4"])
@pytest.mark.sampled(4)
def test_right_files(written, name):
    _, path, verdict = written(name)
    assert verdict.reader.startswith("onnxruntime ") and verdict.compared == "outputs"
    assert verdict.bytes == (path / "quark_model.onnx").stat().st_size
    assert 0 <= verdict.difference < (1e-4 if "wo" in name else 0.5) * verdict.spread


@pytest.mark.parametrize("name", ["int8_wo", "ptpc_int8"])
@pytest.mark.parametrize(
    ("ending", "how"),
    [
        ("mlp.up_proj.weight.scale", lambda scale: 2 * scale),
        ("o_proj.weight.codes", lambda codes: np.ascontiguousarray(codes[::-1])),
    ],
    ids=["scales", "order of codes"],
)
@pytest.mark.sampled(4)
def test_wrong_files(written, tmp_path, name, ending, how):
    model, path, _ = written(name)
    shutil.copytree(path, tmp_path / "out")
    change(tmp_path / "out" / "quark_model.onnx", ending, how)
    for inputs in (None, TOKENS):
        with pytest.raises(ValueError, match="does not compute what the model in memory does"):
            verify(tmp_path / "out", model, inputs=inputs)


def test_files_that_do_not_run(written, tmp_path):
    """The runtime checks the number of scales when it computes, not when it loads."""
    model, path, _ = written("ptpc_int8")
    shutil.copytree(path, tmp_path / "out")
    change(tmp_path / "out" / "quark_model.onnx", "up_proj.weight.scale", lambda scale: scale[:-1])
    with pytest.raises(ValueError, match=r"does not run quark_model\.onnx"):
        verify(tmp_path / "out", model, inputs=TOKENS)


def test_a_wrong_file_does_not_take_the_place_of_an_earlier_one(written, tmp_path, monkeypatch):
    from onnx_ir import save

    model, path, _ = written("int8_wo")
    shutil.copytree(path, tmp_path / "out")
    before = (tmp_path / "out" / "quark_model.onnx").read_bytes()

    def rotten(graph, path, **options):
        save(graph, path, **options)
        change(path, "weight.scale", np.negative)

    monkeypatch.setattr("onnx_ir.save", rotten)
    exporter = ModelExporter(None, tmp_path / "out", overwrite=True, verify=True)
    with pytest.raises(ValueError, match="does not compute"):
        exporter.export_onnx_model(model, TOKENS, dynamic_shapes={})
    assert (tmp_path / "out" / "quark_model.onnx").read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_any_network_with_several_outputs_and_names_of_their_own(tmp_path):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

        def forward(self, image, scale):
            x = self.stem(image).mean((2, 3))
            return self.head(x) * scale, x.argmax(-1)

    model = ModelQuantizer.freeze(
        ModelQuantizer(Config(scheme("int8_wo"))).quantize_model(Network().eval())
    )
    inputs = torch.randn(2, 3, 8, 8), torch.randn(2, 1)
    assert exported(model, tmp_path / "out", inputs, input_names=["a", "b"]).spread > 0
    with pytest.raises(ValueError, match=r"quark_model\.onnx takes a, b: pass inputs for them"):
        verify(tmp_path / "out", model)


def test_infinite_outputs_and_those_of_no_elements(tmp_path):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 8)

        def forward(self, x):
            y = self.head(x)
            return torch.where(y > 0, y, -torch.inf), y[:, :0]

    model = ModelQuantizer.freeze(
        ModelQuantizer(Config(scheme("int8_wo"))).quantize_model(Network().eval())
    )
    verdict = exported(model, tmp_path / "out", torch.randn(4, 16))
    assert verdict.difference < 1e-5 * verdict.spread < 1
    change(tmp_path / "out" / "quark_model.onnx", "weight.scale", np.negative)
    with pytest.raises(ValueError, match="does not compute"):
        verify(tmp_path / "out", model, inputs=torch.randn(4, 16))


def test_bytes_that_two_products_share(tmp_path):
    """ONNX Runtime does not load them where it fuses operators."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            return self.layer(torch.relu(self.layer(x)))

    model = ModelQuantizer.freeze(
        ModelQuantizer(Config(scheme("int8_wo"))).quantize_model(Twice().eval())
    )
    assert exported(model, tmp_path / "out", torch.randn(4, 16)).difference < 1e-5


def test_what_the_runtime_does_not_compute_in_is_said_before_any_work(
    build, quantize, tmp_path, monkeypatch
):
    model = quantize(build(dtype=torch.bfloat16), "int8_wo")
    monkeypatch.delattr("torch.onnx.export")
    with pytest.raises(ValueError, match="bfloat16: load it in float32 or float16"):
        exported(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_runtime_does_not_load(quantize, tmp_path):
    model = quantize(nn.Sequential(nn.Linear(16, 16)).bfloat16(), "int8_wo", None)
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    ModelExporter(tmp_path / "out").export_onnx_model(model, x)
    with pytest.raises(ValueError, match=r"ONNX Runtime does not load quark_model\.onnx"):
        verify(tmp_path / "out", model, inputs=x)


def test_names_that_are_no_text(tmp_path, capfd):
    """ONNX Runtime prints what it tries after such an error; the message of the error is enough."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, kind, [1]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 20)]
    sound = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    file = tmp_path / "quark_model.onnx"
    file.write_bytes(sound.replace(b"Neg", b"N\xffg"))
    with pytest.raises(ValueError, match=r"does not load quark_model\.onnx: 'utf-8' codec can't"):
        OnnxSession(file)
    assert capfd.readouterr().out == ""
    file.write_bytes(sound)
    assert OnnxSession(file).run(torch.ones(1))[0].tolist() == [-1]


def test_half_precision(build, quantize, tmp_path):
    model = quantize(build(dtype=torch.float16, num_hidden_layers=1), "int8_wo")
    verdict = exported(model, tmp_path / "out", dynamic_shapes={})
    assert verdict.difference < 0.02 * verdict.spread


def test_a_missing_runtime_is_named_before_any_work(build, quantize, tmp_path, monkeypatch):
    monkeypatch.setattr("quark.torch.export.onnx.runtime.find_spec", lambda name: None)
    model = quantize(build(), "int8_wo")
    monkeypatch.delattr("torch.onnx.export")
    with pytest.raises(ImportError, match="pip install onnxruntime"):
        exported(model, tmp_path / "out")
