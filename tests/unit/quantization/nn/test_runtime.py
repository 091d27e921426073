"""Runtimes of loaded models: bits, bounds of differences, memory, and what stays the same."""

import copy
import io
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch import (
    ModelImporter,
    RuntimeOptions,
    disable_native_inference,
    enable_native_inference,
    export_safetensors,
    import_model_from_safetensors,
    set_runtime,
)
from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.nn.operators import QParamsLinear
from quark.torch.quantization.nn.products import product as products
from quark.torch.quantization.nn.runtime import describe_runtime
from tests.configurations import config, groups, preset, quantized

NAMES = [name for name in scheme_names() if not name.endswith(("_64", "_128"))]
ORDINARY = ["int4_wo_32", "w_uint4_per_group_asym", "w_int8_per_tensor_sym", "nvfp4", "int3_wo_32"]
CASES = [n if n in ORDINARY else pytest.param(n, marks=pytest.mark.nightly) for n in NAMES]
FASTER = ("auto", "fast")
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}


@pytest.fixture
def loaded(build, quantize, export):
    """Quantize a model of one block, write it and load it."""

    def loaded(config, name="llama", runtime="exact", **changes):
        model = build(name, **{"num_hidden_layers": 1, **changes})
        config = preset(config) if isinstance(config, str) else config
        directory = export(quantize(model, config))
        return load_checkpoint(directory, runtime=runtime).eval()

    return loaded


def difference(y, expected):
    return ((y - expected).abs().max() / expected.abs().max()).item()


def linears(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QParamsLinear)}


