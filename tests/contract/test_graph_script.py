"""The documented ways to use graph mode, as scripts write them."""

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer, export_onnx, load_params, save_params
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    QuantizationMode,
    RoundType,
    ScaleType,
)
from quark.torch.quantization.graph.graph_modelquantizer import FxGraphQuantizer
from quark.torch.quantization.observer.observer import (
    PerChannelMinMaxObserver,
    PerTensorMinMaxObserver,
    PerTensorPowOf2MinMSEObserver,
)
from tests.unit.quantization.graph_mode.networks import images, network

STATIC = {"is_dynamic": False, "symmetric": True, "round_method": RoundType.half_even}
FLOAT = {"scale_type": ScaleType.float, "observer_cls": PerTensorMinMaxObserver}
POF2 = {"scale_type": ScaleType.pof2, "observer_cls": PerTensorPowOf2MinMSEObserver}
INT8 = QTensorConfig(Dtype.int8, qscheme=QSchemeType.per_tensor, **STATIC, **FLOAT)
INT8_POF2 = QTensorConfig(Dtype.int8, qscheme=QSchemeType.per_tensor, **STATIC, **POF2)
INT32 = QTensorConfig(Dtype.int32, qscheme=QSchemeType.per_tensor, **STATIC, **FLOAT)
INT8_WEIGHT = QTensorConfig(
    Dtype.int8,
    qscheme=QSchemeType.per_channel,
    ch_axis=0,
    observer_cls=PerChannelMinMaxObserver,
    scale_type=ScaleType.float,
    **STATIC,
)


def trained_range(name):
    """An int8 specification whose range trains: as a specification, or by its observer."""
    from quark.torch.quantization.config.config import QATSpec, TQTSpec
    from quark.torch.quantization.observer.lsq_observer import LSQObserver
    from quark.torch.quantization.observer.tqt_observer import TQTObserver

    options = {
        "QATSpec": {"qat_spec": QATSpec()},
        "TQTSpec": {"qat_spec": TQTSpec()},
        "LSQObserver": {"observer_cls": LSQObserver},
        "TQTObserver": {"observer_cls": TQTObserver},
    }[name]
    return QTensorConfig(Dtype.int8, qscheme=QSchemeType.per_tensor, **STATIC, **options)


def config_of(name):
    spec = {"float scales": INT8, "power of two": INT8_POF2, "channels": INT8}.get(name)
    spec = trained_range(name) if spec is None else spec
    weight = INT8_WEIGHT if name == "channels" else spec
    bias = INT32 if name in ("float scales", "channels") else None
    return QConfig(
        global_quant_config=QLayerConfig(
            input_tensors=spec, output_tensors=spec, weight=weight, bias=bias
        ),
        quant_mode=QuantizationMode.fx_graph_mode,
        exclude=[],
    )


TRAINED = ("QATSpec", "TQTSpec", "LSQObserver", "TQTObserver")


def train(model, loader, steps=2):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for x in loader[:steps]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "name",
    [
        *("float scales", "power of two", "LSQObserver"),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("channels", "QATSpec", "TQTSpec", "TQTObserver")
        ),
    ],
)
def test_script(name, run_onnx, tmp_path):
    """Export, quantize, train if ranges train, freeze, write for ONNX and for torch, load."""
    model, loader, x = network("mobilenet"), images(3), images(4)[3]
    graph = torch.export.export(model.eval(), (x,)).module()
    quantizer = ModelQuantizer(config_of(name))
    quantized = quantizer.quantize_model(graph, [] if name in TRAINED else loader)
    if name in TRAINED:
        before = {n: p.clone() for n, p in quantized.named_parameters()}
        train(quantized, loader)
        assert any(not torch.equal(p, before[n]) for n, p in quantized.named_parameters())
    frozen = quantizer.freeze(quantized.eval())

    export_onnx(model=frozen, output_dir=tmp_path / "out", input_args=x)
    save_params(
        frozen,
        model_type="net",
        args=(x,),
        export_dir=tmp_path / "out",
        quant_mode=QuantizationMode.fx_graph_mode,
    )
    loaded = load_params(
        pth_path=tmp_path / "out" / "net_quantized.pth", quant_mode=QuantizationMode.fx_graph_mode
    )
    with torch.no_grad():
        y = frozen(x)
        assert torch.equal(loaded(x), y)
        error = (y - model(x)).norm() / model(x).norm()
        assert error > 0 and (name in TRAINED or error < 0.3)
        [from_onnx] = run_onnx(tmp_path / "out", x)
    assert (from_onnx - y).norm() < 0.05 * y.norm()


def test_fx_graph_quantizer(tmp_path, run_onnx):
    """The class exports the model itself, trains it, and writes ONNX."""
    model, loader = network("resnet"), images(3)
    quantizer = FxGraphQuantizer(config_of("QATSpec"))
    steps = []

    def trainer(graph):
        train(graph, loader)
        steps.append(graph)
        return graph

    batch = torch.export.Dim("batch")
    quantized = quantizer.quantize_model(
        model,
        (loader[0],),
        kwargs={},
        dynamic_shapes=({0: batch},),
        calibdata=loader,
        trainer=trainer,
    )
    assert steps == [quantized]
    frozen = quantizer.freeze(quantized.eval())
    quantizer.export_onnx_model(frozen, (loader[0],), tmp_path / "out")
    x = torch.cat(loader)
    with torch.no_grad():
        y = frozen(x)
    assert (run_onnx(tmp_path / "out", x)[0] - y).norm() < 0.05 * y.norm()


def test_patterns_and_types_of_layers():
    config = QConfig(
        global_quant_config=QLayerConfig(weight=INT8),
        layer_quant_config={"features.[0-9]*": QLayerConfig(weight=INT8_WEIGHT)},
        layer_type_quant_config={nn.Linear: QLayerConfig(weight=INT8_POF2)},
        quant_mode=QuantizationMode.fx_graph_mode,
        exclude=["features.9"],
    )
    graph = torch.export.export(network("mobilenet"), (images(1)[0],)).module()
    quantized = ModelQuantizer(config).quantize_model(graph)
    layers = dict(quantized.named_modules())
    specs = {name: layers[name].quant_config.weight for name in ("features.0", "classifier.1")}
    assert specs["features.0"] == INT8_WEIGHT and specs["classifier.1"] == INT8_POF2
    assert type(layers["features.9"]) is nn.Conv2d
