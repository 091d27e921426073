"""Every documented import path leads somewhere, and both spellings of a name are one object."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from quark.torch.quantization.config.spec_classes import SPEC_CLASSES
from quark.torch.quantization.observer import registry

CONFIG = "quark.torch.quantization.config.config"
TYPE = "quark.torch.quantization.config.type"
OBSERVERS = "quark.torch.quantization.observer"

# Names by the paths they are documented under, where they are one object.
DOCUMENTED = {
    ("quark.torch", "quark.torch.quantization.api"): ["ModelQuantizer"],
    ("quark.torch", "quark.torch.export.api"): [
        "ModelExporter",
        "ModelImporter",
        "export_safetensors",
        "import_model_from_safetensors",
    ],
    ("quark.torch",): ["save_params", "load_params", "LLMTemplate"],
    ("quark.torch", TYPE): ["QuantFlow"],
    ("quark.torch.quantization", "quark.torch.quantization.api"): ["ModelQuantizer"],
    ("quark.torch.quantization", CONFIG): [
        *SPEC_CLASSES,
        "ProgressiveSpec",
        "ScaleQuantSpec",
        "Config",
        "QConfig",
        "QuantizationConfig",
        "QLayerConfig",
        "QuantizationSpec",
        "QTensorConfig",
        "AWQConfig",
        "AutoSmoothQuantConfig",
        "GPTQConfig",
        "QuaRotConfig",
        "RotationConfig",
        "SmoothQuantConfig",
        "load_quant_algo_config_from_file",
        "load_pre_optimization_config_from_file",
    ],
    ("quark.torch.export", "quark.torch.export.config.config"): [
        "ExporterConfig",
        "JsonExporterConfig",
        "OnnxExporterConfig",
    ],
    (TYPE,): [
        "Dtype",
        "ScaleType",
        "RoundType",
        "QSchemeType",
        "ZeroPointType",
        "DeviceType",
        "QuantizationMode",
        "TQTThresholdInitMeth",
    ],
    (OBSERVERS, f"{OBSERVERS}.observer"): ["ObserverBase", *registry.OBSERVERS],
    ("quark",): ["__version__"],
}
# What vLLM 0.10 to 0.33, SGLang and the tests of Transformers import.
IMPORTED_BY_SERVERS = {
    "quark.torch.kernel.mx": ["dq_mxfp4", "qdq_mxfp4"],
    "quark.torch.kernel.hw_emulation.hw_emulation_interface": [
        "dequantize_fp4_fp6_per_group",
        "fake_quantize_fp4_fp6_per_group_with_scale",
    ],
    "quark.torch.quantization.utils": ["even_round", "reshape_to_blocks"],
    "quark.torch.utils.pack": ["create_pack_method"],
    "quark.torch.export.nn.modules": ["QParamsLinear"],
    "quark.torch.export.nn.modules.qparamslinear": ["QParamsLinear"],
    "quark.torch.export.nn.modules.realquantizer": ["get_real_quantizer"],
}
SPELLINGS = {
    "Config": "QConfig",
    "QuantizationConfig": "QLayerConfig",
    "QuantizationSpec": "QTensorConfig",
}
ROWS = [(paths, name) for paths, names in DOCUMENTED.items() for name in names]


def broken(paths, name):
    """What keeps ``name`` from being one object under all of its paths."""
    found = []
    for path in paths:
        try:
            found.append(getattr(import_module(path), name))
        except (ImportError, AttributeError) as error:
            yield f"{path}: {error}"
    if any(other is not found[0] for other in found):
        yield f"{name} differs between {' and '.join(paths)}"


@pytest.mark.parametrize(("paths", "name"), ROWS, ids=[f"{p[0]}.{n}" for p, n in ROWS])
def test_documented_path(paths, name):
    assert list(broken(paths, name)) == []


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("path", ["quark.torch.quantization", CONFIG])
def test_both_spellings(path, name):
    module = import_module(path)
    assert getattr(module, name) is getattr(module, SPELLINGS[name])


@pytest.mark.parametrize(
    "path", ["quark.torch", "quark.torch.quantization", OBSERVERS, "quark.torch.export"]
)
def test_an_unknown_name_of_a_face(path):
    with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'Nothing'"):
        import_module(path).Nothing  # noqa: B018
    with pytest.raises(ImportError):
        exec(f"from {path} import Nothing")


def imports_of_quark(text):
    """(module, name) of what a file imports from this package."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quark"
        for alias in node.names
    }


def test_what_transformers_imports():
    folder = Path(find_spec("transformers").origin).parent
    files = ["quantizers/quantizer_quark.py", "utils/quantization_config.py"]
    wanted = set().union(*(imports_of_quark((folder / f).read_text("utf-8")) for f in files))
    assert {"JsonExporterConfig", "QuantConfigParser", "QConfig", "_map_to_quark"} <= {
        name for _, name in wanted
    }
    assert [problem for path, name in wanted for problem in broken([path], name)] == []


@pytest.mark.parametrize("path", IMPORTED_BY_SERVERS)
def test_what_servers_import(path):
    assert [p for name in IMPORTED_BY_SERVERS[path] for p in broken([path], name)] == []


def test_transformers_finds_this_package():
    from transformers.utils import is_quark_available

    assert is_quark_available()


@pytest.mark.parametrize(
    ("paths", "name", "said"),
    [
        (["quark.torch.nowhere"], "ModelQuantizer", "No module named 'quark.torch.nowhere'"),
        (["quark.torch"], "ModelQuantiser", "has no attribute 'ModelQuantiser'"),
        (["collections.abc", "_collections_abc"], "Mapping", None),
        (["quark", "torch"], "__version__", "__version__ differs between quark and torch"),
    ],
    ids=["module", "name", "same", "differs"],
)
def test_a_broken_path_is_found(paths, name, said):
    problems = list(broken(paths, name))
    assert [said in problem for problem in problems] == ([] if said is None else [True])