def state_bytes(model):
    return {k: (v.dtype, v.reshape(-1).view(torch.uint8)) for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_every_scheme(loaded, logits, name):
    """Float32: ``auto`` adds in another order, ``fast`` rounds inputs and scales to bfloat16."""
    model = loaded(name)
    expected, state = logits(model), state_bytes(model)
    assert torch.equal(logits(set_runtime(model, "unpacked")), expected)
    layers, x = linears(model), torch.randn(2, 3, 64)
    plain = {n: layer(x) for n, layer in layers.items() if layer.shape("weight")[1] == 64}
    for runtime, bound in (("auto", 1e-5), ("fast", 2e-2)):
        set_runtime(model, runtime)
        for layer, y in plain.items():
            assert difference(layers[layer](x), y) < bound
        after = state_bytes(model)
        assert after.keys() == state.keys()
        assert all(d == after[k][0] and v.equal(after[k][1]) for k, (d, v) in state.items())
    assert torch.equal(logits(set_runtime(model, "exact")), expected)


@pytest.mark.parametrize("name", ["int4_wo_32", "w_int8_per_tensor_sym", "mxfp4"])
def test_bfloat16(loaded, logits, name):
    model = loaded(name, dtype=torch.bfloat16)
    expected = logits(model)
    for runtime in FASTER:
        y = logits(set_runtime(model, runtime))
        assert y.dtype == torch.bfloat16
        assert difference(y.float(), expected.float()) < 5e-2


def test_few_rows_take_the_kernel_and_many_the_panels(loaded, monkeypatch):
    layer = set_runtime(loaded("w_int8_per_tensor_sym"), "fast").model.layers[0].mlp.up_proj
    if layer.packed_product.method.kernel is None:
        pytest.skip("torch has no right kernel for 8 bits on this machine")
    x = torch.randn(products.FEW_ROWS + 1, 64)
    weight = layer.value("weight")
    assert difference(layer(x), F.linear(x, weight)) < 1e-5
    few = difference(layer(x[:-1]), F.linear(x[:-1], weight))
    assert 1e-4 < few < 2e-2  # bfloat16
    assert layer(x[:0]).shape == (0, 96)


def test_a_kernel_takes_bfloat16_alone_unless_inputs_may_be_rounded(loaded):
    layer = set_runtime(loaded("w_int8_per_tensor_sym"), "auto").model.layers[0].mlp.up_proj
    x, weight = torch.randn(2, 64), layer.value("weight")
    assert difference(layer(x), F.linear(x, weight)) < 1e-5
    y, expected = layer(x.half()), F.linear(x.half().float(), weight)
    assert y.dtype == torch.float16
    assert difference(y.float(), expected) < 1e-3


def test_the_weight_is_held_once(loaded):
    model = loaded("int4_wo_32", hidden_size=256, num_attention_heads=4, intermediate_size=512)
    for layer in linears(set_runtime(model, "auto")).values():
        parameter = layer._parameters["weight"]
        assert parameter._held is None
        assert "weight" not in layer._codes
        assert layer.weight.shape == layer.shape("weight")  # reading it restores nothing
        assert parameter._held is None
        outputs, inputs = layer.shape("weight")
        assert layer.packed_product.nbytes <= outputs * inputs * (4 + 32 / 32 + 32 / 32) / 8


def test_a_library_that_reads_the_weight_gets_its_values(loaded):
    model = loaded("int4_wo_32")
    layer = model.model.layers[0].mlp.up_proj
    expected, x = layer.weight.unpack(), torch.randn(2, 64)
    for runtime in ("auto", "unpacked"):
        set_runtime(model, runtime)
        assert torch.equal(layer.value("weight"), expected)
        assert torch.equal(F.linear(x, layer.weight), F.linear(x, expected))
        assert torch.equal(layer.value("weight", torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("runtime", ["auto", "unpacked"])
class TestWhatStaysTheSame:
    def test_files(self, loaded, runtime, tmp_path):
        model = loaded("int4_wo_32")
        for name in ("exact", runtime):
            export_safetensors(set_runtime(model, name), tmp_path / name)
        files = sorted(path.name for path in (tmp_path / "exact").iterdir())
        assert files == sorted(path.name for path in (tmp_path / runtime).iterdir())
        assert "model.safetensors" in files
        for file in files:
            first, second = ((tmp_path / n / file).read_bytes() for n in ("exact", runtime))
            if file.endswith(".json"):
                first, second = json.loads(first), json.loads(second)
            assert first == second

    def test_copies_and_pickles(self, loaded, logits, runtime):
        model = loaded("int4_wo_32")
        expected = logits(set_runtime(model, runtime))
        clone = copy.deepcopy(model)
        assert torch.equal(logits(clone), expected)
        assert describe_runtime(clone) == describe_runtime(model)
        layer, file = model.model.layers[0].mlp.up_proj, io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        restored, x = torch.load(file, weights_only=False), torch.randn(3, 64)
        assert torch.equal(restored(x), layer(x))

    def test_another_type(self, loaded, logits, runtime):
        model, other = loaded("int4_wo_32"), loaded("int4_wo_32")
        set_runtime(model, runtime).bfloat16()
        assert {m.runtime for m in linears(model).values()} == {runtime}
        expected = logits(set_runtime(other.bfloat16(), runtime))
        assert torch.equal(logits(model), expected)

    def test_a_loaded_state_dict_is_used(self, loaded, logits, runtime):
        model, other = loaded("int4_wo_32"), loaded("int4_wo_32", initializer_range=0.3)
        expected = logits(other)
        assert not torch.equal(logits(set_runtime(model, runtime)), expected)
        model.load_state_dict(other.state_dict())
        assert torch.equal(logits(model), expected)  # exact, until a runtime is set again
        assert difference(logits(set_runtime(model, runtime)), expected) < 5e-2

    def test_other_codes_are_used(self, loaded, runtime):
        layer = loaded("int4_wo_32").model.layers[0].mlp.up_proj
        codes = torch.zeros_like(layer._stored("weight"))
        layer.set_runtime(runtime)
        x = torch.randn(2, 64)
        assert layer(x).abs().max() > 0.1
        layer.weight.data = codes
        assert torch.equal(layer(x), torch.zeros(2, 96))

    def test_gradients_of_inputs(self, loaded, runtime):
        layer = loaded("int4_wo_32").model.layers[0].mlp.up_proj
        x = torch.randn(2, 64, requires_grad=True)
        (expected,) = torch.autograd.grad(layer(x).sum(), x)
        layer.set_runtime(runtime)
        (gradient,) = torch.autograd.grad(layer(x).sum(), x)
        assert torch.equal(gradient, expected)

    def test_graphs_of_export(self, loaded, runtime):
        layer = loaded("int4_wo_32").model.layers[0].mlp.eval()
        x = torch.randn(2, 3, 64)
        with torch.no_grad():
            expected = layer(x)
            for linear in linears(layer).values():
                linear.set_runtime(runtime)
            after = layer(x)
            program = torch.export.export(layer, (x,))
            assert torch.equal(program.module()(x), expected)
            assert torch.equal(layer(x), after)
        assert {m.runtime for m in linears(layer).values()} == {runtime}


@pytest.mark.parametrize("runtime", ["auto", "fast", "unpacked"])
def test_experts(loaded, logits, runtime):
    model = loaded("int4_wo_32", "mixtral", **MOE)
    expected = logits(model)
    assert difference(logits(set_runtime(model, runtime)), expected) < 0.1
    assert any("experts" in name for name in describe_runtime(model))


def packed(module, config, x):
    """A module after it was quantized, packed as in a checkpoint, and loaded."""
    from quark.torch.export.formats.layouts.packed import PackedLayout
    from quark.torch.quantization.nn.operators import operator

    kind, made = type(module), nn.Sequential(module)
    quantized(made, config, data=[x])
    state, layout = made[0].quantized_tensor("weight"), PackedLayout("reorder")
    empty = copy.deepcopy(made[0])
    empty.__class__ = kind
    layer = operator(kind).packed.from_module(empty, made[0].quant_config, layout)
    for part, tensor in layout.pack(state, None).items():
        if part in ("scale", "zero_point"):
            setattr(layer.weight_quantizer, part, tensor)
        elif part:
            setattr(layer, f"weight_{part}", tensor)
        else:
            layer._parameters["weight"] = nn.Parameter(tensor, requires_grad=False)
    return layer.eval(), made.eval()


@pytest.mark.parametrize("runtime", ["auto", "fast", "unpacked"])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(32, 64, 3, bias=False), (2, 32, 5, 5)),
        (nn.ConvTranspose2d(32, 64, 3, bias=False), (2, 32, 5, 5)),
        (nn.Embedding(64, 32), None),
    ],
    ids=["convolution", "transposed", "embedding"],
)
def test_operators_without_a_product_compute_as_before(module, shape, runtime):
    x = torch.randint(0, 64, (2, 5)) if shape is None else torch.randn(shape)
    named = {"0": scheme("w_int8_per_tensor_sym")}  # a global configuration skips embeddings
    settings = preset(named["0"], exclude=(), layer_quant_config=named)
    layer, frozen = packed(copy.deepcopy(module), settings, x)
    layer.set_runtime(runtime)
    expected = "unpacked once" if runtime == "unpacked" else "unpacked at each use"
    assert layer.product_name == expected
    assert torch.equal(layer(x), frozen(x))


