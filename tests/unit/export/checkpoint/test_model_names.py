"""Patterns of a configuration name layers as the model does, where files have other names."""

import sys

import pytest

from quark.torch.export.checkpoint.model_names import renamed_layers
from quark.torch.export.recognition import read_contents
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.presets import scheme

EXPERT, STORED = "model.layers.1.mlp.experts.0.w1", "model.layers.1.block_sparse_moe.experts.0.w1"
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def config(*patterns, exclude=()):
    return Config(layer_quant_config={p: scheme("int3_wo_32") for p in patterns}, exclude=exclude)


# Layout that holds mixtures -> schemes of most layers and of the others.
LAYOUTS = {
    "quark": ("int4_wo_32", "int3_wo_32"),
    "compressed-tensors": ("int4_wo_32", "int3_wo_32"),
    "mlx": ("int4_wo_32", "int8_wo_32"),
    "modelopt": ("fp8", "nvfp4"),
}
WORDS = {
    "int4_wo_32": "int4",
    "int3_wo_32": "int3",
    "int8_wo_32": "int8",
    "fp8": "fp8_e4m3",
    "nvfp4": "fp4",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_literal", [False, True])
def test_experts_that_a_pattern_names(build, quantize, export, config_of, is_literal, layout):
    """A layer has the scheme of its codes in each layout."""
    usual, other = LAYOUTS[layout]
    names = [f"model.layers.1.mlp.experts.{i}.w{j}" for i in range(8) for j in (1, 2, 3)]
    patterns = map(literal, names) if is_literal else ["*layers.1.mlp.experts*"]
    config = config_of(usual, layer_quant_config=dict.fromkeys(patterns, scheme(other, 32)))
    path = export(quantize(build("mixtral"), config), custom_mode=layout)
    first, second = read_contents(path).summary.schemes()
    assert (first.layers, second.layers) == (4 + 24 + 4, 24)
    assert first.scheme.weight.split()[0].lstrip("u") == WORDS[usual]
    assert second.scheme.weight.split()[0].lstrip("u") == WORDS[other]


@pytest.mark.parametrize(
    ("patterns", "exclude"), [(["*.mlp.experts*"], []), ([EXPERT], []), (["*mlp*"], [EXPERT])]
)
def test_names_of_the_model_are_found(patterns, exclude):
    assert renamed_layers(MIXTRAL, [STORED], config(*patterns, exclude=exclude)) == {STORED: EXPERT}


@pytest.mark.parametrize("patterns", [["*experts.9*"], ["*block_sparse_moe*"]])
def test_names_that_no_pattern_has_stay(patterns):
    assert renamed_layers(MIXTRAL, [STORED], config(*patterns)) == {}


def test_models_inside_others():
    described = {"model_type": "llava", "text_config": {"model_type": "mixtral"}}
    assert renamed_layers(described, [STORED], config("*.mlp.experts*")) == {STORED: EXPERT}


def test_models_with_code_of_their_own_are_not_renamed():
    described = {**MIXTRAL, "auto_map": {"AutoModelForCausalLM": "mine.Model"}}
    assert renamed_layers(described, [STORED], config(EXPERT)) == {}


@pytest.mark.parametrize("pattern", ["*", "*.[0-9]*.*", STORED])
def test_transformers_is_not_asked_for_what_names_decide(monkeypatch, pattern):
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert renamed_layers(MIXTRAL, [STORED], config(pattern)) == {}


def test_without_transformers_names_are_those_of_the_files(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert renamed_layers(MIXTRAL, [STORED], config(EXPERT)) == {}
