"""Python and the command line give every model the same configuration, whatever the scheme."""

from functools import cache
from pathlib import Path

import pytest
import torch

from quark.cli.quantize.config import make_config
from quark.cli.quantize.request import Request
from quark.torch import LLMTemplate
from quark.torch.graph.shared_inputs import same_input_groups
from quark.torch.quantization.calibration import group_by_parent
from quark.torch.quantization.config import presets
from quark.torch.quantization.config.match import assign
from quark.torch.quantization.config.recipes import RECIPES
from quark.torch.quantization.config.resolution import (
    add_shared_inputs,
    resolve_names,
    shares_inputs,
)
from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.nn.operators import is_operator
from tests.models.architectures import build, inputs, small_config

_QKV, _GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# Architecture -> its output head, and the layers of one parent that share an input.
ARCHITECTURES = {
    "llama": ("lm_head", {_QKV, _GATED}),
    "opt": ("lm_head", {_QKV}),
    "gpt_neox": ("embed_out", set()),
    "gpt2": ("lm_head", set()),
    "falcon": ("lm_head", set()),
    "phi": ("lm_head", {_QKV}),
    "qwen2": ("lm_head", {_QKV, _GATED}),
    "qwen3": ("lm_head", {_QKV, _GATED}),
    "mixtral": ("lm_head", {_QKV, ("w1", "w3")}),
    "llama4_text": ("lm_head", {_QKV, _GATED}),
    "deepseek_v3": ("lm_head", {("q_a_proj", "kv_a_proj_with_mqa"), _GATED}),
    "bloom": ("lm_head", set()),
    "gemma": ("lm_head", {_QKV, _GATED}),
    "bert": ("cls.predictions.decoder", {("query", "key", "value")}),
    "roberta": ("lm_head.decoder", {("query", "key", "value")}),
}
TWO_LEVEL = [
    name for name in presets.scheme_names() if presets.scheme(name).weight.scheme.scale.two_level
]
CACHED = [name for name, (_, groups) in ARCHITECTURES.items() if _QKV in groups]


@cache
def model_of(name):
    """A tiny model, its layers by name, and the layers that read each input."""
    model = build(small_config(name), torch.float32)
    split_experts(model)
    read = same_input_groups(model, lambda: model(**inputs(model)), single=True)
    if name == "gpt_neox":  # as Transformers called its head before version 5
        model.embed_out, model.lm_head = model.lm_head, None
        model.get_output_embeddings = lambda: model.embed_out
    layers = {n: type(m) for n, m in model.named_modules() if is_operator(type(m))}
    return model, layers, read


def effective(config, name):
    """Layer name -> its specifications, and the groups of layers that share scales."""
    model, layers, read = model_of(name)
    resolved = resolve_names(config, model)
    if shares_inputs(config):
        resolved = add_shared_inputs(resolved, read)
    quantized = assign(layers, resolved)
    groups = [group_by_parent(quantized, group) for group in resolved.shared_scale_groups]
    shared = {frozenset(members) for parts in groups for members in parts if len(members) > 1}
    return quantized, shared


def by_python(scheme, name, **options):
    return LLMTemplate.get(name).get_config(scheme, **options)


def by_command_line(name, **flags):
    return make_config(Request(model_dir=Path(name), given=frozenset(flags), **flags), name)


def shared_names(shared):
    return {tuple(sorted(name.rpartition(".")[2] for name in group)) for group in shared}


def expected_names(name):
    return {tuple(sorted(group)) for group in ARCHITECTURES[name][1]}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.sampled(6)
def test_every_scheme(name):
    head, _ = ARCHITECTURES[name]
    _, layers, _ = model_of(name)
    expected = {n for n in layers if n != head and "Embedding" not in layers[n].__name__}
    for scheme in presets.scheme_names():
        ours = effective(by_python(scheme, name), name)
        theirs = effective(by_command_line(name, quant_scheme=scheme), name)
        assert ours == theirs, scheme
        assert ours[0].keys() == expected, scheme
        assert all(layer == presets.scheme(scheme) for layer in ours[0].values())
        assert shared_names(ours[1]) == (expected_names(name) if scheme in TWO_LEVEL else set())


def test_schemes_of_two_levels_are_many():
    assert len(TWO_LEVEL) >= 7
    assert {"nvfp4", "w_fp4_scale_fp8", "w_fp4_a_fp4_scale_fp8", "amdfp4_global16"} <= {*TWO_LEVEL}


@pytest.mark.parametrize("cache_scheme", presets.KV_CACHE_SCHEMES)
def test_every_scheme_of_the_cache(cache_scheme):
    for name in CACHED:
        ours = by_python("int8_wo", name, kv_cache_scheme=cache_scheme, min_kv_scale=0.5)
        flags = {"kv_cache_dtype": cache_scheme, "min_kv_scale": 0.5}
        theirs = by_command_line(name, quant_scheme="int8_wo", **flags)
        assert ours == theirs
        layers, _ = effective(ours, name)
        cached = {n for n, layer in layers.items() if layer.output_tensors is not None}
        assert {n.rpartition(".")[2] for n in cached} == {"k_proj", "v_proj"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe):
    for name in ARCHITECTURES:
        ours = LLMTemplate.get(name).get_recipe(recipe)
        assert ours == by_command_line(name, recipe=recipe)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_merged_weights_are_the_layers_that_share_an_input(scheme, name):
    merged = by_command_line(name, quant_scheme=scheme, weight_matrix_merge=True)
    assert shared_names(effective(merged, name)[1]) == expected_names(name)
    if scheme == "nvfp4":
        assert merged == by_python(scheme, name)


def test_one_layer_of_two_levels_is_enough():
    layers = {"*o_proj": "fp8", "*mlp*": "nvfp4_weight_only"}
    ours = by_python("int8_wo", "llama", layer_config=layers)
    pairs = [part for pair in layers.items() for part in pair]
    assert ours == by_command_line("llama", quant_scheme="int8_wo", layer_quant_scheme=pairs)
    assert ours.shared_scale_groups


def test_a_registered_template_serves_both(monkeypatch):
    monkeypatch.setattr(LLMTemplate, "_registered", {})
    LLMTemplate.register_template(LLMTemplate("opt", ["*key"], exclude_layers_name=["*fc1"]))
    ours = by_python("nvfp4", "opt", kv_cache_scheme="fp8")
    assert ours == by_command_line("opt", quant_scheme="nvfp4", kv_cache_dtype="fp8")
    assert (ours.exclude, ours.kv_cache_group) == (["*fc1"], ["*key"])
