import io
import zipfile
from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import (
    ModelQuantizer,
    export_onnx,
    load_params,
    save_params,
)
from quark.torch.export.graph_archive import graph_archive, load_graph_archive
from quark.torch.quantization.config.config import (
    BFP16Spec,
    QuantizationConfig,
)
from quark.torch.quantization.config.type import QuantizationMode
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
    UINT8,
    export,
    frozen_graph,
    graph_config,
    images,
    network,
)

GRAPH = QuantizationMode.fx_graph_mode
BFP16 = BFP16Spec(ch_axis=1).to_quantization_spec()
LAYERS = {
    "int8": EVERYTHING,
    "uint8": replace(EVERYTHING, input_tensors=UINT8, output_tensors=UINT8),
    "bfp16": QuantizationConfig(BFP16, BFP16, BFP16),
}


def frozen(name="unet", layer=EVERYTHING, **options):
    return frozen_graph(export(network(name), **options), layer)


def operators(graph):
    calls = (str(n.target) for n in graph.graph.nodes if n.op == "call_function")
    return {call.partition(".")[0] for call in calls}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.sampled(3)
def test_graphs_are_saved_and_loaded_with_their_bits(tmp_path, layer):
    model, (x,) = frozen("unet", LAYERS[layer]), images(1)
    code = model.code
    save_params(model, model_type="net", args=(x,), export_dir=tmp_path / "d", quant_mode=GRAPH)
    path = tmp_path / "d" / "net_quantized.pth"
    loaded = load_params(pth_path=path, quant_mode=GRAPH, check_digests=True)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model(x))
    assert model.code == code
    assert ("quark" in operators(loaded)) == (layer == "bfp16")
    save_params(model, "net", (x,), None, tmp_path / "d", "fx_graph_mode", overwrite=True)


def test_torch_alone_runs_the_archive():
    model, (x,) = frozen("mobilenet"), images(1)
    graph = torch.export.load(io.BytesIO(graph_archive(model, (x,)))).module()
    assert operators(graph) == {"aten"} and torch.equal(graph(x), model(x))


def test_axes_of_any_size_and_keywords_stay():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x, *, factor):
            return {"y": self.conv(x * factor)}

    def inputs(rows):
        return torch.randn(rows, 3, 8, 8), torch.rand(rows, 1, 1, 1)

    (x, factor), axes = inputs(2), {0: torch.export.Dim("rows")}
    program = torch.export.export(
        Scaled().eval(), (x,), {"factor": factor}, dynamic_shapes={"x": axes, "factor": axes}
    )
    quantizer = ModelQuantizer(graph_config())
    data = [{"x": x, "factor": factor}]
    model = quantizer.freeze(quantizer.quantize_model(program.module(), data))
    archive = io.BytesIO(graph_archive(model, (x,), {"factor": factor}))
    loaded = torch.export.load(archive).module()
    x, factor = inputs(5)
    assert torch.equal(loaded(x, factor=factor)["y"], model(x, factor=factor)["y"])


def test_the_code_of_the_model_is_not_written():
    with zipfile.ZipFile(io.BytesIO(graph_archive(frozen(), tuple(images(1))))) as archive:
        assert not any(b"networks.py" in archive.read(name) for name in archive.namelist())


def test_what_is_no_frozen_graph_is_refused(tmp_path):
    x = tuple(images(1))
    quantized = ModelQuantizer(graph_config()).quantize_model(export(network("unet")), images())
    with pytest.raises(ValueError, match=r"not frozen: call ModelQuantizer\.freeze"):
        save_params(quantized, "n", x, export_dir=tmp_path / "d", quant_mode=GRAPH)
    with pytest.raises(TypeError, match="expected a quantized graph, got a UNet"):
        save_params(network("unet"), "n", x, export_dir=tmp_path / "d", quant_mode=GRAPH)
    with pytest.raises(ValueError, match="args is missing"):
        save_params(frozen(), "n", export_dir=tmp_path / "d", quant_mode=GRAPH)
    assert not (tmp_path / "d").exists()


