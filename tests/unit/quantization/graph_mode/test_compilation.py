"""Frozen graphs under ``torch.export.export`` and ``torch.compile``: every family of formats."""

import pytest
import torch

from quark.torch.quantization.config.config import (
    BFP16Spec,
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    MX6Spec,
    OCP_MXFP4Spec,
    OCP_MXFP8E4M3Spec,
    QuantizationConfig,
)
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.unit.quantization.graph_mode.networks import (
    CHANNELS,
    INT8,
    UINT8,
    export,
    frozen_graph,
    images,
    network,
)

INT16 = QuantizationSpec("int16", symmetric=True, qscheme="per_tensor", is_dynamic=False)
INT4 = QuantizationSpec("int4", symmetric=True, qscheme="per_channel", ch_axis=0, is_dynamic=False)
GROUPS = Int4PerGroupSpec(ch_axis=1, group_size=8).to_quantization_spec()
FP8 = FP8E4M3PerTensorSpec("min_max", is_dynamic=False).to_quantization_spec()
BLOCKS = {
    "mxfp4": OCP_MXFP4Spec(ch_axis=1).to_quantization_spec(),
    "mxfp8": OCP_MXFP8E4M3Spec(ch_axis=1).to_quantization_spec(),
    "mx6": MX6Spec(ch_axis=1, block_size=8).to_quantization_spec(),
    "bfp16": BFP16Spec(ch_axis=1).to_quantization_spec(),
}
FAMILIES = {
    "int8": QuantizationConfig(INT8, INT8, INT8),
    "uint8, channels": QuantizationConfig(UINT8, UINT8, CHANNELS),
    "int16, int4 weights": QuantizationConfig(INT16, INT16, INT4),
    "int4 in groups": QuantizationConfig(weight=GROUPS),
    "fp8": QuantizationConfig(FP8, FP8, FP8),
    **{name: QuantizationConfig(spec, spec, spec) for name, spec in BLOCKS.items()},
}


ORDINARY = ("int8", "int16, int4 weights", "int4 in groups", "mxfp4")


@pytest.mark.parametrize(
    "name", [n if n in ORDINARY else pytest.param(n, marks=pytest.mark.nightly) for n in FAMILIES]
)
@pytest.mark.sampled(2)
def test_frozen_graphs_are_exported_and_compiled_again(name):
    graph, (x,) = export(network("resnet")), images(1)
    # 27 inputs of the first layer have no groups of 8.
    model = frozen_graph(graph, FAMILIES[name], exclude=["stem"] if "groups" in name else [])
    with torch.no_grad():
        y = model(x)
        assert not torch.equal(y, network("resnet")(x))
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), y)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), y)
