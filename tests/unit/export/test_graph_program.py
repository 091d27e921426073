from dataclasses import replace

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.export import export_program
from quark.torch.quantization.config.config import (
    BFP16Spec,
    QuantizationConfig,
)
from tests.unit.quantization.graph_mode.networks import (
    CHANNELS,
    EVERYTHING,
    INT8,
    INT32,
    NETWORKS,
    UINT8,
    export,
    frozen_graph,
    graph_config,
    images,
    network,
)

INT4 = replace(CHANNELS, dtype="int4")
INT16 = replace(INT8, dtype="int16")
LAYERS = {
    "int8": EVERYTHING,
    "uint8, channels": QuantizationConfig(UINT8, UINT8, CHANNELS, INT32),
    "int16, int4 weights": QuantizationConfig(INT16, INT16, INT4),
    "weights alone": QuantizationConfig(weight=CHANNELS),
}


def frozen(model, layer=EVERYTHING, **options):
    data = [x.to(next(model.parameters()).dtype) for x in images(3)]
    return frozen_graph(export(model, data[0], **options), layer, data)


def calls(program):
    nodes = program.graph_module.graph.nodes
    return [n for n in nodes if n.op == "call_function" and "quantized_decomposed" in str(n.target)]


@pytest.mark.parametrize(
    ("name", "layer"),
    [(name, layer) for name in NETWORKS for layer in [*LAYERS][: None if name == "unet" else 2]],
)
@pytest.mark.sampled(3)
def test_programs_have_the_bits_of_the_graph(name, layer):
    model, (x,) = frozen(network(name), LAYERS[layer]), images(1)
    code = model.code
    program = export_program(model, (x,))
    assert torch.equal(program.module()(x), model(x)) and model.code == code
    operators = {str(node.target) for node in program.graph_module.graph.nodes}
    assert not any("quark" in operator for operator in operators)
    assert len(calls(program)) >= 4


@pytest.mark.parametrize("layer", ["int8", "uint8, channels", "int16, int4 weights"])
def test_weights_can_be_values_that_the_program_quantizes(layer):
    model, (x,) = frozen(network("unet"), LAYERS[layer]), images(1)
    program = export_program(model, (x,), fold_quantize=False)
    assert torch.equal(program.module()(x), model(x))
    weights = {n: b for n, b in program.named_buffers() if n.endswith("weight.values")}
    assert weights and all(b.dtype == torch.float32 for b in weights.values())
    assert not any(b.dtype == torch.int8 for b in program.buffers())
    inputs = program.graph_signature.inputs_to_buffers
    readers = [u for n in program.graph.nodes if inputs.get(n.name) in weights for u in n.users]
    assert len(readers) == len(weights)
    assert all("quantized_decomposed.quantize_per_" in str(n.target) for n in readers)


def test_an_identity_in_front_of_sums_keeps_their_rounding():
    """OpenVINO leaves out a rounding that stands directly between a convolution and a sum."""
    model, (x,) = frozen(network("resnet")), images(1)
    folded, program = (export_program(model, (x,), fold_quantize=f) for f in (True, False))
    assert torch.equal(program.module()(x), model(x))
    assert "leaky_relu" not in str(folded.graph)
    identities = [n for n in program.graph.nodes if "leaky_relu" in str(n.target)]
    assert len(identities) == 2  # of two residual blocks
    for node in identities:
        (reader,) = node.users
        assert node.args[1] == 1.0 and "conv" in str(node.args[0].target)
        assert "quantize_per_tensor" in str(reader.target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_programs_of_half_precision(dtype):
    model, x = frozen(network("resnet").to(dtype)), images(1)[0].to(dtype)
    for fold_quantize in (True, False):
        y = export_program(model, (x,), fold_quantize=fold_quantize).module()(x)
        assert y.dtype == dtype and torch.equal(y, model(x))


def test_readers_have_a_dequantize_of_their_own_and_weights_are_codes():
    program = export_program(frozen(network("resnet"), LAYERS["uint8, channels"]), tuple(images(1)))
    for node in calls(program):
        if "dequantize" in str(node.target):
            assert len(node.users) == 1
    tensors = dict(program.named_buffers())
    assert tensors["blocks.0.conv1.weight.codes"].dtype == torch.int8
    assert tensors["blocks.0.conv1.bias"].dtype == torch.float32
    assert not any(
        "networks.py" in str(node.meta.get("stack_trace")) for node in program.graph.nodes
    )


def test_axes_of_any_size_stay():
    model = frozen(network("transformer"), dynamic_shapes=({0: torch.export.Dim("rows")},))
    program = export_program(model, tuple(images(1)))
    x = torch.randn(5, 3, 16, 16)
    assert torch.equal(program.module()(x), model(x))


def test_programs_are_saved_and_loaded_by_torch(tmp_path):
    model, (x,) = frozen(network("unet")), images(1)
    torch.export.save(export_program(model, (x,)), tmp_path / "net.pt2")
    assert torch.equal(torch.export.load(tmp_path / "net.pt2").module()(x), model(x))


BFP16 = BFP16Spec(ch_axis=1).to_quantization_spec()
REFUSED = {
    "format of an edge": (QuantizationConfig(BFP16, weight=INT8), "edge .* has the format bfp16"),
    "format of a weight": (QuantizationConfig(weight=BFP16), "weight of stem has the format bfp16"),
    "dynamic": (
        QuantizationConfig(replace(INT8, is_dynamic=True), weight=INT8),
        "edge .* has other scales than one static scale",
    ),
    "rounding": (
        QuantizationConfig(replace(INT8, round_method="round"), weight=INT8),
        "edge .* has rounding by round",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_operator_is_refused(case):
    layer, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        export_program(frozen(network("resnet"), layer), tuple(images(1)))


@pytest.mark.parametrize("value", ["no", 1, None])
def test_flags_are_true_or_false(value):
    with pytest.raises(TypeError, match="fold_quantize: expected True or False, got"):
        export_program(frozen(network("resnet")), tuple(images(1)), fold_quantize=value)


def test_what_is_no_frozen_graph_is_refused():
    x = tuple(images(1))
    with pytest.raises(TypeError, match="expected a quantized graph, got a UNet"):
        export_program(network("unet"), x)
    quantized = ModelQuantizer(graph_config()).quantize_model(export(network("unet")), images())
    with pytest.raises(ValueError, match="not frozen"):
        export_program(quantized, x)
