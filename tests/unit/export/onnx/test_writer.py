"""Calls, files, options and errors of an ONNX export, on small modules."""

from pathlib import Path

import pytest
import torch
from torch import nn

from quark.torch import ModelExporter, ModelImporter, ModelQuantizer, export_onnx
from quark.torch.export.onnx.inputs import ModelInputs
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from tests import configurations
from tests.configurations import spec

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Network(nn.Module):
    """Convolutions and a linear layer, as networks for images have them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 16, 3, stride=2, groups=2)
        self.head = nn.Linear(16, 5)

    def forward(self, image):
        x = torch.relu(self.norm(self.stem(image)))
        x = torch.relu(self.deep(x)).mean((2, 3))
        return self.head(x)


class Parallel(nn.Module):
    """Layers that read the same inputs, so that one export shows all of them."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers)


class Pair(nn.Module):
    """Two inputs, an option and named outputs."""

    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(20, 16), nn.Linear(16, 8)

    def forward(self, ids, weights, doubled=False):
        x = self.mix((self.words(ids) * weights.unsqueeze(-1)).sum(1))
        return {"mixed": 2 * x if doubled else x, "total": x.sum(-1)}


def quantized(model, name="int8", data=None, **rest):
    config = Config(scheme(name, 8) if isinstance(name, str) else name, **rest)
    return configurations.quantized(model.eval(), config, data)


def linear(name="int4_wo_32", width=64):
    return quantized(nn.Sequential(nn.Linear(width, 8)), name, [torch.randn(4, width)])


def parallel(names, width=64, dtype=torch.float32):
    """Linear layers without biases, each quantized by a scheme of its own."""
    layers = {f"layers.{i}": scheme(name, 32) for i, name in enumerate(names)}
    model = Parallel([nn.Linear(width, 8, bias=False) for _ in names]).to(dtype)
    return quantized(model, QuantizationConfig(), layer_quant_config=layers)


def read(path):
    return onnx.load(path / "quark_model.onnx")


def axes(value):
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def operators(path):
    return [node.op_type for node in read(path).graph.node]


def close(result, expected, name=""):
    torch.testing.assert_close(
        result, expected, rtol=0, atol=1e-4, msg=lambda text: f"{name} {text}"
    )


@torch.no_grad()
def test_a_network_of_convolutions(tmp_path, run_onnx):
    model = quantized(Network(), data=[torch.randn(2, 3, 8, 8)])
    ModelExporter(tmp_path / "out").export_onnx_model(model, torch.randn(1, 3, 8, 8))
    assert axes(read(tmp_path / "out").graph.input[0]) == ["batch", 3, 8, 8]
    assert operators(tmp_path / "out").count("QuantizeLinear") == 3
    for batch in (1, 5):
        image = torch.randn(batch, 3, 8, 8)
        close(run_onnx(tmp_path / "out", image)[0], model(image))


@torch.no_grad()
def test_several_inputs_by_name(tmp_path, run_onnx):
    model = quantized(Pair(), "int8_wo")
    args = {"weights": torch.rand(2, 4), "ids": torch.randint(0, 20, (2, 4)), "doubled": True}
    shapes = {"ids": {0: "rows", 1: "words"}, "weights": {0: "rows", 1: "words"}}
    export_onnx(model, tmp_path / "out", args, dynamic_shapes=shapes)
    graph = read(tmp_path / "out").graph
    assert [(i.name, axes(i)) for i in graph.input] == [
        ("ids", ["rows", "words"]),
        ("weights", ["rows", "words"]),
    ]
    assert [(o.name, axes(o)) for o in graph.output] == [
        ("mixed", ["rows", 8]),
        ("total", ["rows"]),
    ]
    ids, weights = torch.randint(0, 20, (3, 7)), torch.rand(3, 7)
    expected = model(ids, weights, doubled=True)
    for found, name in zip(run_onnx(tmp_path / "out", ids, weights), expected, strict=True):
        close(found, expected[name])


def test_names_of_inputs_and_outputs_can_be_given(tmp_path):
    exporter = ModelExporter(tmp_path / "out")
    exporter.export_onnx_model(linear(), (torch.randn(2, 64),), ["a"], ["b"], dynamic_shapes={})
    graph = read(tmp_path / "out").graph
    assert [(v.name, axes(v)) for v in (*graph.input, *graph.output)] == [
        ("a", [2, 64]),
        ("b", [2, 8]),
    ]


