"""Small random models, and what tests do with them again and again."""

import gc
import os
import zlib
from collections import defaultdict
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import ceil

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when Triton is imported

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "init_std": 0.2,
    "dropout": 0.5,
}
# Name -> (type of the model, its configuration): grouped heads, tied embeddings, biases and both.
_MODELS = {
    "llama": ("llama", _LLAMA),
    "tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "opt": ("opt", _OPT),
}

MARKS_OF_FILES = ("smoke", "client", "triton", "browser")  # each file writes them out


def pytest_ignore_collect(collection_path, config):
    """Read only files with the mark that is asked for: reading all takes longer than some marks."""
    mark = config.option.markexpr
    if collection_path.suffix != ".py" or mark not in MARKS_OF_FILES:
        return None
    if mark == "smoke":
        return True if collection_path.parent.name != "smoke" else None
    return None if f"mark.{mark}" in collection_path.read_text("utf-8") else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave nightly tests and most cases of large matrices to the night, unless asked for.

    The names of cases decide, not their order.
    """
    matrices = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            key = item.nodeid.partition("[")[0], marker.args[0], marker.kwargs.get("covers", False)
            matrices[key].append(item)
    for (_, share, covers), cases in matrices.items():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in (covering(cases) if covers else cases)[ceil(len(cases) / share) :]:
            item.add_marker("nightly")
    if "nightly" not in config.option.markexpr:
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)


def covering(cases):
    """Return the cases in another order: the first few have every value of every argument."""
    values = {item: {(n, id(x)) for n, x in item.callspec.params.items()} for item in cases}
    first, rest, missing = [], list(cases), set().union(*values.values())
    while missing:
        best = max(rest, key=lambda item: len(values[item] & missing))
        rest.remove(best)
        first.append(best)
        missing -= values[best]
    return first + rest


def pytest_collection_finish():
    """Keep what exists now out of garbage collection: libraries and tests, millions of objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item):
    """Skip tests of software that is not there; if asked for, they fail."""
    packages = [("client", marker.args[0]) for marker in item.iter_markers("client")]
    packages += [("triton", "triton") for _ in item.iter_markers("triton")]
    for name, package in packages:
        if find_spec(package) is None:
            end = pytest.fail if item.config.option.markexpr == name else pytest.skip
            end(f"{package} is not installed")


@pytest.fixture(scope="session", autouse=True)
def without_delays():
    """Leave out what takes a tenth of the time of small tests.

    ``fsync`` takes 10 ms: tests of it look at its calls, and no power fails here. ``manual_seed``
    writes down who called it for each type of device that the machine lacks, 2 ms.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        if not torch.cuda.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def build():
    """Make a model by name, always with the same random values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def build(name="llama", dtype=torch.float32, device="cpu", **changes):
        kind, config = _MODELS.get(name, (name, _LLAMA))
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(kind, **{**config, **changes}), dtype=dtype
            ).eval()
        for key, value in model.named_parameters():
            if key.endswith("bias") and device != "meta":  # they start as zeros, which hides bugs
                torch.nn.init.normal_(value.detach(), std=0.1)
        return model

    return build


@pytest.fixture(scope="session")
def batches():
    """Calibration data of two shapes."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, shape, generator=generator) for shape in ((2, 12), (1, 9))]


@pytest.fixture(scope="session")
def logits():
    """Compute the logits of a model for a fixed input."""
    ids = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def logits(model):
        return model(ids.to(model.device)).logits

    return logits


@pytest.fixture(scope="session")
def config_of():
    """Make the configuration of a scheme, with groups of 32."""
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.presets import scheme

    def config_of(name, exclude=("lm_head",), **rest):
        return Config(global_quant_config=scheme(name, 32), exclude=list(exclude), **rest)

    return config_of


@pytest.fixture(scope="session")
def quantize(batches, config_of):
    """Quantize and freeze a model by a configuration or the name of a scheme."""
    from quark.torch import ModelQuantizer

    def quantize(model, config, data=batches):
        config = config_of(config) if isinstance(config, str) else config
        return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, data))

    return quantize


@pytest.fixture
def export(tmp_path):
    """Export a model as safetensors to a new directory and return it."""
    from quark.torch import export_safetensors

    count = iter(range(1000))

    def export(model, **options):
        path = tmp_path / f"export-{next(count)}"
        export_safetensors(model, path, **options)
        return path

    return export


@pytest.fixture(scope="session")
def unchanged():
    """Check that what is done meanwhile leaves no trace in a model."""

    def look(model):
        modules = {
            name: (type(module), module.training, sorted(vars(module)))
            for name, module in model.named_modules(remove_duplicate=False)
        }
        tensors = {n: (id(t), t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
        return modules, tensors

    @contextmanager
    def unchanged(model):
        modules, tensors = look(model)
        yield
        modules_now, tensors_now = look(model)
        assert modules_now == modules
        assert tensors_now.keys() == tensors.keys()
        for name, (identity, value) in tensors.items():
            assert tensors_now[name][0] == identity, name
            torch.testing.assert_close(tensors_now[name][1], value, rtol=0, atol=0, equal_nan=True)

    return unchanged


@pytest.fixture(scope="session")
def onnx_operators():
    """Read the tables of operators once: ``torch.onnx.export`` does so in every export.

    Reading them takes longer than the rest of a small export.
    """
    pytest.importorskip("onnxscript")
    registry = import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    utils, name = import_module("torch._export.utils"), "_materialize_cpp_cia_ops"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "from_torchlib", staticmethod(cache(registry.from_torchlib)))
        if hasattr(utils, name):  # called for each of thirty namespaces, twice in an export
            patch.setattr(utils, name, cache(getattr(utils, name)))
        yield


@pytest.fixture(scope="session")
def run_onnx(onnx_operators):
    """Run an exported graph in ONNX Runtime, on inputs in its order, and return its outputs.

    Integer kernels add up in float and do not saturate there, unless told otherwise.
    """
    exact = {"session.qdq_matmulnbits_accuracy_level": "1", "session.x64quantprecision": "1"}

    def run_onnx(directory, *inputs, entries=exact):
        runtime = pytest.importorskip("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        session = runtime.InferenceSession(str(directory / "quark_model.onnx"), options)
        names = [i.name for i in session.get_inputs()]
        arrays = {n: x.numpy() for n, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, arrays)]

    return run_onnx
