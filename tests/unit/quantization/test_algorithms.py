"""Algorithms through the public face: what models compute, errors, checkpoints."""

import json
from dataclasses import asdict
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.torch import ModelImporter, ModelQuantizer
from quark.torch.algorithm import awq
from quark.torch.quantization.config.config import (
    AutoSmoothQuantConfig,
    AWQConfig,
    Config,
    GPTQConfig,
    OnlineRotationConfig,
    QronosConfig,
    QuantizationConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from tests.configurations import preset, quantized_by
from tests.models.architectures import VARIED, InDouble, tokens, varied
from tests.unit.algorithm.contexts import logits_of, outliers

ALGORITHMS = {  # options, and a scheme that they serve
    "smooth": (SmoothQuantConfig(alpha=0.5), "int8"),
    "autosmoothquant": (AutoSmoothQuantConfig(), "int8"),
    "awq": (AWQConfig(), "uint4_wo_32"),
}


quantized = partial(quantized_by, data=[tokens(40), tokens(60)])


def as_float(model):
    """Switch all quantizers off."""
    for module in model.modules():
        if isinstance(module, TensorQuantizer):
            module.enabled = False
    return model


def parameters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(model, before):
    return {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}


# ---- what models compute ------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", VARIED)
@pytest.mark.sampled(3)
def test_the_float_model_computes_the_same(name, algorithm, monkeypatch):
    monkeypatch.setattr(awq, "clip_weight_", lambda *_: None)
    options, kind = ALGORITHMS[algorithm]
    model = varied(name, torch.float64)
    split_experts(model)
    before = parameters_of(model)
    with InDouble():
        expected = logits_of(model)
    quantized(model, kind, options, frozen=False)
    with InDouble():
        found = logits_of(as_float(model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    gains = {n for n in changed(model, before) if n.endswith(("norm.weight", "ln_1.weight"))}
    assert all(any(f".{block}." in n for n in gains) for block in (0, 1))


def test_experts_that_no_token_reaches_are_rescaled_with_the_others():
    """Whatever token comes later, its experts expect the inputs that the norm gives now."""
    model = varied("mixtral", torch.float64)
    split_experts(model)
    with InDouble():
        expected = logits_of(model)
    one, reached = torch.full((1, 1), 7), []
    for name, module in model.named_modules():
        if name.endswith(".w2"):
            module.register_forward_pre_hook(lambda *_, name=name: reached.append(name))
    model(one)
    assert len(reached) == 4  # two of the four in each block
    quantized(model, "ptpc_int8", SmoothQuantConfig(), data=[one], frozen=False)
    with InDouble():
        found = logits_of(as_float(model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def error(model, name, *algorithms):
    expected = logits_of(model)
    return float((logits_of(quantized(model, name, *algorithms)) - expected).norm())


def test_outliers_cost_nothing_in_float():
    torch.testing.assert_close(logits_of(outliers()), logits_of(varied("llama")), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [SmoothQuantConfig(alpha=0.5), SmoothQuantConfig(alpha=0.8), AutoSmoothQuantConfig()],
    ids=["0.5", "0.8", "auto"],
)
def test_smoothing_recovers_what_outliers_cost(options):
    without, with_outliers = error(varied("llama"), "int8"), error(outliers(), "int8")
    smoothed = error(outliers(), "int8", options)
    assert with_outliers > 3 * without
    assert smoothed - without < 0.2 * (with_outliers - without)


@pytest.mark.parametrize("name", ["int4_wo_32", "uint4_wo_32", "mxfp4_weight_only"])
def test_awq_recovers_what_outliers_cost(name):
    plain, found = error(outliers(), name), error(outliers(), name, AWQConfig())
    assert found < (0.75 if name.startswith("mx") else 0.5) * plain  # scales are powers of two


def test_awq_beats_rounding_where_nothing_stands_out():
    for name in ("int4_wo_32", "int3_wo_32"):
        assert error(varied("llama"), name, AWQConfig()) < error(varied("llama"), name)


def test_algorithms_follow_each_other():
    model = varied("llama")
    found = error(model, "w_uint4_per_group_a_int8_per_tensor", SmoothQuantConfig(), AWQConfig())
    assert found < error(varied("llama"), "w_uint4_per_group_a_int8_per_tensor")
    assert [options.name for options in model.quant_config.algo_config] == ["smooth", "awq"]


ROTATIONS = {
    "R1": RotationConfig(),
    "R1R2R4": RotationConfig(r2=True, r4=True),
    "online R1": RotationConfig(online_r1_rotation=True, rotation_size=16),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.sampled(4)
def test_rotations_and_rescalings_go_together(name, rotation, algorithm, monkeypatch):
    monkeypatch.setattr(awq, "clip_weight_", lambda *_: None)
    options, kind = ALGORITHMS[algorithm]
    model = varied(name, torch.float64)
    with InDouble():
        expected = logits_of(model)
    quantized(model, kind, ROTATIONS[rotation], options, frozen=False)
    with InDouble():
        found = logits_of(as_float(model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def test_quantized_caches_stay_what_they_are():
    """Values that are quantized as they leave the projection are not rescaled."""
    config = preset("int8", SmoothQuantConfig(alpha=0.5))
    layer = scheme("int8")
    layer.output_tensors = scheme("int8").input_tensors
    config.kv_cache_quant_config = {"*v_proj": layer}
    config.layer_quant_config = {"*v_proj": layer}
    model = varied("llama")
    before = parameters_of(model)
    ModelQuantizer(config).quantize_model(model, [tokens()])
    assert not {n for n in changed(model, before) if n.endswith("o_proj.weight")}
    assert {n for n in changed(model, before) if n.endswith("v_proj.weight")}  # its columns


# ---- data ---------------------------------------------------------------------------------------


@pytest.fixture
def outcome(monkeypatch):
    """What an algorithm makes of data: weights, or what it judges by if rounding is decisive.

    AWQ compares roundings of weights, where the last bit of a sum may turn the scales.
    """

    def outcome(algorithm, data, name="llama"):
        options, kind = ALGORITHMS[algorithm]
        seen = []
        if algorithm == "awq":
            monkeypatch.setattr(awq, "candidate_factors", lambda *_: ())
            monkeypatch.setattr(awq, "clip_weight_", lambda layer, gram: seen.append(gram))
        model = quantized(varied(name), kind, options, data=data, frozen=False)
        return dict(enumerate(seen)) if algorithm == "awq" else parameters_of(model)

    return outcome


def close(found, expected):
    for name, weight in expected.items():
        atol = 1e-5 * float(weight.abs().max())
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=atol)


LONG = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(6))
ONES = torch.ones_like(LONG)
KINDS = {
    "mappings": lambda: [{"input_ids": LONG, "attention_mask": ONES}],
    "several mappings": lambda: [[{"input_ids": LONG[:2]}, {"input_ids": LONG[2:]}]],
    "arguments": lambda: [[LONG, ONES]],
    "generator": lambda: (part for part in LONG.split(1)),
    "iterator": lambda: iter([LONG]),
    "loader": lambda: torch.utils.data.DataLoader(LONG, batch_size=3),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_how_data_comes_changes_nothing(algorithm, kind, outcome):
    close(outcome(algorithm, KINDS[kind]()), outcome(algorithm, [LONG]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
@pytest.mark.sampled(3)
def test_padding_changes_nothing(algorithm, name, outcome):
    """Sequences of their own length, and the same padded after to one length."""
    lengths = [24, 9, 17, 5]
    apart = [row[:n].unsqueeze(0) for row, n in zip(LONG, lengths, strict=True)]
    mask = torch.arange(24) < torch.tensor(lengths).unsqueeze(1)
    padded = {"input_ids": LONG.where(mask, torch.tensor(0)), "attention_mask": mask.long()}
    expected = outcome(algorithm, apart, name)
    close(outcome(algorithm, [padded], name), expected)
    # Without the mask it is data like any other: the sequences above do differ from it.
    unmasked = outcome(algorithm, [padded["input_ids"]], name)
    assert any(not torch.allclose(unmasked[n], w, rtol=1e-3) for n, w in expected.items())


def test_padding_in_front_is_no_obstacle():
    """The structure is looked at with tokens, even where padding stands before them."""
    model = varied("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0  # of which nothing can be seen
    before = parameters_of(model)
    ids = torch.cat([torch.zeros(1, 40, dtype=torch.long), LONG[:1]], 1)
    quantized(model, "int4_wo_32", AWQConfig(), data=[ids], frozen=False)
    assert len({n for n in changed(model, before) if "norm" in n}) == 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_each_time(algorithm):
    options, kind = ALGORITHMS[algorithm]
    first, second = (
        parameters_of(quantized(varied("mixtral"), kind, options, frozen=False)) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(algorithm, dtype):
    options, kind = ALGORITHMS[algorithm]
    model = varied("llama", dtype)
    expected = logits_of(model).float()
    found = logits_of(quantized(model, kind, options)).float()
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert float((found - expected).norm()) < 0.5 * float(expected.norm())


def test_training_mode_and_caches_are_left_alone(unchanged):
    model = varied("opt").train()
    config = model.config.to_dict()
    quantized(model, "int8", AutoSmoothQuantConfig(), frozen=False)
    assert all(module.training for module in model.modules() if not list(module.children()))
    assert model.config.to_dict() == config


# ---- errors -------------------------------------------------------------------------------------


@pytest.fixture
def refused(unchanged):
    """Quantize, which must fail, leave the model as it was, and not run it before."""

    def refused(config, said, data=(LONG,), name="llama", error=ValueError, runs=0):
        model = varied(name)
        count = []
        model.register_forward_pre_hook(lambda *_: count.append(1))
        with unchanged(model), pytest.raises(error, match=said):
            ModelQuantizer(config).quantize_model(model, data)
        assert runs is None or len(count) == runs

    return refused


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("scheme_name", "options", "said"),
    [
        ("int4_wo_32", SmoothQuantConfig(), "smooth applies to none of .* needs inputs"),
        (
            "int4_wo_32",
            AutoSmoothQuantConfig(),
            "autosmoothquant applies to none of .* needs inputs",
        ),
        ("bfloat16", AWQConfig(), "awq applies to none of .* needs weights"),
        ("int8", AutoSmoothQuantConfig(compute_scale_loss="RMS"), "'RMS' is unknown"),
        ("bfloat16", SVDQuantConfig(), "svdquant applies to none of .* needs weights"),
    ],
    ids=["smooth", "auto", "awq", "loss", "svdquant"],
)
def test_refused_before_the_model_runs(refused, name, scheme_name, options, said):
    refused(preset(scheme_name, options), said, name=name)


def test_what_rounds_comes_last(refused):
    config = preset("int4_wo_32", GPTQConfig(), AWQConfig())
    refused(config, "awq follows gptq, which rounds weights for good. Put gptq last")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_data_that_is_missing(refused, algorithm):
    options, kind = ALGORITHMS[algorithm]
    refused(preset(kind, options), r"Algorithms need calibration data: pass a data", data=None)
    refused(preset(kind, options), r"The dataloader is empty: algorithms need", data=[])
    refused(preset(kind, options), r"The dataloader is empty: algorithms need", data=iter([]))


@pytest.mark.parametrize("cls", [SmoothQuantConfig, AutoSmoothQuantConfig, AWQConfig])
def test_layers_that_are_named_wrongly(refused, cls):
    written = [{"prev_op": "input_layernorm", "layers": ["self_attn.qkv_proj"]}]
    options = cls(scaling_layers=written, model_decoder_layers="model.layers")
    refused(preset("int8", options), "which cannot be rescaled: no decoder block", runs=None)


_WRONG = {"scaling_layers": [{"prev_op": "no", "layers": ["x"]}]}
_ONLINE = OnlineRotationConfig(online_rotation_layers=["model.layers.1.mlp.down_proj"])
LATER = {  # what is wrong with the second algorithm, and what is said of it
    "smooth": (SmoothQuantConfig(alpha=0.5, **_WRONG), "smooth: .* cannot be rescaled"),
    "autosmoothquant": (AutoSmoothQuantConfig(**_WRONG), "autosmoothquant: .* cannot be rescaled"),
    "awq": (AWQConfig(**_WRONG), "awq: .* cannot be rescaled"),
    "gptq blocks": (GPTQConfig(model_decoder_layers="model.no"), "model_decoder_layers='model.no'"),
    "qronos layers": (QronosConfig(inside_layer_modules=["no"]), r"inside_layer_modules=\['no'\]"),
    "rotation file": (RotationConfig(scaling_layers={"layers": []}), "must be an object with"),
    "rotation size": (RotationConfig(rotation_size=28), "28 does not divide the width 64"),
    "rotated twice": (RotationConfig(r4=True), "layers.0.mlp.down_proj cannot be rotated"),
    "listed twice": (RotationConfig(online_config=_ONLINE), "layers.1.mlp.down_proj cannot be rot"),
}


@pytest.mark.parametrize(("options", "said"), LATER.values(), ids=LATER)
def test_a_later_algorithm_is_refused_before_the_first_is_applied(refused, options, said):
    config = preset("int8", RotationConfig(r2=True, r4=True), options)
    refused(config, said, runs=None)


def test_nothing_is_left_to_rescale_once_all_is_rotated(refused):
    """Inputs that the first algorithm is going to rotate count for the second."""
    options = AWQConfig(
        scaling_layers=[{"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"]}],
        model_decoder_layers="model.layers",
    )
    quantized(varied("llama"), "int4_wo_32", options, frozen=False)
    config = preset("int4_wo_32", RotationConfig(r4=True), options)
    refused(config, r"awq found nothing to rescale", runs=None)


def test_a_model_without_anything_to_rescale(refused):
    """The output of the second layer of this architecture goes through a GELU."""
    config = Config(QuantizationConfig(), layer_quant_config={"*mlp.c_proj": scheme("int8")})
    config.algo_config = [SmoothQuantConfig()]
    refused(config, r"smooth found nothing to rescale \(", name="gpt2", runs=None)


def test_data_that_the_model_cannot_take(refused):
    config = preset("int8", SmoothQuantConfig())
    said = "Batch 1 of the dataloader has the token 64, but the model embeds the tokens 0 to 63"
    refused(config, said, data=[LONG, torch.full((1, 4), 64)])


# ---- to a checkpoint and back -------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["llama", "tied", "opt", "qwen3_moe", "gpt2"])
@pytest.mark.sampled(3)
def test_a_model_comes_back_bit_by_bit(name, algorithm, export):
    options, kind = ALGORITHMS[algorithm]
    model = quantized(varied(name), kind, options)
    expected, path = logits_of(model), export(model)
    fresh = ModelImporter(path).import_model_info(varied(name))
    assert torch.equal(logits_of(fresh), expected)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert torch.equal(logits_of(loaded), expected)
    said = json.loads((path / "config.json").read_text())["quantization_config"]["algo_config"]
    assert said == [asdict(options)]