@pytest.mark.parametrize("size", [-1, 1 << 31])
def test_sizes_that_no_file_has(tmp_path, size):
    with pytest.raises(ValueError, match=f"max_file_size={size}: expected a number of bytes"):
        export_onnx(linear(), tmp_path / "out", torch.randn(2, 64), max_file_size=size)
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_large_models_have_a_file_of_weights(tmp_path, run_onnx):
    model, x = linear(width=512), torch.randn(3, 512)
    export_onnx(model, tmp_path / "one", x)
    export_onnx(model, tmp_path / "two", x, max_file_size=1000)
    names = {f.name for f in (tmp_path / "one").iterdir()}
    assert names == {"quark_model.onnx", "SHA256SUMS"}
    files = sorted((tmp_path / "two").glob("quark_model*"))
    assert [f.name for f in files] == ["quark_model.onnx", "quark_model.onnx.data"]
    assert files[0].stat().st_size < 2000
    assert 2048 <= files[1].stat().st_size < 3000  # 8 * 512 codes of four bits
    (tmp_path / "two").rename(tmp_path / "moved")
    assert run_onnx(tmp_path / "moved", x)[0].equal(run_onnx(tmp_path / "one", x)[0])


BITS = {  # of a code in a MatMulNBits, by scheme
    "int2_wo_32": 2,
    "int3_wo_32": 4,
    "int4_wo_32": 4,
    "uint4_wo_32": 4,
    "int4_wo_per_channel": 4,
    "uint4_wo_per_channel": 4,
    "int8_wo_32": 8,
    "int8_wo": 8,
}


@torch.no_grad()
@pytest.mark.parametrize("width", [64, 96])
def test_products_of_the_runtime(tmp_path, run_onnx, width):
    model, x = parallel(BITS, width), torch.randn(3, width)
    export_onnx(model, tmp_path / "out", x, matmul_nbits=True)
    nodes = [n for n in read(tmp_path / "out").graph.node if n.op_type == "MatMulNBits"]
    for name, node in zip(BITS, nodes, strict=True):
        sizes = {"K": width, "N": 8, "bits": BITS[name], "block_size": 32}
        assert {a.name: a.i for a in node.attribute} == sizes, name
    results = run_onnx(tmp_path / "out", x, entries={})
    for name, result, expected in zip(BITS, results, model(x), strict=True):
        close(result, expected, name)


def test_products_of_the_runtime_leave_out_what_they_cannot_do(tmp_path):
    group = {"qscheme": "per_group", "ch_axis": 1, "is_dynamic": False}
    layers = {
        "0": QuantizationConfig(weight=QuantizationSpec("int4", group_size=8, **group)),
        "1": QuantizationConfig(weight=QuantizationSpec("fp8_e4m3", group_size=32, **group)),
        "2": QuantizationConfig(weight=QuantizationSpec("int4", group_size=32, **group)),
    }
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in layers))
    model = quantized(model, QuantizationConfig(), layer_quant_config=layers)
    export_onnx(model, tmp_path / "out", torch.randn(2, 64), matmul_nbits=True)
    kinds = [kind for kind in operators(tmp_path / "out") if "Mat" in kind]
    assert kinds == ["MatMul", "MatMul", "MatMulNBits"]


