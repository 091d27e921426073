"""The runtime ``compiled``: results, and what it falls back to."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quark.torch import RuntimeOptions, enable_native_inference, set_runtime
from quark.torch.export.recognition import load_checkpoint
from quark.torch.numerics.native.compilation import SWITCH
from quark.torch.quantization.nn.products import compiled, compiled_inputs
from quark.torch.quantization.nn.runtime import describe_runtime
from tests.configurations import preset
from tests.unit.quantization.nn.products.test_compiled import has_compiler
from tests.unit.quantization.nn.test_runtime import Counter, difference, linears, state_bytes

SCHEMES = ["int3_wo_32", "mxfp4", "fp8", "nvfp4", "mxfp6_e2m3", "w_int8_per_group_sym"]


def clear_answers():
    compiled._functions.cache_clear()
    compiled_inputs._function.cache_clear()


@pytest.fixture(autouse=True)
def no_answers_of_other_tests(monkeypatch):
    """Nothing is compiled yet; kernels of numba are off, which other tests may have imported."""
    monkeypatch.setenv(SWITCH, "torch")
    clear_answers()
    yield
    clear_answers()


@pytest.fixture
def loaded(build, quantize, export):
    """Quantize a model of one block, write it and load it."""

    def loaded(name, **changes):
        changes = {"num_hidden_layers": 1, "hidden_size": 96, "head_dim": 16, **changes}
        return load_checkpoint(export(quantize(build(**changes), preset(name)))).eval()

    return loaded


@pytest.mark.parametrize("name", SCHEMES)
def test_every_kind_of_scheme(loaded, logits, name, monkeypatch):
    monkeypatch.setattr(compiled, "compile_function", lambda function: function)
    model = loaded(name)
    expected, state = logits(model), state_bytes(model)
    layers, few, many = linears(model), torch.randn(2, 1, 96), torch.randn(5, 96)
    layers = {n: layer for n, layer in layers.items() if layer.shape("weight")[1] == 96}
    plain = {n: (layer(few), layer(many)) for n, layer in layers.items()}
    enable_native_inference(model, RuntimeOptions("compiled"))
    names = describe_runtime(model)
    assert {names[n] for n, layer in layers.items() if layer.shape("weight")[0] > 32} == {
        "compiled"
    }
    for n, results in plain.items():
        for x, y in zip((few, many), results, strict=True):
            assert difference(layers[n](x), y) < 1e-5
    after = state_bytes(model)
    assert all(d == after[k][0] and v.equal(after[k][1]) for k, (d, v) in state.items())
    assert torch.equal(logits(set_runtime(model, "exact")), expected)


@pytest.mark.parametrize("name", ["mxfp4", "fp8", "nvfp4"])
def test_inputs_get_the_same_values(loaded, monkeypatch, name):
    functions = []
    monkeypatch.setattr(compiled, "compile_function", lambda f: functions.append(f) or f)
    layer = loaded(name).model.layers[0].mlp.up_proj
    x = torch.randn(2, 3, 96)
    expected = layer.quantized_input(x)
    assert not functions
    layer.set_runtime("compiled")
    made = len(functions)
    assert torch.equal(layer.quantized_input(x), expected)
    assert len(functions) == made + 1
    assert layer.quantized_input(x.requires_grad_()).requires_grad


def test_rows_do_not_depend_on_each_other(loaded, monkeypatch):
    monkeypatch.setattr(compiled, "compile_function", lambda function: function)
    layer = set_runtime(loaded("int3_wo_32"), "compiled").model.layers[0].mlp.up_proj
    x = torch.randn(compiled.FEW_ROWS, 96)
    assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)]))


def test_kernels_of_torch_come_first(loaded, monkeypatch):
    monkeypatch.setattr(compiled, "compile_function", lambda function: function)
    for name in ("int4_wo_32", "w_int8_per_tensor_sym"):
        model = loaded(name)
        fast = describe_runtime(set_runtime(model, "fast"))
        names = describe_runtime(set_runtime(model, "compiled"))
        assert {n: k for n, k in fast.items() if k != "panels"}.items() <= names.items()


def test_without_a_compiler_panels_are_used(loaded, monkeypatch, logits):
    def missing(function):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiled, "compile_function", missing)
    model = loaded("int3_wo_32")
    expected = logits(set_runtime(model, "fast"))
    assert set(describe_runtime(set_runtime(model, "compiled")).values()) == {"panels"}
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("runtime", ["auto", "fast"])
def test_other_runtimes_compile_nothing(loaded, logits, monkeypatch, runtime):
    monkeypatch.setattr(compiled, "compile_function", lambda function: pytest.fail("compiled"))
    logits(set_runtime(loaded("mxfp4"), runtime))


@has_compiler
def test_a_model(loaded, logits):
    """Generation, threads and a compiled model take the compiled functions as they are."""
    model = loaded("fp8", num_hidden_layers=2)
    ids = torch.randint(3, 64, (1, 6))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected, tokens = logits(model), model.generate(ids, **options)
    set_runtime(model, "compiled")
    assert "compiled" in describe_runtime(model).values()
    assert difference(logits(model), expected) < 0.1  # codes of later inputs may be neighbors
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 96)
    torch._dynamo.reset()  # of other tests, with gradients
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model.generate(ids, **options), tokens)
        with torch.inference_mode():
            y = mlp(x)
        with torch.no_grad(), ThreadPoolExecutor(2) as threads:
            assert all(torch.equal(result, y) for result in threads.map(mlp, [x] * 4))
            counter = Counter()
            whole = torch.compile(mlp, fullgraph=True, backend=counter)
            assert torch.equal(whole(x), y)
    assert len(counter.graphs) == 1
