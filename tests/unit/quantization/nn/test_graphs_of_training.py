"""Models that train, under torch.compile and torch.export: ranges that follow, and trained ones."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    Config,
    QATSpec,
    QuantizationConfig,
    QuantizationSpec,
    TQTSpec,
)
from quark.torch.quantization.graph_mode.edges import edge_quantizers
from quark.torch.training import follow_ranges
from tests.unit.quantization.graph_mode.networks import INT8, export, graph_config

POF2 = replace(INT8, scale_type="pof2")
CHANNELS = QuantizationSpec(
    "int8", qscheme="per_channel", ch_axis=1, symmetric=True, is_dynamic=False, qat_spec=QATSpec()
)
LSQ, TQT = replace(INT8, qat_spec=QATSpec()), replace(POF2, qat_spec=TQTSpec())
LAYERS = {
    "following": QuantizationConfig(INT8, INT8, INT8),
    "lsq": QuantizationConfig(LSQ, LSQ, LSQ),
    "tqt": QuantizationConfig(TQT, TQT, TQT),
    "lsq per channel": QuantizationConfig(CHANNELS, None, INT8),
}
X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)).eval()


def quantized(case, mode):
    layer = LAYERS[case]
    if mode == "graph":
        return ModelQuantizer(graph_config(layer)).quantize_model(export(net(), X), [X])
    return ModelQuantizer(Config(layer)).quantize_model(net(), [X])


def train(model, forward, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    outputs = []
    for step in range(steps):
        optimizer.zero_grad()
        outputs.append(forward(X * (1 + step / 4)))
        outputs[-1].square().sum().backward()
        optimizer.step()
    return outputs


ORDINARY = (("eager", "following"), ("graph", "lsq"))
MODES = [
    pytest.param(m, c, marks=() if (m, c) in ORDINARY else pytest.mark.nightly, id=f"{m}-{c}")
    for m in ("eager", "graph")
    for c in LAYERS
]


@pytest.mark.parametrize(("mode", "case"), MODES)
def test_compiled_training_has_the_bits_of_training(case, mode):
    """More steps than torch compiles one function for, so nothing may be compiled per step."""
    model = quantized(case, mode).train()
    follow_ranges(model, steps=4)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    backend = "eager" if (mode, case) in ORDINARY else "aot_eager"
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=4):
        outputs = train(other, compiled, 7)
    expected = train(model, model, 7)
    assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))
    state, start = model.state_dict(), quantized(case, mode).state_dict()
    assert all(torch.equal(x, state[name]) for name, x in other.state_dict().items())
    ranges = [name for name in start if name.endswith(("scale", "learned_range"))]
    assert all(not torch.equal(state[name], start[name]) for name in ranges) or case == "tqt"


@pytest.mark.parametrize(("mode", "case"), MODES)
def test_models_are_exported_before_they_are_frozen(case, mode):
    model = quantized(case, mode).eval()
    program = torch.export.export(model, (X,))
    graph = program.module()
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    assert torch.equal(graph(x), model(y))
    graph(x).sum().backward()
    model(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    if mode == "eager":  # without gradients, axes may have any size
        with torch.no_grad():
            shapes = ({0: torch.export.Dim("batch")},)
            program = torch.export.export(model, (X,), dynamic_shapes=shapes)
            more = torch.cat([X, X, X])
            assert torch.equal(program.module()(more), model(more))


def test_ranges_of_edges_train_per_channel():
    model = quantized("lsq per channel", "graph").train()
    edge = next(iter(edge_quantizers(model).values()))
    assert edge.learned_range.shape == (3,)
    before = edge.scale
    train(model, model, 3)
    assert (edge.scale != before).all()
    frozen = ModelQuantizer.freeze(model.eval())
    eager = quantized("lsq per channel", "eager")
    assert torch.equal(before, eager[0].input_quantizer.scale)
    assert torch.isfinite(frozen(X)).all()


def test_channels_of_any_size_have_no_trained_range():
    x, shapes = X[0], ({1: torch.export.Dim("tokens")},)
    graph = export(nn.Sequential(nn.Linear(4, 4)).eval(), x, dynamic_shapes=shapes)
    config = graph_config(QuantizationConfig(CHANNELS, None, INT8))
    with pytest.raises(ValueError, match=r"input_1 has any size along ch_axis=1"):
        ModelQuantizer(config).quantize_model(graph, [x])