@pytest.mark.parametrize(
    ("name", "wanted", "found"),
    [
        ("int8", None, 20),
        ("int4_wo_32", None, 21),
        ("int2_wo_32", None, 25),
        ("int8", 18, 18),
        ("fp8", 19, 19),
        ("int4_wo_32", 23, 23),
    ],
)
@pytest.mark.sampled(2)
def test_operators_are_as_old_as_they_can_be(tmp_path, name, wanted, found):
    export_onnx(linear(name), tmp_path / "out", torch.randn(2, 64), opset_version=wanted)
    onnx.checker.check_model(str(tmp_path / "out" / "quark_model.onnx"))
    assert {o.domain: o.version for o in read(tmp_path / "out").opset_import}[""] == found


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_codes_fill_their_bits(tmp_path, run_onnx, dtype):
    """Rows of one bring back the weights, and constants are folded although they are small."""
    bits = {"mxfp4_weight_only": 4, "nvfp4_weight_only": 4, "int3_wo_32": 4, "int2_wo_32": 2}
    model, x = parallel(bits, dtype=dtype), torch.eye(64, dtype=dtype)
    export_onnx(model, tmp_path / "out", x)
    codes = {t.name: t for t in read(tmp_path / "out").graph.initializer if "codes" in t.name}
    results = run_onnx(tmp_path / "out", x)
    assert len(codes) == len(bits)
    for i, (name, result) in enumerate(zip(bits, results, strict=True)):
        stored = codes[f"layers.{i}.weight.codes"].raw_data
        assert len(stored) == 64 * 8 * bits[name] // 8, name
        assert result.equal(model.layers[i].value("weight").T), name


@torch.no_grad()
def test_layers_call_functions_that_are_there_once(tmp_path, run_onnx):
    """One for each width of the inputs, however many layers of that width there are."""
    layers = [nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 32)]
    model = quantized(nn.Sequential(*layers), "mxfp4")
    export_onnx(model, tmp_path / "out", torch.randn(2, 64))
    found = read(tmp_path / "out")
    calls = [node.op_type for node in found.graph.node if node.domain == "quark"]
    assert calls == [calls[0]] * 3 + [calls[3]]
    assert [f.name for f in found.functions] == [calls[0], calls[3]]
    x = torch.randn(5, 64)
    close(run_onnx(tmp_path / "out", x)[0], model(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.sampled(2)
def test_imported_models(tmp_path, build, quantize, export, logits, run_onnx, dtype):
    sizes = {"dtype": dtype, "num_hidden_layers": 1}
    model = quantize(build(**sizes), "uint4_wo_32")
    loaded = ModelImporter(export(model), "safetensors").import_model_info(build(**sizes))
    ids = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(2))
    export_onnx(loaded, tmp_path / "out", ids, dynamic_shapes={})  # other shapes take longer
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    found = run_onnx(tmp_path / "out", ids)[0]
    torch.testing.assert_close(found, logits(model), rtol=0, atol=tolerance)


def test_a_model_is_left_as_it_was(tmp_path, unchanged):
    model = quantized(
        Pair(), "int8", [{"ids": torch.ones(2, 3).long(), "weights": torch.rand(2, 3)}]
    )
    model.train()
    with unchanged(model):
        export_onnx(
            model, tmp_path / "out", (torch.ones(2, 3).long(), torch.rand(2, 3)), dynamic_shapes={}
        )


def test_a_file_tells_nothing_of_where_it_was_made(tmp_path):
    export_onnx(linear(), tmp_path / "out", torch.randn(2, 64))
    text = (tmp_path / "out" / "quark_model.onnx").read_bytes()
    for path in (Path(torch.__file__).parent, Path(__file__).parents[3]):
        assert str(path).encode() not in text


def test_earlier_files_stay_when_an_export_fails(tmp_path, monkeypatch):
    model, x = linear(), torch.randn(2, 64)
    export_onnx(model, tmp_path / "out", x)
    before = (tmp_path / "out" / "quark_model.onnx").read_bytes()
    with pytest.raises(FileExistsError):
        export_onnx(model, tmp_path / "out", x)

    def fail(*args, **rest):
        Path(args[1]).write_bytes(b"half")
        raise OSError("the disk is gone")

    monkeypatch.setattr("onnx_ir.save", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        export_onnx(model, tmp_path / "out", x, overwrite=True)
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "quark_model.onnx").read_bytes() == before


BLOCKS = {"qscheme": "per_block", "block_size": (4, 8)}
REFUSED = {
    "fp8_e5m3": (QuantizationConfig(weight=spec("fp8_e5m3")), "no type for fp8_e5m3"),
    "int32": (QuantizationConfig(weight=spec("int32")), "no type for int32"),
    "float zero points": (
        QuantizationConfig(weight=spec("int8", symmetric=False, zero_point_type="float32")),
        "no float zero points",
    ),
    "int32 activations": (
        QuantizationConfig(input_tensors=spec("int32")),
        "input_tensors it cannot compute int32",
    ),
    "other rounding": (
        QuantizationConfig(input_tensors=spec("int8", round_method="floor")),
        "rounds half to even, not by floor",
    ),
    "blocks of inputs": (
        QuantizationConfig(input_tensors=spec("int8", is_dynamic=True, **BLOCKS)),
        "cannot compute scales per_block",
    ),
    "dynamic powers of two beside zero points": (
        QuantizationConfig(
            output_tensors=spec("int8", is_dynamic=True, scale_type="pof2", symmetric=False)
        ),
        "cannot round dynamic scales where it has zero points",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_computes_is_said_before_any_work(tmp_path, name):
    config, said = REFUSED[name]
    model = quantized(nn.Sequential(nn.Linear(64, 64)), config, [torch.randn(8, 64)])
    with pytest.raises(ValueError, match=r"ONNX cannot hold 0: .*It holds weights of") as error:
        export_onnx(model, tmp_path / "out", torch.randn(2, 64))
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        ((torch.ones(2, 64), 1, 2), {}, "does not take input_args"),
        ({"y": torch.ones(2, 64)}, {}, "does not take input_args"),
        ((None,), {}, "no tensor among"),
        (torch.ones(2, 64), {"dynamic_shapes": {"y": {0: "a"}}}, "the inputs are ['input']"),
        (torch.ones(2, 64), {"dynamic_shapes": {"input": {2: "a"}}}, "has 2 axes"),
        (torch.ones(2, 64), {"dynamic_shapes": {"input": {1: "a"}}}, "cannot trace Sequential"),
        (torch.ones(2, 64), {"opset_version": 20}, "cannot hold 0: give 21 or more"),
        (torch.ones(2, 64), {"input_names": ["a", "b"]}, "input_names=['a', 'b'] are not 1"),
        (torch.ones(2, 64), {"output_names": ["a", "a"]}, "output_names=['a', 'a'] are not 1"),
    ],
)
def test_calls_that_make_no_sense(tmp_path, args, options, said):
    with pytest.raises(ValueError) as error:
        export_onnx(linear(), tmp_path / "out", args, **options)
    assert said in str(error.value)


@torch.no_grad()
def test_operators_that_torch_does_not_convert_to(tmp_path, monkeypatch):
    model = quantized(Network(), "int8_wo")
    image = torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match="opset_version=13 cannot hold stem: give 18 or more"):
        export_onnx(model, tmp_path / "out", image, opset_version=13)
    monkeypatch.setattr("quark.torch.export.onnx.writer.OLDEST_OPSET", 13)
    monkeypatch.setattr("quark.torch.export.onnx.dequantize_linear._OPSETS", {"INT8": 13})
    with pytest.raises(ValueError, match="cannot convert the model to opset_version=13"):
        export_onnx(model, tmp_path / "out", image, opset_version=13)


