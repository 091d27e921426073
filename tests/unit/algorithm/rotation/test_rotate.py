"""Rotated models compute what they did, whatever is rotated; and outliers are spread."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.torch import ModelImporter, ModelQuantizer
from quark.torch.algorithm.rotation.rotate import apply, check, preserve_ones
from quark.torch.numerics.hadamard import random_hadamard
from quark.torch.quantization.calibration import calibrate_parameters
from quark.torch.quantization.config.config import (
    OnlineRotationConfig,
    QuaRotConfig,
    RotationConfig,
)
from tests.models.architectures import InDouble, build, small_config
from tests.unit.algorithm.contexts import context_of, logits_of

# Name of an architecture and what changes in its configuration.
MODELS = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 24}),
    "opt": ("opt", {}),
    "opt untied": ("opt", {"tie_word_embeddings": False}),
    "mixtral": ("mixtral", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gemma": ("gemma", {}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "phi3": ("phi3", {}),
}
OPTIONS = {
    "R1": RotationConfig(),
    "R1 blocks": RotationConfig(rotation_size=32),
    "R1R2R4": RotationConfig(r2=True, r4=True),
    "random": RotationConfig(r2=True, r4=True, random_r1=True, random_r2=True),
    "online R1": RotationConfig(online_r1_rotation=True, rotation_size=16),
}


def rotated(name, options, scheme="mxfp4", **changes):
    kind, changed = MODELS[name]
    context = context_of(build(small_config(kind, **changed, **changes)), scheme)
    apply(context, options)
    return context


@pytest.mark.parametrize("options", ["R1R2R4", "random"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_the_model_computes_the_same(name, options):
    kind, changed = MODELS[name]
    model = build(small_config(kind, **changed))
    context = context_of(model)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    with InDouble():
        expected = logits_of(model)
        apply(context, OPTIONS[options])
        found = logits_of(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    after = dict(model.named_parameters())
    assert all(not torch.allclose(after[n], v) for n, v in before.items() if v.dim() > 1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_single_precision(name, options):
    kind, changed = MODELS[name]
    context = context_of(build(small_config(kind, **changed), torch.float32))
    expected = logits_of(context.model)
    apply(context, OPTIONS[options])
    found = logits_of(context.model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_rotated_online(options):
    context = rotated("llama", OPTIONS[options])
    online = {name for name, layer in context.layers.items() if layer.input_rotation is not None}
    down = {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    readers = {n for n in context.layers if n.split(".")[-1] not in ("o_proj", "down_proj")}
    assert online == {"R1R2R4": down, "random": down, "online R1": readers}.get(options, set())


def test_gains_of_norms_are_folded():
    model = rotated("llama", OPTIONS["R1"]).model
    gains = [p for name, p in model.named_parameters() if "norm" in name]
    assert len(gains) == 5 and all(bool((gain == 1).all()) for gain in gains)
    offset = rotated("gemma", OPTIONS["R1"]).model
    gains = [p for name, p in offset.named_parameters() if "norm" in name]
    assert len(gains) == 5 and all(bool((gain == 0).all()) for gain in gains)


@pytest.mark.parametrize("name", ["tied", "opt"])
def test_a_tied_head_gets_a_weight_of_its_own(name):
    model = rotated(name, OPTIONS["R1"]).model
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is not embedding
    assert not torch.equal(model.lm_head.weight, embedding)
    assert model.config.tie_word_embeddings is False


def test_the_mean_stays_where_layer_norms_take_it_away():
    context = context_of(build(small_config("opt")))
    table = context.model.model.decoder.embed_tokens.weight
    before = table.detach().clone()
    apply(context, OPTIONS["R1"])
    assert not torch.allclose(table, before, atol=0.1)
    torch.testing.assert_close(table.mean(-1), before.mean(-1))


@pytest.mark.parametrize("n", [1, 2, 4, 12, 64])
def test_a_rotation_that_keeps_ones(n):
    for seed in range(3):
        rotation = preserve_ones(random_hadamard(n, torch.Generator().manual_seed(seed)))
        one, ones = torch.eye(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)
        torch.testing.assert_close(rotation @ rotation.T, one, rtol=0, atol=1e-12)
        torch.testing.assert_close(rotation @ ones, ones)


def test_ones_that_are_kept_already():
    matrix = torch.ones(4, 4, dtype=torch.int8) - 2 * torch.eye(4, dtype=torch.int8)
    assert torch.equal(preserve_ones(matrix), matrix.double() / 2)


def test_an_outlier_is_spread():
    """A channel of the stream 50 times the others: rounding what a layer reads does less harm."""
    errors = {}
    for label, options in {"none": RotationConfig(r1=False, r2=True), "R1": OPTIONS["R1"]}.items():
        context = context_of(build(small_config("llama"), torch.float32), "ptpc_int8")
        with torch.no_grad():
            context.model.model.embed_tokens.weight[:, 5] *= 50
            context.model.model.layers[0].input_layernorm.weight.fill_(1)
        expected = logits_of(context.model)
        apply(context, options)
        context.layers["model.layers.0.self_attn.v_proj"].input_quantizer.enabled = True
        errors[label] = float((logits_of(context.model) - expected).norm())
    assert 0 < errors["R1"] < errors["none"] / 2


@pytest.mark.parametrize("name", ["random", "R1R2R4"])
def test_the_same_each_time(name):
    first, second = (rotated("opt", OPTIONS[name]).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_random_rotations_differ_from_block_to_block():
    context = context_of(build(small_config("llama", num_key_value_heads=4)))
    weights = [layer.self_attn.v_proj.weight for layer in context.model.model.layers]
    with torch.no_grad():
        weights[1].copy_(weights[0])
    apply(context, RotationConfig(r1=False, r2=True, random_r2=True))
    assert not torch.allclose(weights[0], weights[1], atol=1e-3)


def test_half_precision_is_rounded_once():
    """Folding and rotating in double, the result is the nearest value there is."""
    model = build(small_config("llama"))
    exact = context_of(model.to(torch.bfloat16).to(torch.float64))
    half = context_of(build(small_config("llama"), torch.float64).to(torch.bfloat16))
    for context in (exact, half):
        apply(context, OPTIONS["R1"])
    wide, narrow = exact.model.state_dict(), half.model.state_dict()
    for name, value in narrow.items():
        assert torch.equal(value, wide[name].to(torch.bfloat16)), name


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RotationConfig(r1=False), "no rotation is selected"),
        (RotationConfig(train_smooth=True), "train_smooth=True .* set trainable=True"),
        (RotationConfig(smooth_positions=["v_proj"]), "smooth_positions needs train_smooth=True"),
        (RotationConfig(rotation_size=24 + 1), "order 25 is known here"),
    ],
    ids=["nothing", "smooth", "positions", "size"],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        check(options, {})


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gemma2", {}, "cannot be rotated: .*post_attention_layernorm.* Set r1=False"),
        ("llama", {"rotation_size": 48}, "rotation_size=48 does not divide the width 64"),
        (
            "llama",
            {"rotation_size": 64, "r4": True},
            r"rotation_size=64 does not divide the 96 inputs of model\.layers\.0\.mlp\.down_proj",
        ),
        (
            "llama",
            {"online_config": OnlineRotationConfig(online_rotation_layers=["lm_head"])},
            "online_rotation_layers has 'lm_head'",
        ),
    ],
    ids=["gemma2", "width", "inputs", "list"],
)
def test_models_that_are_refused_stay_as_they_were(name, options, said, unchanged):
    context = context_of(build(small_config(name)))
    with unchanged(context.model), pytest.raises(ValueError, match=said):
        apply(context, RotationConfig(**options))


def test_a_bias_that_has_nowhere_to_go():
    """The last norm of OPT adds a bias, which its head cannot take up, and multiplies by 0."""
    context = context_of(build(small_config("opt")))
    with torch.no_grad():
        context.model.model.decoder.final_layer_norm.weight[3] = 0
    with pytest.raises(ValueError, match=r"final_layer_norm\.bias cannot be folded"):
        apply(context, OPTIONS["R1"])


def test_named_layers_need_no_stream():
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    context = context_of(build(small_config("gemma2"), torch.float32))
    expected = logits_of(context.model)
    online = OnlineRotationConfig(online_rotation_layers=names)
    apply(context, RotationConfig(r1=False, online_config=online))
    assert all(context.layers[name].input_rotation is not None for name in names)
    torch.testing.assert_close(logits_of(context.model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_values_and_downs_need_no_stream(name):
    context = context_of(build(small_config(name), torch.float32))
    assert context.structure.stream is None
    expected, before = logits_of(context.model), context.model.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    apply(context, RotationConfig(r1=False, r2=True, r4=True))
    turned = {
        key.split(".", 3)[3]
        for key, value in context.model.state_dict().items()
        if key in before and not torch.equal(value, before[key])
    }
    assert turned == {f"self_attn.{n}_proj.weight" for n in "vo"} | {"mlp.down_proj.weight"}
    rotated_inputs = {n for n, m in context.layers.items() if m.input_rotation is not None}
    assert rotated_inputs == {n for n in context.layers if n.endswith("down_proj")} != set()
    torch.testing.assert_close(logits_of(context.model), expected, rtol=0, atol=1e-4)


def test_r3_is_skipped_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        rotated("llama", QuaRotConfig())
    assert "r3 is skipped" in caplog.text


# ---- to a checkpoint and back -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "tied", "opt", "qwen3_moe"])
def test_a_rotated_model_comes_back_bit_by_bit(name, export):
    kind, changed = MODELS[name]
    model = build(small_config(kind, **changed), torch.float32)
    context = context_of(model)
    apply(context, OPTIONS["R1R2R4"])
    for layer in context.layers.values():
        for quantizer in layer.quantizers().values():
            quantizer.enabled = True
    calibrate_parameters(model)
    ModelQuantizer.freeze(model)
    context.config.algo_config = [OPTIONS["R1R2R4"]]
    model.quant_config = context.config
    path = export(model)
    expected = logits_of(model)
    fresh = build(small_config(kind, **changed), torch.float32)
    assert torch.equal(logits_of(ModelImporter(path).import_model_info(fresh)), expected)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert torch.equal(logits_of(loaded), expected)
