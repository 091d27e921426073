"""AutoSmoothQuant, against outputs computed from the data itself."""

from dataclasses import replace

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.algorithm import autosmoothquant
from quark.torch.algorithm.autosmoothquant import (
    apply,
    check,
    fake_quantized_inputs,
    scaling_factors,
)
from quark.torch.quantization.config.config import (
    AutoSmoothQuantConfig,
    Config,
    Int8PerTensorSpec,
    QuantizationConfig,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.presets import scheme
from tests.models.architectures import build, small_config, tokens
from tests.unit.algorithm.contexts import context_of
from tests.unit.algorithm.losses import BATCHES, CASES, Judge, watch

LARGEST = torch.tensor([8.0, 0.0, 2.0, 0.5])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_strength(alpha):
    used = LARGEST > 0
    expected = (LARGEST / 2) ** alpha  # the middle of 8 and 0.5 is 2
    torch.testing.assert_close(scaling_factors(LARGEST, alpha)[used], expected[used])
    assert scaling_factors(LARGEST, alpha)[1] == 1


def test_no_channel_is_ever_used():
    assert torch.equal(scaling_factors(torch.zeros(3), 0.5), torch.ones(3))


@pytest.mark.parametrize(("loss", "serves"), [("mse", True), ("MAE", True), (None, True)])
def test_losses_that_are_known(loss, serves):
    check(AutoSmoothQuantConfig(compute_scale_loss=loss), {"a": scheme("int8")})


def test_a_loss_that_is_not_known():
    options = AutoSmoothQuantConfig(compute_scale_loss="MSA")
    with pytest.raises(ValueError, match="compute_scale_loss='MSA' is unknown: give MSE or MAE"):
        check(options, {"a": scheme("int8")})


def test_weights_alone_are_not_served():
    with pytest.raises(ValueError, match=r"applies to none of the layers.*needs inputs"):
        check(AutoSmoothQuantConfig(), {"a": scheme("int4_wo_128")})


def test_static_ranges_are_those_of_all_tokens():
    context = context_of(build(small_config("llama"), torch.float32), "int8")
    layer = context.layers["model.layers.0.mlp.up_proj"]
    x = torch.randn(20, 64)
    lo, hi = x.amin(0) - 1, x.amax(0) + torch.arange(64)
    scale = float(torch.maximum(-lo, hi).max()) / 127.5
    expected = torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127)
    torch.testing.assert_close(fake_quantized_inputs(layer, x, lo, hi), expected)


@pytest.mark.parametrize(("loss", "power"), [("MSE", 2), ("MAE", 1)])
@pytest.mark.parametrize(
    ("name", "kind", "readers"),
    [
        *(("w_int8_a_int8_per_tensor_sym", *case) for case in CASES),
        ("w_int8_per_channel_a_int8_per_tensor_sym_dynamic", "llama", "attention"),
        ("ptpc_int8", "llama", "into the mlp"),
        ("mxfp4", "llama", "out of the mlp"),
    ],
)
@pytest.mark.sampled(3)
def test_outputs_lose_less_than_without(name, kind, readers, loss, power):
    """With one rescaling of a block, judged by the outputs of the layers it serves."""
    context = context_of(build(small_config(kind), torch.float32), name, batches=BATCHES)
    judge = Judge(context, readers)
    plain = judge.losses(power)
    apply(context, AutoSmoothQuantConfig(compute_scale_loss=loss))
    found = judge.losses(power)
    assert plain.keys() == found.keys() and len(plain) == 2
    assert all(found[block] <= plain[block] * (1 + 1e-4) for block in plain)
    assert sum(found.values()) < sum(plain.values())


def test_the_layer_before_is_judged_by_the_inputs_it_has_now(monkeypatch):
    """Its own inputs have been rescaled when its outputs are."""
    seen = {}

    def record(layer, edit, factors, x):
        seen[edit.parameter] = x
        return torch.zeros_like(factors)

    monkeypatch.setattr(autosmoothquant, "_measure_relative_error", record)
    model = build(small_config("llama"), torch.float32)
    apply(context_of(model, "int8", batches=BATCHES), AutoSmoothQuantConfig())
    inputs = []
    name = "model.layers.0.self_attn.v_proj"
    watch(model, [name], lambda n, x, y: inputs.append(x))
    torch.testing.assert_close(seen[f"{name}.weight"], torch.cat(inputs))


def test_the_layer_before_is_not_sacrificed():
    """Rows that give large outputs because their inputs agree, not because they are large."""
    weight = Int8PerTensorSpec().to_quantization_spec()
    into = QuantizationConfig(weight=weight)
    out = QuantizationConfig(weight=weight, input_tensors=replace(weight, is_dynamic=True))
    layers = {"*up_proj": into, "*down_proj": out}

    @torch.no_grad()
    def error(*algorithms):
        model = build(small_config("llama"), torch.float32)
        model.model.embed_tokens.weight += 1
        for layer in model.model.layers:
            rows = layer.mlp.up_proj.weight[:8]
            rows.copy_(rows.abs() * layer.post_attention_layernorm.weight.sign())
        expected = model(tokens(20)).logits
        config = Config(QuantizationConfig(), layer_quant_config=layers)
        config.algo_config = list(algorithms)
        ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [tokens(60)]))
        return float((model(tokens(20)).logits - expected).norm())

    plain = error()
    assert error(SmoothQuantConfig(alpha=1)) > 10 * plain  # which looks at inputs alone
    assert error(AutoSmoothQuantConfig()) < plain
