"""ONNX files run by ONNX Runtime: every format, granularity and operator, codes bit for bit."""

import numpy as np
import pytest
import torch
from torch import nn

from quark.torch import export_onnx
from quark.torch.export.onnx.dequantize_linear import code_type
from quark.torch.numerics.codec import decode
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import QSchemeType
from tests.configurations import quantized, spec

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

GRANULARITIES = {
    "per_tensor": {},
    "per_channel": {},
    "per_group": {"group_size": 8},
    "per_block": {"block_size": (8, 8)},
}
SYMMETRIC = ["int2", "int3", "int4", "uint4", "uint5", "int8", "uint8", "int16", "uint16"]
SYMMETRIC += ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4"]
ASYMMETRIC = ["int3", "int4", "uint4", "int8", "uint8", "uint16"]
SAMPLE = ["int3", "uint4", "int8", "uint16", "fp8_e5m2", "fp4", "mx9"]  # each type of ONNX
GRID = {
    **{f"{d} {q}": spec(d, q, **sizes) for d in SYMMETRIC for q, sizes in GRANULARITIES.items()},
    **{
        f"{d} {q} asymmetric": spec(d, q, symmetric=False, **sizes)
        for d in ASYMMETRIC
        for q, sizes in GRANULARITIES.items()
    },
}
WEIGHTS = {
    **GRID,
    "int8 whole axis": spec("int8", "per_group", group_size=-1),
    "int8 float16 scales": spec("int8", "per_channel", scale_type="float16"),
    "uint8 powers of two": spec("uint8", "per_channel", scale_type="pof2"),
    "mx fp4": QuantizationSpec("mx", mx_element_dtype="fp4", ch_axis=-1),
    "mx int8": QuantizationSpec("mx", mx_element_dtype="int8", ch_axis=-1),
    "mx6": scheme("w_mx6").weight,
    "mx9": scheme("mx9").weight,
    "bfp16": scheme("w_bfp16").weight,
    "bfloat16": QuantizationSpec("bfloat16"),
    "nvfp4": scheme("nvfp4_weight_only").weight,
    "two stages": scheme("int4_fp8").weight,
}
PER_TOKEN = {"qscheme": "per_channel", "ch_axis": -1, "is_dynamic": True}
PER_GROUP = {"qscheme": "per_group", "ch_axis": -1, "group_size": 4, "is_dynamic": True}
ACTIVATIONS = {
    **{d: spec(d) for d in ("int4", "int8", "uint8", "int16", "uint16", "fp8_e4m3", "fp8_e5m2")},
    **{
        f"{d} {name}": spec(d, **how)
        for d in ("int4", "int8", "uint8", "fp8_e4m3")
        for name, how in (
            ("dynamic", {"is_dynamic": True}),
            ("per token", PER_TOKEN),
            ("per group", PER_GROUP),
        )
    },
    "int8 asymmetric": spec("int8", symmetric=False),
    "uint8 asymmetric": spec("uint8", symmetric=False),
    "uint8 asymmetric per token": spec("uint8", symmetric=False, **PER_TOKEN),
    "int8 float zero point": spec("int8", symmetric=False, zero_point_type="float32"),
    "int8 powers of two": spec("int8", scale_type="pof2"),
    "int8 per channel": spec("int8", "per_channel", ch_axis=1),
    "mx fp4": QuantizationSpec("mx", mx_element_dtype="fp4", ch_axis=-1),
    "mx9": scheme("mx9").input_tensors,
    "nvfp4": scheme("nvfp4").input_tensors,
    "bfloat16": QuantizationSpec("bfloat16"),
    "float16": QuantizationSpec("float16"),
}
PARTNERS = {
    "int8": spec("int8", "per_channel"),
    "bytes in groups": spec("uint8", "per_group", group_size=8),
    "int4": spec("int4", "per_group", group_size=8),
    "fp8": spec("fp8_e4m3"),
    "floats": None,
}
CASES = {
    **{f"weight {n}": QuantizationConfig(weight=s) for n, s in WEIGHTS.items()},
    **{
        f"input {n} by {p}": QuantizationConfig(input_tensors=s, weight=w)
        for n, s in ACTIVATIONS.items()
        for p, w in PARTNERS.items()
        if p in ("int8", "fp8") or n in ("int8", "uint8", "int16", "mx fp4")
    },
    **{
        f"output {n}": QuantizationConfig(weight=PARTNERS["int8"], output_tensors=s)
        for n, s in ACTIVATIONS.items()
        if n != "int8 per channel"
    },
    "bias of 8 bits": QuantizationConfig(weight=spec("int8"), bias=spec("int8")),
    "bias of 16 bits": QuantizationConfig(weight=spec("fp8_e4m3"), bias=spec("int16")),
}
OPERATORS = {
    "Linear": (lambda: nn.Linear(24, 16), lambda n: torch.randn(n, 5, 24)),
    "Conv2d": (
        lambda: nn.Conv2d(8, 16, 2, stride=2, padding=1),
        lambda n: torch.randn(n, 8, 8, 8),
    ),
    "Embedding": (lambda: nn.Embedding(40, 16), lambda n: torch.randint(0, 40, (n, 6))),
}


