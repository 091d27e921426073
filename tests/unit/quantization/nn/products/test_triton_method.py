"""Products of Triton: on the GPU of the machine, without one in the interpreter of Triton."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from quark.torch import set_runtime
from quark.torch.export.recognition import load_checkpoint
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.nn import runtime_layer
from quark.torch.quantization.nn.products import product, triton_functions, triton_method
from quark.torch.quantization.nn.products.method import Use
from quark.torch.quantization.nn.runtime import describe_runtime
from tests.configurations import config, groups, preset
from tests.unit.quantization.nn.products.test_panels import FORMATS, weight
from tests.unit.quantization.nn.test_runtime import MOE, difference, packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = [name for name in scheme_names() if not name.endswith(("_64", "_128"))]
ORDINARY = ["int3_wo_32", "w_uint4_per_group_asym", "int8", "fp8", "nvfp4", "mxfp6_e2m3"]
CASES = [n if n in ORDINARY else pytest.param(n, marks=pytest.mark.nightly) for n in NAMES]
WITHOUT = {"iq4_nl", "bfloat16", "float16"}
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
runs_triton = pytest.mark.triton


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    """Take Triton where panels are taken; layers are proved with one product, for speed."""
    monkeypatch.setitem(product.METHODS, "cpu", product.METHODS["cuda"])
    monkeypatch.setattr(triton_method, "_PROVED_ROWS", (3,))
    triton_functions.log_once.cache_clear()


def to_device(state):
    moved = {k: v.to(DEVICE) for k, v in state._asdict().items() if torch.is_tensor(v)}
    return state._replace(**moved)


def layers(weight, quantized=None, inputs=64, outputs=40, dtype=torch.float32, bias=True):
    """A packed layer, and the frozen one, given specifications of the weight and of inputs."""
    linear, x = nn.Linear(inputs, outputs, bias=bias).to(dtype), torch.randn(5, inputs).to(dtype)
    layer, frozen = packed(linear, config(weight, quantized, exclude=()), x)
    for owner, name in ((layer.input_quantizer, "scale"), (layer, "input_scale_2")):
        if getattr(owner, name, None) is not None:
            given = getattr(frozen[0]._input_quantizer, name.removeprefix("input_"))
            getattr(owner, name).copy_(given)
    return layer.to(DEVICE), frozen.to(DEVICE)


def check(layer, frozen, rows=(1, 3, 17, 128)):
    """Products, values and codes are those of the frozen layer."""
    expected, codes = layer.value("weight"), layer._stored("weight").clone()
    layer.set_runtime("auto")
    assert layer.product_name == "triton"
    assert torch.equal(layer.value("weight"), expected)
    assert torch.equal(layer._stored("weight"), codes)
    dtype = expected.dtype
    for count in rows:
        x = torch.randn(count, layer.input_width, dtype=dtype, device=DEVICE)
        y = layer(x)
        assert (y.dtype, y.shape) == (dtype, (count, layer.output_width))
        assert difference(y.float(), frozen(x).float()) < BOUNDS[dtype]
    layer.set_runtime("exact")
    assert torch.equal(layer(x), frozen(x))


@runs_triton
@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
def test_every_format_has_the_values_of_dequantize(dtype, monkeypatch):
    monkeypatch.setattr(triton_method, "_problem", lambda method, parts: "")
    fmt = dtype.value
    points = {
        "none": None,
        "one": torch.full((70, 2), 1),
        "many": torch.randint(fmt.qmin, fmt.qmax + 1, (70, 2)),
        "fractions": torch.rand(70, 2) + 0.3,
    }
    for name in list(points)[: 1 if fmt.is_float else 4]:
        state = to_device(weight(dtype, name == "none", points[name]))
        ((method, parts),) = triton_method.triton_methods(state, 32, Use(torch.float32))
        expected = dequantize(state.codes, state.scale, state.zero_point, state.scheme)
        assert torch.equal(method.decode(parts), expected)
        codes = method.codes(parts)
        assert codes.dtype == state.codes.dtype
        assert torch.equal(codes.view(torch.uint8), state.codes.view(torch.uint8))


@runs_triton
@pytest.mark.parametrize("name", CASES)
def test_every_scheme(name):
    layer, frozen = layers(scheme(name, 32).weight)
    if name in WITHOUT:
        layer.set_runtime("auto")
        assert layer.product_name == "unpacked at each use"
    else:
        check(layer, frozen)


@runs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["w_uint4_per_group_asym", "mxfp4"])
def test_half_types(name, dtype):
    check(*layers(scheme(name, 32).weight, dtype=dtype), rows=(1, 17))


@runs_triton
@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("int4_wo_per_channel", 2 * 37, 33),  # remainders of every tile
        ("fp8", 67, 1),
        ("int3_wo_per_channel", 8 * 9, 33),
        ("int4_wo_128", 512, 32),  # a scale for all columns of a tile
    ],
)
def test_shapes(name, inputs, outputs, monkeypatch):
    layer, frozen = layers(scheme(name).weight, None, inputs, outputs, bias=False)
    check(layer, frozen, rows=(1, 17))
    monkeypatch.setattr(triton_method, "_processors", lambda device: 64)  # sums in parts
    check(layer, frozen, rows=(1, 17))


@runs_triton
def test_rows_of_another_length_are_unpacked_at_each_use():
    layer, _ = layers(scheme("int3_wo_per_channel").weight, None, 8 * 9 + 4)
    layer.set_runtime("auto")
    assert layer.product_name == "unpacked at each use"


@runs_triton
def test_inputs_of_another_type():
    layer, frozen = layers(groups("int4", True))
    layer.set_runtime("auto")
    x = torch.randn(3, 64, dtype=torch.float64, device=DEVICE)
    assert difference(layer(x), frozen(x.float()).double()) < 1e-5
    assert layer(x[:0]).shape == (0, 40)


@runs_triton
def test_two_stages():
    layer, frozen = layers(scheme("int4_fp8").weight, bias=False)
    check(layer, frozen, rows=(1, 17))
    layer.set_runtime("auto")
    assert "unit" in layer.packed_product.parts


@runs_triton
def test_columns_in_the_order_of_groups():
    state = to_device(weight(Dtype.int4, True))
    order = torch.randperm(64, device=DEVICE)
    ((method, parts),) = triton_method.triton_methods(state, 32, Use(torch.float32))
    parts["order"], x = order, torch.randn(3, 64, device=DEVICE)
    values = torch.empty(70, 64, device=DEVICE).index_copy_(1, order, method.decode(parts))
    assert torch.equal(method.values(parts), values)
    assert difference(method.multiply(parts, x), x @ values.T) < 1e-5


@runs_triton
def test_a_wrong_kernel_is_refused_and_logged(monkeypatch, caplog):
    right = triton_method.TritonMethod.multiply_rows

    def wrong(self, parts, x):
        return right(self, parts, x) * 1.001

    monkeypatch.setattr(triton_method.TritonMethod, "multiply_rows", wrong)
    layer, frozen = layers(groups("int4", True))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            layer.set_runtime("auto")
    (record,) = caplog.records
    assert "the error of a product of 3 rows is 0.001" in record.message
    x = torch.randn(3, 64, device=DEVICE)
    assert torch.equal(layer(x), frozen(x))


def test_without_triton_weights_are_unpacked(monkeypatch, caplog):
    monkeypatch.setattr(triton_functions, "find_spec", lambda name: None)
    triton_functions.load_functions.cache_clear()
    layer, frozen = layers(groups("int4", True))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            layer.set_runtime("auto")
    (record,) = caplog.records
    assert "pip install triton" in record.message
    x = torch.randn(3, 64, device=DEVICE)
    assert layer.product_name == "unpacked at each use"
    assert torch.equal(layer(x), frozen(x))
    triton_functions.load_functions.cache_clear()


def test_layers_compute_as_before_where_triton_is_not_the_method(monkeypatch):
    monkeypatch.delitem(product.METHODS, "cpu")
    layer, _ = layers(groups("int4", True))
    layer.to("cpu").set_runtime("auto")
    assert layer.product_name == "unpacked at each use"


MODELS = [
    ("mxfp4", "llama", {}),
    pytest.param("w_int8_per_tensor_sym", "gpt2", {}, marks=pytest.mark.nightly),
    pytest.param("int4_wo_32", "mixtral", MOE, marks=pytest.mark.nightly),
]


@runs_triton
@pytest.mark.parametrize(("name", "kind", "changes"), MODELS)
def test_models(build, quantize, export, logits, monkeypatch, name, kind, changes):
    monkeypatch.setitem(runtime_layer.ONE_PASS, "cpu", runtime_layer.ONE_PASS["cuda"])
    directory = export(quantize(build(kind, num_hidden_layers=1, **changes), preset(name)))
    model = load_checkpoint(directory).eval().to(DEVICE)
    ids = torch.randint(3, 64, (1, 6), device=DEVICE)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    expected, tokens = logits(model), model.generate(ids, **options)
    set_runtime(model, "auto")
    assert "triton" in describe_runtime(model).values()
    assert difference(logits(model), expected) < 1e-4
    assert torch.equal(model.generate(ids, **options), tokens)


COMPILATION = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quark.torch.numerics.formats import Dtype
from quark.torch.quantization.nn.products import triton_column_kernels as column_kernels
from quark.torch.quantization.nn.products import triton_input_kernels as input_kernels
from quark.torch.quantization.nn.products import triton_kernels as kernels
from quark.torch.quantization.nn.products.arrangement import Arrangement
from quark.torch.quantization.nn.products.panels import Panels
from quark.torch.quantization.nn.products.triton_functions import load_functions
from quark.torch.quantization.nn.products.triton_inputs import Case
from quark.torch.quantization.nn.products.triton_method import Codes, Weight
from tests.unit.quantization.nn.products.test_compiled_inputs import SCHEMES
from tests.unit.quantization.nn.products.test_panels import weight

class Driver:
    def __init__(self, *target):
        self.target = GPUTarget(*target)
    def get_current_device(self):
        return self.target.warp_size  # Triton keeps kernels by device
    def get_current_stream(self, device):
        return 0
    def get_current_target(self):
        return self.target

load_functions(kernels), load_functions(input_kernels), load_functions(column_kernels)
matrix, order = torch.randn(256, 70), torch.arange(256)
x, y = torch.randn(17, 64).bfloat16(), torch.empty(1, 17, 70)
for target, binary in (("cuda", 90, 32), "cubin"), (("hip", "gfx942", 64), "hsaco"):
    driver.set_active(Driver(*target))
    for dtype, zeros in ((Dtype.int3, torch.arange(140).view(70, 2) % 7), (Dtype.fp4, None)):
        to = Arrangement.of_single_rows(70, 64, 32)
        panels, parts = Panels.pack(weight(dtype, zeros is None, zeros), to)
        weights, codes = Weight.of(panels, parts), Codes.of(panels.fmt, to, 64)
        tile = {"CODES": codes, "BLOCK_N": 32, "BLOCK_K": 64, "grid": (1, 1, 1)}
        for rows in (1, 16):
            made = kernels.multiply.warmup(
                x, y, 17, 1, weights, MULTIPLIED=triton.language.bfloat16, BLOCK_M=rows, **tile
            )
            assert made.asm[binary]
        assert kernels.dequantize.warmup(y, weights, **tile).asm[binary]
    for name in ("int8 per token", "mxfp4", "nvfp4"):
        scales, tensor_scale = (y if name == n else None for n in ("mxfp4", "nvfp4"))
        numbers = 17, 1, 64, None, None, tensor_scale
        made = input_kernels.quantize.warmup(
            x, x, scales, *numbers, grid=(1, 1), BLOCK_M=16,
            CASE=Case.of(SCHEMES[name], x.dtype), BLOCK_K=64, enable_fp_fusion=False,
        )
        assert made.asm[binary]
        for current, zeros, pruned in ((None, None, None), (matrix, matrix, matrix > 0)):
            tensors = matrix, current, matrix, matrix, matrix, order, matrix, zeros, pruned
            made = column_kernels.round_panel.warmup(
                *tensors, 128, 128, 70, 256, 1, grid=(3,), BLOCK_M=32, WIDTH=128,
                CASE=Case.of(SCHEMES[name], torch.float32), enable_fp_fusion=False,
            )
            assert made.asm[binary]
"""


@runs_triton
def test_kernels_compile_for_gpus_of_both_makers(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILATION], check=True, timeout=300)
