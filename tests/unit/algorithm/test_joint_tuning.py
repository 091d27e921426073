"""Joint tuning of weights and ranges, against formulas and the float model."""

import math
from contextlib import closing

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.algorithm import joint_tuning
from quark.torch.algorithm.joint_tuning import TunedWeight, tune
from quark.torch.algorithm.weight_rounding import iterate_blocks
from quark.torch.quantization.config.algo import BlockwiseJointTuningConfig
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import quantized_layers, replace_layers, select_layers
from tests.configurations import preset, quantized
from tests.models.architectures import build, small_config, tokens
from tests.unit.algorithm.contexts import context_of

BATCHES = [tokens(40), tokens(60), tokens(20), tokens(80)]
QUICK = {"epochs": 3, "weight_lr": 1e-3, "qparam_lr": 1e-3}
FORMATS = (
    *("int4_wo_32", "uint4_wo_32", "int2_wo_32", "int8_wo", "fp8_wo", "int4_fp8"),
    *("mxfp4_weight_only", "nvfp4_weight_only", "int4_wo_signed_32"),
)
FIXED = ("int4_fp8", "mxfp4_weight_only")  # formats whose ranges stay, where there are such


def tuned_of(name, **options):
    """A weight of 6 outputs and 64 inputs under final scales, and its layer."""
    linear = nn.Linear(64, 6)
    nn.init.normal_(linear.weight.detach(), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(linear)
    replace_layers(model, select_layers(model, Config(scheme(name, 32))))
    layer = model[0]
    layer.weight_quantizer.observer(layer.weight)
    layer.weight_quantizer.compute_scales(layer.weight)
    return TunedWeight("0", layer, BlockwiseJointTuningConfig(**options)), layer


@pytest.mark.parametrize("name", FORMATS)
def test_the_start_is_rounding_to_the_nearest(name):
    tuned, layer = tuned_of(name)
    assert torch.equal(tuned.value(), layer.value("weight"))


@pytest.mark.parametrize("name", FORMATS)
def test_the_written_weight_is_what_was_trained(name):
    """Codes and scales give the value, and rounding it again changes nothing."""
    tuned, layer = tuned_of(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.parameters():
            factors = torch.empty_like(parameter).uniform_(0.7, 1.3, generator=generator)
            parameter.mul_(factors)
    value, before = tuned.value().detach(), layer.value("weight")
    tuned.write()
    assert layer.frozen and torch.equal(layer.weight, value) and not torch.equal(value, before)
    state = layer.quantized_tensor("weight")
    torch.testing.assert_close(state.value(torch.float32), value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["uint4_wo_32", "int4_wo_32"])
def test_gradients_of_integers(name):
    """The straight-through estimator, written with autograd of rounded and clamped steps."""
    tuned, layer = tuned_of(name)
    state, fmt = layer.quantized_tensor("weight"), layer.weight_quantizer.scheme.fmt
    weight = layer.weight.detach().clone().requires_grad_()
    scale = (0.6 * state.scale).clone().requires_grad_()  # the largest values saturate
    has_zeros = name.startswith("u")
    zero = state.zero_point.float() if has_zeros else torch.zeros_like(scale)
    start = ((fmt.qmin - zero) * scale.detach()).requires_grad_()

    def through(exact, rounded):
        return exact + (rounded - exact).detach()

    wide = scale.repeat_interleave(32, 1)
    exact_zero = (fmt.qmin - start / scale) if has_zeros else zero
    zeros = through(exact_zero, exact_zero.round()).repeat_interleave(32, 1)
    steps = weight / wide
    codes = (through(steps, steps.round()) + zeros).clamp(fmt.qmin, fmt.qmax)
    expected = (codes - zeros) * wide
    with torch.no_grad():
        tuned.scale.copy_(scale)
        if has_zeros:
            tuned.start.copy_(start)
    found = tuned.value()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    ends = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    pairs = [(tuned.weight, weight), (tuned.scale, scale)]
    pairs += [(tuned.start, start)] if has_zeros else []
    for ours, theirs in zip(
        torch.autograd.grad(found, [ours for ours, _ in pairs], ends),
        torch.autograd.grad(expected, [theirs for _, theirs in pairs], ends),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_trains():
    def parts(name="uint4_wo_32", **options):
        tuned, _ = tuned_of(name, **options)
        parts = {"weight": tuned.weight, "scale": tuned.scale, "start": tuned.start}
        return {name for name, part in parts.items() if part is not None}

    assert parts() == {"weight", "scale", "start"}
    assert parts("int4_wo_32") == {"weight", "scale"}
    assert parts("mxfp4_weight_only") == {"weight"}
    assert parts(weight_lr=0) == {"scale", "start"} and parts(qparam_lr=0) == {"weight"}
    assert parts(trainable_modules=["q_proj"]) == {"scale", "start"}
    assert parts(quant_trainable_modules=["q_proj", "0"]) == {"weight", "scale", "start"}


@pytest.fixture
def first_block():
    """The first block of a model, with weights to tune, ready for training."""
    made = []

    def first_block(name="uint4_wo_32", **options):
        options = BlockwiseJointTuningConfig(**{**QUICK, **options})
        context = context_of(build(small_config("llama")), name, batches=BATCHES)
        blocks = iterate_blocks(context, options, compare=True)
        made.append(blocks)
        block, layers = next(blocks)
        for index in range(len(block)):
            block.run_reference(index)
        context.compute_scales(layers)
        weights = {
            f"{name}.weight".removeprefix(f"{block.name}."): TunedWeight(name, layer, options)
            for name, layer in layers.items()
        }
        return block, weights, options

    yield first_block
    for blocks in made:
        with closing(blocks):
            pass


@pytest.mark.parametrize("part", ["weight_lr", "qparam_lr"])
def test_each_part_alone_lowers_the_error(part, first_block):
    block, weights, options = first_block(**{part: 0})
    before, after = tune(block, weights, options)
    assert after < 0.97 * before


def test_the_best_epoch_counts(first_block):
    block, weights, options = first_block(weight_lr=10.0, qparam_lr=0.0)
    start = {name: weight.value().detach() for name, weight in weights.items()}
    before, after = tune(block, weights, options)
    assert after == before
    for name, weight in weights.items():
        assert torch.equal(weight.value(), start[name])


def test_rates_fall_along_a_half_cosine(first_block, monkeypatch):
    seen = []

    class Recorded(torch.optim.AdamW):
        def step(self):
            norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]])
            seen.append(([g["lr"] for g in self.param_groups], float(norm.norm())))
            super().step()

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    block, weights, options = first_block(qparam_lr=4e-3, min_lr_factor=10, max_grad_norm=1e-4)
    tune(block, weights, options)
    steps = 3 * (len(BATCHES) // 2)
    assert len(seen) == steps
    for step, (rates, norm) in enumerate(seen):
        share = 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2
        assert rates == pytest.approx([1e-3 * share, 4e-3 * share])
        assert norm == pytest.approx(1e-4, rel=1e-3)


@torch.no_grad()
def test_the_whole_model_gets_closer():
    data = [batch.clone() for batch in BATCHES]
    model = build(small_config("llama"))
    expected = [model(batch).logits for batch in data]

    def loss(*algorithms):
        config = preset("w_int2_per_group_asym", *algorithms)
        found = quantized(build(small_config("llama")), config, data)
        pairs = zip(data, expected, strict=True)
        return sum(float((found(x).logits - y).square().mean()) for x, y in pairs)

    assert loss(BlockwiseJointTuningConfig(**QUICK)) < 0.8 * loss()


def test_layers_of_which_nothing_trains_are_rounded_to_the_nearest():
    options = BlockwiseJointTuningConfig(
        **QUICK, trainable_modules=["mlp"], quant_trainable_modules=["mlp"]
    )
    tuned = quantized(build(small_config("llama")), preset("int4_wo_32", options), BATCHES)
    nearest = quantized(build(small_config("llama")), preset("int4_wo_32"))
    for (name, layer), (_, other) in zip(
        quantized_layers(tuned), quantized_layers(nearest), strict=True
    ):
        assert torch.equal(layer.weight, other.weight) is ("mlp" not in name)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"weight_lr": -1e-4}, "weight_lr must be at least 0"),
        ({"qparam_lr": math.nan}, "qparam_lr must be finite, got nan"),
        ({"min_lr_factor": 0.5}, "min_lr_factor must be at least 1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
    ],
)
def test_options_out_of_range(options, problem):
    with pytest.raises(ValueError, match=rf"BlockwiseJointTuningConfig\.{problem}"):
        BlockwiseJointTuningConfig(**options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"weight_lr": 0, "qparam_lr": 0}, "weight_lr and qparam_lr are both 0, so nothing trains"),
        ({"trainable_modules": ["zz"]}, r"trainable_modules=\['zz'\] selects none of the layers"),
        (
            {"quant_trainable_modules": ["q_porj", "zz"]},
            r"quant_trainable_modules=\['q_porj', 'zz'\] selects none of the layers to tune",
        ),
        (
            {"trainable_modules": ["lm_head"]},
            r"trainable_modules=\['lm_head'\] selects none of the layers to tune, such as model",
        ),
    ],
)
def test_options_that_would_train_nothing(options, problem, unchanged):
    model = build(small_config("llama"))
    config = preset("int4_wo_32", BlockwiseJointTuningConfig(**options))
    with unchanged(model), pytest.raises(ValueError, match=f"blockwise_joint_tuning: {problem}"):
        ModelQuantizer(config).quantize_model(model, BATCHES)


@pytest.mark.parametrize("field", ["trainable_modules", "quant_trainable_modules"])
def test_one_part_of_several_that_selects_nothing(field, caplog):
    options = BlockwiseJointTuningConfig(**QUICK, **{field: ["mlp", "q_porj"]})
    quantized(build(small_config("llama")), preset("int4_wo_32", options), BATCHES)
    assert f"{field} has 'q_porj', which matches no module of the model" in caplog.text
    assert "Nearest: q_proj" in caplog.text


def test_documented_options():
    """Names and defaults of the documents of AMD Quark."""
    documented = {
        "name": "blockwise_joint_tuning",
        "epochs": 5,
        "weight_lr": 1e-4,
        "qparam_lr": 1e-4,
        "weight_decay": 0.0,
        "qparam_weight_decay": 0.0,
        "min_lr_factor": 20.0,
        "max_grad_norm": 0.3,
        "model_decoder_layers": "",
        "trainable_modules": [],
        "quant_trainable_modules": [],
    }
    assert algo_config_from_dict(documented) == BlockwiseJointTuningConfig()
    assert joint_tuning.ALGORITHM.work is joint_tuning.work