def test_fractional_zero_points(monkeypatch):
    x = torch.randn(4, 64)
    weight = groups("int4", False, scale_type="float32", zero_point_type="float32")
    layer, frozen = packed(nn.Linear(64, 64, bias=False), config(weight, exclude=()), x)
    for runtime, bound in (("auto", 1e-5), ("fast", 2e-2)):
        layer.set_runtime(runtime)
        assert layer.packed_product is not None
        assert difference(layer(x), frozen(x)) < bound


def test_bfloat16_units_multiply_in_bfloat16(monkeypatch):
    x = torch.randn(40, 64).bfloat16()
    linear = nn.Linear(64, 64, bias=False).bfloat16()
    layer, frozen = packed(linear, preset("mxfp4", exclude=()), x)
    layer.set_runtime("auto")
    assert difference(layer(x).float(), frozen(x).float()) < 2e-2
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": True})
    assert torch.equal(layer(x), frozen(x))  # the weight in bfloat16, as it is unpacked


@pytest.mark.parametrize("runtime", ["auto", "fast", "unpacked"])
def test_generation(loaded, runtime):
    model = loaded("int4_wo_32", num_hidden_layers=2)
    ids = torch.randint(3, 64, (1, 6))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    set_runtime(model, runtime)
    tokens = model.generate(ids, **options)
    assert tokens.shape == expected.shape
    if runtime != "fast":  # which may choose another token where two are almost equally likely
        assert torch.equal(tokens, expected)