def fits(operator, case):
    """Everything goes through linear layers, a sample of it through the others."""
    kind, dtype = case.split()[:2]
    sample = {"weight": SAMPLE, "input": ("int8", "fp8_e4m3"), "bias": ("of",)}
    return operator == "Linear" or (
        dtype in sample.get(kind, ()) and (operator == "Conv2d" or kind == "weight")
    )


ALL = [(operator, case) for operator in OPERATORS for case in CASES if fits(operator, case)]


class Rack(nn.Module):
    """Layers side by side.

    Linear layers of which only the weight is quantized get a matrix: a graph of a product with
    more axes takes a third longer to trace.
    """

    def __init__(self, layers, cases):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.takes_rows = [
            isinstance(layer, nn.Linear) and case.startswith("weight")
            for layer, case in zip(layers, cases, strict=True)
        ]

    def forward(self, x):
        rows = x[:, 0]
        return tuple(
            layer(rows if takes_rows else x)
            for layer, takes_rows in zip(self.layers, self.takes_rows, strict=True)
        )


def tensors_of(path):
    return {i.name: i for i in onnx.load(path / "quark_model.onnx").graph.initializer}


def numbers(tensor):
    return torch.from_numpy(onnx.numpy_helper.to_array(tensor).astype(np.float64))


@pytest.fixture(scope="module")
def racks(request, tmp_path_factory, run_onnx):
    """By operator: layers of the cases that run, what they return, what the file returns, tensors.

    A graph has only the cases that run: tracing all of them takes half a minute.
    """
    made = {}
    items = [item for item in request.session.items if item.path == request.path]
    chosen = {tuple(item.callspec.params.values()) for item in items}

    def rack(operator):
        if operator not in made:
            build, example = OPERATORS[operator]
            names = [case for kind, case in ALL if kind == operator and (kind, case) in chosen]
            model = Rack([build() for _ in names], names)
            layers = {f"layers.{i}": CASES[case] for i, case in enumerate(names)}
            config = Config(QuantizationConfig(), layer_quant_config=layers)
            model = quantized(model.eval(), config, [example(4) for _ in range(2)])
            path = tmp_path_factory.mktemp(operator) / "model"
            export_onnx(model, path, example(1), do_constant_folding=False)
            x = example(3)
            with torch.no_grad():
                expected = model(x)
            found = zip(layers, model.layers, expected, run_onnx(path, x), strict=True)
            made[operator] = dict(zip(names, found, strict=True)), tensors_of(path)
        return made[operator]

    return rack


def sampled_grid(operator, case):
    """Everything that is no cell of a grid runs by day too."""
    is_alone = operator == "Linear" and case.removeprefix("weight ") in WEIGHTS.keys() - GRID
    return pytest.param(operator, case, marks=[] if is_alone else pytest.mark.sampled(4))


@pytest.mark.parametrize(("operator", "case"), [sampled_grid(*each) for each in ALL])
def test_the_file_computes_what_the_model_does_and_has_its_codes(racks, operator, case):
    cases, tensors = racks(operator)
    name, layer, expected, found = cases[case]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    if case.startswith("weight"):
        state = layer.quantized_tensor("weight")
        check_codes_and_scales(state, tensors, f"{name}.weight", operator == "Linear")


def check_codes_and_scales(state, tensors, prefix, transposed):
    """Compare what a file has of a weight with the weight."""
    kind = code_type(state.spec.coded.fmt) or state.spec.dtype.name.upper()
    codes = tensors[f"{prefix}.codes"]
    assert onnx.TensorProto.DataType.Name(codes.data_type) == kind
    found = numbers(codes)
    found = found.T if transposed else found.reshape(state.codes.shape)
    fmt = state.spec.coded.fmt
    if fmt.sub_block:  # sub-blocks have the step of their block
        scale = numbers(tensors[f"{prefix}.scale"])
        scale = scale.T if transposed else scale
        values = found.flatten(1) * scale.repeat_interleave(fmt.block, 1)[:, : found[0].numel()]
        assert values.equal(state.value(torch.float64).flatten(1))
        assert scale.numel() * fmt.block < 1.4 * found.numel()
        return
    if f"{prefix}.table" in tensors:
        found = numbers(tensors[f"{prefix}.table"])[found.long()]
    wanted = decode(state.codes, fmt) if fmt.is_encoded else state.codes
    assert found.equal(wanted.double())
    if state.spec.quantizes_codes or not fmt.scaled:
        return
    scale = numbers(tensors[f"{prefix}.scale"])
    scale = scale.T if transposed and scale.dim() == 2 else scale
    if state.spec.qscheme is QSchemeType.per_block:
        scale = scale[::8]
    assert scale.flatten().equal(state.scale.double().flatten())
