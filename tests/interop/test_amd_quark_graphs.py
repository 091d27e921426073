"""Graph mode against amd-quark 0.13: scales and outputs of the same network and configuration.

The numbers are from amd-quark 0.13 with torch 2.13 and torchao, by the same lines.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QLayerConfig, QTensorConfig, ShiftLimits
from quark.torch.quantization.graph_mode.edges import edge_quantizers
from quark.torch.quantization.preparation import quantized_layers
from tests.unit.quantization.graph_mode.networks import export, graph_config, norm

FLOAT = QTensorConfig(
    dtype="int8",
    qscheme="per_tensor",
    observer_cls="PerTensorMinMaxObserver",
    symmetric=True,
    scale_type="float",
    round_method="half_even",
    is_dynamic=False,
)
POF2 = replace(FLOAT, observer_cls="PerTensorPowOf2MinMaxObserver", scale_type="pof2")
# scales of edges, (weight, bias) of layers, the first row of the outputs
EXPECTED = {
    "float": (
        [0.0328166634, 0.0174281429, 0.0083855335, 0.0204910394, 0.0051557859, 0.0028478946],
        [
            *(1.8206888e-3, 1.0010686e-3, 9.240235e-4, 9.153626e-4),
            *(2.4133530e-3, 2.5817412e-3, 2.2637579e-3, 2.2170730e-3),
        ],
        [0.1367, -0.3645, 0.0940, 0.0313, 0.2876, -0.2250, -0.0627, -0.2164, -0.0342, 0.1282],
    ),
    "pof2": (
        [2**-5, 2**-6, 2**-7, 2**-6, 2**-8, 2**-8],
        [2**-9, 2**-10, 2**-10, 2**-10, 2**-9, 2**-9, 2**-9, 2**-9],
        [0.0703, -0.2969, 0.0938, 0.0273, 0.2969, -0.2305, -0.0625, -0.1953, -0.0391, 0.1562],
    ),
}


class Net(nn.Module):
    """Convolutions, a batch norm, a sum, a concatenation and a pool."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn = norm(8)
        self.c2, self.c3 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        y = self.bn(self.stem(x)).relu()
        z = (self.c2(y) + y).relu()
        joined = torch.cat([z, self.c3(z)], 1)
        return self.head(nn.functional.adaptive_avg_pool2d(joined, 1).flatten(1))


@pytest.mark.parametrize("case", EXPECTED)
def test_scales_and_outputs_are_those_of_amd_quark(case):
    spec = FLOAT if case == "float" else POF2
    limits = None if case == "float" else ShiftLimits()
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(2, 3, 16, 16, generator=generator) for _ in range(3)]
    config = graph_config(QLayerConfig(spec, spec, spec, spec), shift_limits=limits)
    graph = ModelQuantizer(config).quantize_model(export(Net().eval(), data[0]), data)
    frozen = ModelQuantizer.freeze(graph)
    edges = [float(q.scale) for q in edge_quantizers(frozen).values()]
    layers = [
        float(q.scale)
        for _, layer in quantized_layers(frozen)
        for q in layer.parameter_quantizers().values()
    ]
    expected_edges, expected_layers, outputs = EXPECTED[case]
    assert edges == pytest.approx(expected_edges, rel=1e-6)
    assert layers == pytest.approx(expected_layers, rel=1e-6)
    with torch.no_grad():
        assert frozen(data[0])[0].tolist() == pytest.approx(outputs, abs=6e-5)