class Counter:
    """Backend of ``torch.compile`` that counts graphs."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("exact", "auto", "unpacked")]


@pytest.mark.parametrize("runtime", ["fast", *NIGHTLY])
class TestCompiled:
    def test_one_graph_without_breaks(self, loaded, runtime):
        model = set_runtime(loaded("int4_wo_32"), runtime)
        ids = torch.randint(3, 64, (2, 10))
        torch._dynamo.reset()
        counter = Counter()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(ids).logits, model(ids).logits)
        assert len(counter.graphs) == 1

    def test_blocks_share_a_graph(self, loaded, runtime):
        """Blocks compiled one by one have equal shapes, and one graph."""
        model = set_runtime(loaded("int4_wo_32", num_hidden_layers=3), runtime)
        torch._dynamo.reset()
        counter = Counter()
        for block in model.model.layers:
            block.mlp.compile(fullgraph=True, backend=counter, dynamic=False)
        with torch.no_grad():
            model(torch.randint(3, 64, (2, 10)))
        assert len(counter.graphs) == 1


class TestChoice:
    def test_when_a_model_is_loaded(self, loaded, build, quantize, export, tmp_path):
        directory = export(quantize(build(num_hidden_layers=1), preset("int4_wo_32")))
        importer = ModelImporter(directory, runtime="auto")
        models = [
            importer.import_model_info(build(num_hidden_layers=1)),
            import_model_from_safetensors(None, directory, device="cpu", runtime="auto"),
            import_model_from_safetensors(
                build(num_hidden_layers=1), directory, device="cpu", runtime="auto"
            ),
            load_checkpoint(directory, runtime="auto"),
        ]
        for model in models:
            assert {m.runtime for m in linears(model).values()} == {"auto"}

    def test_exact_is_the_default(self, loaded):
        assert set(describe_runtime(loaded("int4_wo_32")).values()) == {"unpacked at each use"}

    def test_the_documented_names(self, loaded):
        model = loaded("int4_wo_32")
        assert enable_native_inference(model) is model
        assert {m.runtime for m in linears(model).values()} == {"fast"}
        enable_native_inference(model, runtime_options=RuntimeOptions("unpacked"))
        assert set(describe_runtime(model).values()) == {"unpacked once"}
        enable_native_inference(model, RuntimeOptions(native_linear_mode="auto"))
        assert {m.runtime for m in linears(model).values()} == {"fast"}
        disable_native_inference(model)
        assert {m.runtime for m in linears(model).values()} == {"exact"}

    @pytest.mark.parametrize(
        "choose",
        [
            lambda model, path: set_runtime(model, "quick"),
            lambda model, path: RuntimeOptions("quick"),
            lambda model, path: ModelImporter(path, runtime="quick"),
            lambda model, path: load_checkpoint(path / "missing", runtime="quick"),
            lambda model, path: import_model_from_safetensors(model, path, runtime="quick"),
        ],
    )
    def test_unknown_names_are_refused_before_anything_is_read(self, choose, tmp_path):
        with pytest.raises(ValueError, match="runtime='quick' is unknown: give one of exact, auto"):
            choose(nn.Linear(1, 1), tmp_path)

    def test_another_mode_of_linear_layers_is_refused(self):
        with pytest.raises(ValueError, match=r"mode='fp8_per_tensor' is not supported: .*compiled"):
            RuntimeOptions(native_linear_mode="fp8_per_tensor")

    def test_models_that_are_read_in_parts(self, build, quantize, export):
        directory = export(quantize(build(num_hidden_layers=1), preset("int4_wo_32")))
        with pytest.raises(ValueError, match=r"in parts.*runtime=exact alone, got fast"):
            load_checkpoint(directory, max_memory=2**40, runtime="fast")

    def test_float_models_stay_as_they_are(self, build, logits):
        model = build()
        expected = logits(model)
        assert torch.equal(logits(set_runtime(model, "fast")), expected)
