"""Lines after an export of experts, which Transformers and vLLM merge as they read them."""

import json

import pytest

from quark.torch.export.formats.compressed_tensors_targets import targets_of
from quark.torch.export.recognition import read_contents, recognize_container
from quark.torch.quantization.config.presets import scheme

LAST = "*layers.1.mlp.experts*"
OWN, TRANSFORMERS = "quark.torch.import_model_from_safetensors", "transformers.AutoModelForCausalLM"
# Scheme of most layers, schemes of others by name, layers in float -> what loads the model.
LINES = [
    ("int3_wo_32", {"*experts*": "int4_wo_32"}, [], TRANSFORMERS),
    ("int4_wo_32", {"*q_proj": "int3_wo_32"}, [], TRANSFORMERS),
    ("int4_wo_32", {LAST: "int3_wo_32"}, [], OWN),
    ("int4_wo_32", {}, ["*experts*"], OWN),
    ("int4_wo_32", {}, ["*experts*w2"], OWN),
    ("fp8_wo", {}, ["*experts*"], TRANSFORMERS),
    ("nvfp4", {}, [], OWN),
    ("int8", {}, [], OWN),
    ("mxfp4_weight_only", {}, [], OWN),
]


@pytest.fixture
def made(build, quantize, export, config_of):
    def made(name, others=None, floats=(), mode="compressed-tensors"):
        layers = {pattern: scheme(n, 32) for pattern, n in (others or {}).items()}
        config = config_of(name, ["lm_head", *floats], layer_quant_config=layers)
        return export(quantize(build("mixtral"), config), custom_mode=mode)

    return made


@pytest.mark.client("compressed_tensors")
@pytest.mark.parametrize(("usual", "others", "floats", "expected"), LINES)
def test_the_line_that_loads_a_mixture(made, usual, others, floats, expected):
    path = made(usual, others, floats)
    assert expected in recognize_container(path).load_code(path)


@pytest.mark.client("compressed_tensors")
def test_groups_without_expressions_are_not_read(made):
    """Earlier versions wrote names alone, and Transformers took the first group for experts."""
    path = made("int3_wo_32", {"*experts*": "int4_wo_32"})
    config = json.loads((path / "config.json").read_text())
    stored = [layer.name for layer in read_contents(path).summary.layers]
    group = config["quantization_config"]["config_groups"]["group_1"]
    group["targets"] = [name for name in stored if ".experts." in name]
    (path / "config.json").write_text(json.dumps(config))
    assert OWN in recognize_container(path).load_code(path)


def test_targets_of_experts():
    names = [f"layers.0.mlp.experts.{i}.w1" for i in range(2)]
    other = ["layers.1.mlp.experts.0.w1", "layers.1.mlp.experts.1.w1"]
    groups = [["layers.0.q_proj", *names, other[0]], [other[1]]]
    expected = ["layers.0.q_proj", r"re:^layers\.0\.mlp\.experts\..*$", other[0]]
    assert targets_of(groups) == [expected, [other[1]]]


CONVERTED = "quark convert {0} {0}-ct --to compressed-tensors\nvllm serve {0}-ct"


@pytest.mark.parametrize(
    ("usual", "others", "floats", "mode", "expected"),
    [
        ("int4_wo_32", {}, [], "quark", CONVERTED),
        ("fp8", {}, [], "quark", "vllm serve {0}"),
        ("fp8", {}, ["*experts*"], "quark", "vllm serve {0}"),
        ("fp8", {LAST: "ptpc_fp8"}, [], "quark", CONVERTED),
        ("int4_wo_32", {LAST: "int3_wo_32"}, [], "quark", CONVERTED),
        ("int4_wo_32", {LAST: "int3_wo_32"}, [], "compressed-tensors", "vllm serve {0}"),
        ("int4_wo_32", {"*experts.1.*": "int3_wo_32"}, [], "compressed-tensors", None),
        ("int4_wo_32", {"*w2": "int8_wo"}, [], "quark", None),
    ],
)
def test_the_lines_that_serve_a_mixture(made, usual, others, floats, mode, expected):
    path = made(usual, others, floats, mode)
    line = recognize_container(path).serve_command(path)
    assert line == (expected and expected.format(path))
