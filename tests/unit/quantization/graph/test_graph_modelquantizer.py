import copy
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.graph.graph_modelquantizer import FxGraphQuantizer
from quark.torch.quantization.graph_mode.edges import edge_quantizers
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
    INT8,
    export,
    graph_config,
    images,
    network,
)

CONFIG = Config(EVERYTHING, log_severity_level=3)


@pytest.mark.parametrize("gives", ["model", "graph"])
def test_models_are_exported_and_quantized(gives):
    model, (x,) = network("resnet").train(), images(1)
    graph = export(network("resnet"))
    quantized = FxGraphQuantizer(CONFIG).quantize_model(
        model if gives == "model" else graph, (x,), calibdata=images()
    )
    expected = ModelQuantizer(graph_config()).quantize_model(graph, images())
    with torch.no_grad():
        assert torch.equal(quantized(x), expected(x))
    assert model.training and model.stem.training


def test_axes_of_any_size():
    shapes = ({0: torch.export.Dim("batch"), 2: torch.export.Dim.AUTO},)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    quantized = FxGraphQuantizer(CONFIG).quantize_model(
        model, tuple(images(1)), dynamic_shapes=shapes, calibdata=images(2, (5, 3, 20, 16))
    )
    assert quantized(torch.randn(3, 3, 9, 16)).shape == (3, 2, 5, 12)


def train(graph):
    optimizer = torch.optim.SGD(graph.parameters(), 0.01)
    graph.train()
    for x in images(2):
        optimizer.zero_grad()
        graph(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("returns", [True, False])
def test_a_trainer_gets_the_quantized_graph(returns):
    def trainer(graph):
        train(graph)
        return graph.eval() if returns else None

    quantizer, args = FxGraphQuantizer(CONFIG), tuple(images(1))
    before = quantizer.quantize_model(network("unet"), args, calibdata=images())
    after = quantizer.quantize_model(network("unet"), args, calibdata=images(), trainer=trainer)
    with torch.no_grad():
        assert after(*args).square().mean() < before(*args).square().mean()
    frozen = quantizer.freeze(after.eval())
    assert frozen.down.weight.unique().numel() <= 255


def test_trainers_of_something_else_are_refused():
    with pytest.raises(TypeError, match="trainer: expected a function that returns the graph"):
        FxGraphQuantizer(CONFIG).quantize_model(
            network("unet"), tuple(images(1)), calibdata=images(), trainer=lambda graph: 1.0
        )


def test_trainers_that_are_no_functions_are_refused_before_work():
    with pytest.raises(TypeError, match="trainer: expected a function that takes"):
        FxGraphQuantizer(CONFIG).quantize_model(nn.Identity(), (), trainer="adam")


class Branches(nn.Module):
    """Control flow that depends on a value."""

    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x


class Prints(nn.Conv2d):
    def forward(self, x):
        print("traced", file=sys.stderr)
        return super().forward(x)


def test_models_that_cannot_be_traced_are_refused_with_the_place(capsys):
    with pytest.raises(ValueError, match=r"Branches cannot be .*test_graph_modelq.*'if x.sum\(\)"):
        FxGraphQuantizer(CONFIG).quantize_model(Branches(), tuple(images(1)))
    assert not capsys.readouterr().err  # not the graph so far, which torch prints
    FxGraphQuantizer(CONFIG).quantize_model(Prints(3, 4, 3), tuple(images(1)), calibdata=images(1))
    assert "traced" in capsys.readouterr().err


def test_what_is_no_model_is_refused():
    quantizer = FxGraphQuantizer(CONFIG)
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got a str"):
        quantizer.quantize_model("model.onnx", ())
    with pytest.raises(TypeError, match="args: expected a tuple of arguments, got a Tensor"):
        quantizer.quantize_model(network("unet"), images(1)[0])


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.sampled(2)
def test_a_graph_is_written_as_onnx(run_onnx, tmp_path, is_frozen):
    """Quantized on every edge, with the codes of the frozen graph: integers add up exactly."""
    onnx = pytest.importorskip("onnx")
    bias = replace(INT8, dtype="int32")
    quantizer = FxGraphQuantizer(Config(replace(EVERYTHING, bias=bias), log_severity_level=3))
    (x,) = images(1)
    model = quantizer.quantize_model(network("unet"), (x,), calibdata=images())
    frozen = quantizer.freeze(copy.deepcopy(model))
    given = frozen if is_frozen else model.train()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    quantizer.export_onnx_model(given, (x,), tmp_path / "d")
    assert given.training is not is_frozen  # what is given stays as it was
    assert all(torch.equal(t, before[n]) for n, t in given.state_dict().items())
    with torch.no_grad():
        expected = frozen(x)
    assert torch.equal(run_onnx(tmp_path / "d", x)[0], expected)
    operators = [n.op_type for n in onnx.load(tmp_path / "d" / "quark_model.onnx").graph.node]
    assert operators.count("QuantizeLinear") >= len(edge_quantizers(frozen))


def test_onnx_of_something_else_is_refused(tmp_path):
    quantizer, args = FxGraphQuantizer(CONFIG), tuple(images(1))
    with pytest.raises(ValueError, match="no quantized module"):
        quantizer.export_onnx_model(export(network("unet")), args, tmp_path / "d")
    quantized = quantizer.quantize_model(network("unet"), args, calibdata=images())
    quantizer.export_onnx_model(quantized, args, tmp_path / "d")
    with pytest.raises(FileExistsError):
        quantizer.export_onnx_model(quantized, args, tmp_path / "d")
    with pytest.raises(ValueError, match=r"x has the shape \(1, 5, 16, 16\)"):
        quantizer.export_onnx_model(quantized, (torch.randn(1, 5, 16, 16),), tmp_path / "e")
    assert not (tmp_path / "e").exists()