def test_parameter_files_refuse_graphs(tmp_path):
    """They have no place for operators, so nothing could load them."""
    with pytest.raises(ValueError, match=r"The model is a graph: .* Use save_params\(…, quant"):
        save_params(frozen("resnet"), "net", export_dir=tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_archives_are_loaded_in_graph_mode_alone(tmp_path):
    with pytest.raises(ValueError, match="give pth_path alone"):
        load_params(network("unet"), pth_path=tmp_path / "m.pth", quant_mode=GRAPH)
    with pytest.raises(ValueError, match="with quant_mode=fx_graph_mode, archives"):
        load_params(pth_path=tmp_path / "m.pth")
    with pytest.raises(FileNotFoundError):
        load_graph_archive(tmp_path / "m.pth")


def test_bad_arguments_are_refused_before_work(tmp_path):
    graph, (x,) = frozen("mobilenet"), images(1)
    how = {"export_dir": tmp_path / "d", "quant_mode": "fx_graph_mode"}
    with pytest.raises(TypeError, match=r"expected a tuple of arguments, as \(x,\)"):
        save_params(graph, "n", x, **how)
    for name in ("../n", "a/b", ""):
        with pytest.raises(ValueError, match="model_type: expected the name"):
            save_params(graph, name, (x,), **how)
    assert not list(tmp_path.iterdir())


def test_an_archive_may_lie_beside_other_outputs(tmp_path):
    graph, options = frozen_graph(export(network("mobilenet"))), {"quant_mode": "fx_graph_mode"}
    (x,) = images(1)
    export_onnx(model=graph, output_dir=tmp_path / "d", input_args=x)
    before = (tmp_path / "d/quark_model.onnx").read_bytes()
    for name in ("a", "b"):
        save_params(graph, name, (x,), export_dir=tmp_path / "d", **options)
    assert (tmp_path / "d/quark_model.onnx").read_bytes() == before
    digests = (tmp_path / "d/SHA256SUMS").read_text()
    assert {line.split()[1] for line in digests.splitlines()} == {
        p.name for p in (tmp_path / "d").iterdir() if p.name != "SHA256SUMS"
    }
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save_params(graph, "a", (x,), export_dir=tmp_path / "d", **options)
    (tmp_path / "d/notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds notes.txt"):
        save_params(graph, "c", (x,), export_dir=tmp_path / "d", **options)
    assert not (tmp_path / "d/c_quantized.pth").exists()


class TestValuesThatAreNotFinite:
    """They are refused, as in safetensors."""

    def load(self, path, layer, change):
        model = frozen("unet", LAYERS[layer])
        program = torch.export.load(io.BytesIO(graph_archive(model, tuple(images(1)))))
        change(program)
        torch.export.save(program, path / "net.pth")
        return load_graph_archive(path / "net.pth")

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("name", ["out.weight", "up.bias", "down._weight_quantizer.scale"])
    def test_in_tensors(self, tmp_path, name, value):
        def change(program):
            program.state_dict[name].data.view(-1)[-1:] = value

        with pytest.raises(ValueError, match=rf"net\.pth: {name} has NaN or infinite values"):
            self.load(tmp_path, "bfp16", change)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_in_numbers_of_the_graph(self, tmp_path, value):
        def change(program):
            product = torch.ops.aten.mul.Tensor
            node = next(n for n in program.graph.nodes if n.target is product)
            node.args = (node.args[0], value)

        with pytest.raises(ValueError, match=f"multiplies by {value}, expected a finite scale"):
            self.load(tmp_path, "int8", change)

    def test_masks_may_hold_infinity(self, tmp_path):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0, 0.0]))
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                return (self.linear(x) + self.mask).softmax(-1)

        model, x = Masked().eval(), torch.randn(2, 4)
        torch.export.save(torch.export.export(model, (x,)), tmp_path / "net.pth")
        loaded = load_graph_archive(tmp_path / "net.pth")
        assert loaded(x).equal(model(x))