def test_casts_to_floats_of_8_bits_need_an_opset_that_has_them(tmp_path):
    model = linear(QuantizationConfig(input_tensors=scheme("nvfp4").input_tensors))
    with pytest.raises(ValueError, match="opset_version=18 cannot hold 0: give 19 or more"):
        export_onnx(model, tmp_path / "out", torch.ones(2, 64), opset_version=18)


def test_a_model_that_is_not_frozen(tmp_path):
    model = ModelQuantizer(Config(scheme("int8_wo"))).quantize_model(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="not frozen"):
        export_onnx(model, tmp_path / "out", torch.ones(1, 8))


def test_bfloat16_is_exported_with_a_warning(tmp_path, caplog):
    model = quantized(nn.Sequential(nn.Linear(64, 8)).bfloat16(), "int8_wo")
    export_onnx(model, tmp_path / "out", torch.ones(1, 64, dtype=torch.bfloat16))
    assert "computes nothing on a CPU" in caplog.text
    (output,) = read(tmp_path / "out").graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16


def test_any_number_of_inputs_have_no_names():
    class Any(nn.Module):
        def forward(self, *xs):
            return xs[0]

    with pytest.raises(ValueError, match="takes any number of inputs"):
        ModelInputs.bind(Any(), (torch.ones(1), torch.ones(1)))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ImportError, match="pip install onnxscript"):
        export_onnx(linear(), tmp_path / "out", torch.ones(1, 64))
