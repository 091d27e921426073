"""Learned rounding, against the formulas of the paper and the float model."""

from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch import ModelQuantizer
from quark.torch.algorithm import autoround, block_training
from quark.torch.algorithm.autoround import MIN_FACTOR, LearnedWeight, learn_rounding, total_error
from quark.torch.algorithm.weight_rounding import iterate_blocks
from quark.torch.numerics.enumerations import ZeroPointType
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.algo import AutoRoundConfig, AWQConfig
from quark.torch.quantization.config.config import Config, QuantizationSpec
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import quantized_layers, replace_layers, select_layers
from tests.models.architectures import build, small_config, tokens
from tests.unit.algorithm.contexts import context_of

BATCHES = [tokens(40), tokens(60), tokens(20), tokens(80)]
QUICK = {"iters": 20, "lr": 0.05, "minmax_lr": 0.02}
RAGGED = QuantizationSpec(
    dtype="fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=48, is_dynamic=False
)
FRACTION = QuantizationSpec(
    dtype="uint4",
    qscheme="per_group",
    ch_axis=-1,
    group_size=32,
    symmetric=False,
    is_dynamic=False,
    zero_point_type=ZeroPointType.float32,
)
FORMATS = {
    **{
        name: name
        for name in (
            *("int4_wo_32", "uint4_wo_32", "int2_wo_32", "int8", "int8_wo", "uint4_wo_per_channel"),
            *("fp8", "fp8_wo", "mxfp4_weight_only", "nvfp4_weight_only", "mx6", "bfp16"),
            *("int4_fp8", "int3_wo_signed_32"),
        )
    },
    "ragged": QuantizationConfig(weight=RAGGED),
    "fraction": QuantizationConfig(weight=FRACTION),
}
HELD = ("int8", "fp8", "mxfp4_weight_only", "mx6", "bfp16")  # ranges that stay


def learned_of(name, kind=nn.Linear, **options):
    """A weight of 6 outputs and 64 inputs under settled scales, and its layer."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 6) if kind is nn.Linear else Conv1D(6, 64)
    nn.init.normal_(linear.weight.detach(), generator=generator)
    model = nn.Sequential(linear)
    found = FORMATS[name]
    replace_layers(
        model, select_layers(model, Config(scheme(found, 32) if isinstance(found, str) else found))
    )
    layer = model[0]
    layer.weight_quantizer.observer(layer.weight)
    layer.weight_quantizer.compute_scales(layer.weight)
    return LearnedWeight(layer, **options), layer


def scatter_(learned):
    """Move what is learned anywhere it may go."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        learned.offset.uniform_(-0.5, 0.5, generator=generator)
        learned.factors.uniform_(0.4, 1, generator=generator)


# ---- a weight -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("name", FORMATS)
def test_it_starts_from_rounding_to_the_nearest(name, kind):
    learned, layer = learned_of(name, kind)
    expected = layer.weight_quantizer.freeze_(layer.weight.detach().clone())
    assert torch.equal(learned.value(), expected)
    assert (len(learned.factors) == 0) == (name in HELD)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_what_was_learned(name, kind):
    learned, layer = learned_of(name, kind)
    nearest = learned.value().detach()
    scatter_(learned)
    expected = learned.value().detach()
    assert not torch.equal(expected, nearest)
    learned.write()
    assert layer.frozen and torch.equal(layer.weight, expected)
    assert torch.equal(layer.quantized_tensor("weight").value(torch.float32), expected)


def straight(x):
    return x + (x.round() - x).detach()


@pytest.mark.parametrize("name", ["int4_wo_32", "int2_wo_32", "uint4_wo_32", "int8_wo"])
def test_values_and_gradients_are_those_of_the_paper(name):
    learned, layer = learned_of(name)
    scatter_(learned)
    quantizer, w = layer.weight_quantizer, layer.weight.detach()
    fmt, size = quantizer.scheme.fmt, 32 if "32" in name else 64
    scale = quantizer.scale.reshape(6, -1, 1)
    zero = quantizer.zero_point.reshape(6, -1, 1).float()
    offset = learned.offset.detach().clone().requires_grad_()
    factors = learned.factors.detach().clone().requires_grad_()
    shares = factors.reshape(len(factors), 6, -1, 1)
    low, high = (fmt.qmin - zero) * scale * shares[-1], (fmt.qmax - zero) * scale * shares[0]
    s = (high - low) / (fmt.qmax - fmt.qmin)
    z = straight(fmt.qmin - low / s).clamp(fmt.qmin, fmt.qmax)
    steps = straight(w.reshape(6, -1, size) / s + offset.reshape(6, -1, size))
    expected = ((steps + z).clamp(fmt.qmin, fmt.qmax) - z) * s
    torch.testing.assert_close(learned.value(), expected.reshape(6, 64))
    target = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    (expected.reshape(6, 64) * target).sum().backward()
    (learned.value() * target).sum().backward()
    torch.testing.assert_close(learned.offset.grad, offset.grad)
    torch.testing.assert_close(learned.factors.grad, factors.grad, rtol=1e-4, atol=1e-4)


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GRIDS = {
    "int8": torch.arange(-128, 128).float(),
    "fp8": _E4M3[_E4M3.isfinite()].unique(),
    "mxfp4_weight_only": torch.cat([_E2M1, -_E2M1]).unique(),
}


@pytest.mark.parametrize("name", GRIDS)
def test_offsets_lead_to_the_values_on_either_side_and_no_further(name):
    learned, layer = learned_of(name)
    grid, scale = GRIDS[name], layer.weight_quantizer.scale.reshape(-1, 1)
    exact = layer.weight.detach().reshape(len(scale), -1) / scale
    place = torch.searchsorted(grid, exact.contiguous())
    inside = (exact > grid[0]) & (exact < grid[-1])
    for offset, side in ((0.5, 0), (-0.5, -1)):
        with torch.no_grad():
            learned.offset.fill_(offset)
        found = learned.value().detach().reshape(len(scale), -1) / scale
        expected = grid[(place + side)[inside]]
        torch.testing.assert_close(found[inside], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_ranges_may_be_left_alone(name):
    learned, layer = learned_of(name, ranges=False)
    before = [getattr(layer.weight_quantizer, part) for part in ("scale", "scale_2")]
    scatter_(learned)
    learned.write()
    after = [getattr(layer.weight_quantizer, part) for part in ("scale", "scale_2")]
    for found, expected in zip(after, before, strict=True):
        assert found is expected or torch.equal(found, expected)


# ---- a block ------------------------------------------------------------------------------------


def first_block(kind="llama", name="int4_wo_32", batches=BATCHES):
    """The first block with the data of both streams, and the weights to learn."""
    context = context_of(build(small_config(kind), torch.float32), name, batches=batches)
    blocks = iterate_blocks(context, AutoRoundConfig(), compare=True)
    block, layers = next(blocks)
    for index in range(len(block)):
        block.run_reference(index)
    context.compute_scales(layers)
    return (
        block,
        {f"{n.removeprefix(block.name)[1:]}.weight": LearnedWeight(m) for n, m in layers.items()},
        closing(blocks),
    )


@torch.no_grad()
def error_of(block):
    """Squared error of the outputs of a block as it is."""
    pairs = [(block.call(index), block.reference_output(index)[0]) for index in range(len(block))]
    return sum(float((found - target).square().sum()) for found, target in pairs)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("name", ["int4_wo_32", "uint4_wo_32", "mxfp4_weight_only", "fp8"])
@pytest.mark.sampled(3)
def test_outputs_come_closer_to_those_of_the_float_model(name, kind):
    block, learned, opened = first_block(kind, name)
    with opened:
        before, after = learn_rounding(block, learned, AutoRoundConfig(**QUICK))
        for weight in learned.values():
            weight.write()
        assert error_of(block) == pytest.approx(after, rel=1e-4)
    assert after < 0.8 * before


def test_steps_that_lead_away_are_taken_back():
    block, learned, opened = first_block(name="int8")
    with opened:
        nearest = {name: weight.value().detach() for name, weight in learned.items()}
        before, after = learn_rounding(block, learned, AutoRoundConfig(iters=1, lr=0.5))
    assert after == before
    assert all(torch.equal(learned[name].value(), value) for name, value in nearest.items())


def test_the_best_is_kept_whatever_comes_after_it(monkeypatch):
    """Of five looks at the errors the second is the best."""
    block, learned, opened = first_block()
    seen, errors = [], iter([5.0, 3.0, 1.0, 2.0, 4.0])

    def look(block, learned):
        seen.append([weight.offset.detach().clone() for weight in learned.values()])
        return next(errors)

    monkeypatch.setattr(autoround, "total_error", look)
    with opened:
        assert learn_rounding(block, learned, AutoRoundConfig(**QUICK)) == (5.0, 1.0)
    kept = [weight.offset for weight in learned.values()]
    assert all(torch.equal(found, best) for found, best in zip(kept, seen[2], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(seen[2], seen[3], strict=True))


def test_offsets_and_factors_stay_in_their_bounds():
    block, learned, opened = first_block(name="uint4_wo_32")
    with opened:
        learn_rounding(block, learned, AutoRoundConfig(iters=4, lr=3.0, minmax_lr=0.9))
        for weight in learned.values():
            assert float(weight.offset.detach().abs().max()) <= 0.5
            assert MIN_FACTOR <= float(weight.factors.detach().min()) <= 1
            assert float(weight.factors.detach().max()) <= 1
            assert weight.value().isfinite().all()


def test_padding_does_not_count():
    ids = tokens(12)
    padded = {
        "input_ids": F.pad(ids, (0, 5)),
        "attention_mask": F.pad(torch.ones_like(ids), (0, 5)),
    }
    errors = []
    for batch in ({"input_ids": ids}, padded):
        block, learned, opened = first_block(batches=[batch])
        with opened:
            errors.append(total_error(block, learned))
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)


def test_every_batch_has_its_turn():
    batches = [torch.randint(3, 64, (rows, 8)) for rows in (1, 2, 1, 3, 1)]
    block, _, opened = first_block(batches=batches)
    with opened:
        picked = block_training.sample_batches(block, sequences=3)
        steps = [next(picked) for _ in range(20)]
    assert all(sum(len(batches[i]) for i in step) >= 3 for step in steps)
    assert all(sum(len(batches[i]) for i in step[:-1]) < 3 for step in steps)
    taken = [i for step in steps for i in step]
    assert all(set(taken[i : i + 5]) == set(range(5)) for i in range(0, len(taken) - 4, 5))


# ---- a model ------------------------------------------------------------------------------------


def quantized(name, options, data=BATCHES, kind="llama"):
    layers = scheme(name, 32) if isinstance(name, str) else name
    config = Config(layers, exclude=["lm_head"], algo_config=[options] if options else None)
    model = build(small_config(kind), torch.float32)
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, data))


def states_of(model):
    return {name: layer.quantized_tensor("weight") for name, layer in quantized_layers(model)}


@pytest.mark.parametrize("name", ["int4_wo_32", "uint4_wo_32", "nvfp4_weight_only", "fp8"])
def test_no_steps_are_rounding_to_the_nearest(name):
    plain = states_of(quantized(name, None))
    for layer, found in states_of(quantized(name, AutoRoundConfig(iters=0))).items():
        assert torch.equal(found.scale, plain[layer].scale)
        assert torch.equal(found.value(torch.float32), plain[layer].value(torch.float32))


def test_ranges_are_learned_only_if_wanted():
    plain = states_of(quantized("uint4_wo_32", None))
    wanted, unwanted = (
        states_of(quantized("uint4_wo_32", AutoRoundConfig(**QUICK, enable_minmax_tuning=tuned)))
        for tuned in (True, False)
    )
    for layer, state in plain.items():
        assert torch.equal(unwanted[layer].scale, state.scale)
        assert torch.equal(unwanted[layer].zero_point, state.zero_point)
        assert not torch.equal(unwanted[layer].codes, state.codes)
        assert bool((wanted[layer].scale < state.scale).any())
        assert bool((wanted[layer].scale <= state.scale).all())


def test_experts_that_no_token_reached_are_rounded_to_the_nearest():
    """Experts alone are learned, so that their router sends the token to the same each time."""
    options = AutoRoundConfig(**QUICK, inside_layer_modules=["w1", "w2", "w3"])
    one, reached = [torch.full((1, 1), 7)], set()
    plain = states_of(quantized("int4_wo_32", None, kind="mixtral"))
    model = quantized("int4_wo_32", options, one, kind="mixtral")
    for name, layer in quantized_layers(model):
        layer.register_forward_pre_hook(lambda *_, name=name: reached.add(name))
    with torch.no_grad():
        model(*one)
    for name, state in states_of(model).items():
        is_learned = ".experts." in name and name in reached
        assert torch.equal(state.codes, plain[name].codes) != is_learned
    assert len([name for name in plain if name not in reached]) == 2 * 2 * 3


def test_a_layer_that_no_token_reaches_has_nothing_to_learn_from():
    options = AutoRoundConfig(
        iters=2, inside_layer_modules=["experts.3.w1"], model_decoder_layers="model.layers.0"
    )
    config = Config(scheme("int4_wo_32", 32), exclude=["lm_head"], algo_config=[options])
    model = build(small_config("mixtral"), torch.float32).requires_grad_(False)
    expected = states_of(quantized("int4_wo_32", None, kind="mixtral"))
    ModelQuantizer(config).quantize_model(model, [torch.full((1, 1), 7)])
    frozen = {name: layer for name, layer in quantized_layers(model) if layer.frozen}
    assert set(frozen) == {"model.layers.0.mlp.experts.3.w1"}
    for name, layer in frozen.items():
        assert torch.equal(layer.quantized_tensor("weight").codes, expected[name].codes)


def test_the_target_is_the_float_model_with_its_own_inputs(monkeypatch):
    """Inputs are rounded in the model as it becomes, not where the outputs to reach come from."""
    targets, found = {}, {}

    def look(block, learned, options):
        rows = range(len(block))
        targets[block.name] = torch.cat([block.reference_output(row)[0] for row in rows])
        found[block.name] = torch.cat([block.call(row).detach() for row in rows])
        return 0.0, 0.0

    monkeypatch.setattr(autoround, "learn_rounding", look)
    quantized("ptpc_int8", AutoRoundConfig(), BATCHES[:1])
    model, expected = build(small_config("llama"), torch.float32), {}
    for name in targets:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, y, name=name: expected.setdefault(name, y)
        )
    with torch.no_grad():
        model(BATCHES[0])
    assert len(expected) == 2
    for name, y in expected.items():
        torch.testing.assert_close(targets[name], y)
        assert not torch.allclose(found[name], y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [
        ("iters", -1, "at least 0"),
        ("lr", -0.1, "at least 0"),
        ("minmax_lr", float("nan"), "finite"),
        ("batch_size", 0, "at least 1"),
    ],
)
def test_options_that_are_out_of_range(option, value, bound):
    said = rf"AutoRoundConfig\.{option} must be {bound}, got {value}"
    with pytest.raises(ValueError, match=said):
        AutoRoundConfig(**{option: value})


def test_nothing_follows_it(unchanged):
    config = Config(scheme("int4_wo_32"), algo_config=[AutoRoundConfig(), AWQConfig()])
    model = build(small_config("llama"))
    with unchanged(model), pytest.raises(ValueError, match="Put autoround last"):
        ModelQuantizer(config).quantize_model(model, BATCHES)


def test_layers_that_share_a_range_still_do():
    spec = QuantizationSpec(
        dtype="int8", qscheme=QSchemeType.per_tensor, symmetric=True, is_dynamic=False
    )
    config = Config(
        QuantizationConfig(weight=spec),
        exclude=["lm_head"],
        algo_config=[AutoRoundConfig(**QUICK)],
        shared_scale_groups=[["q_proj", "k_proj", "v_proj"]],
    )
    model = ModelQuantizer(config).quantize_model(build(small_config("llama")), BATCHES)
    for block in model.model.layers:
        names = ("q_proj", "k_proj", "v_proj")
        assert len({float(getattr(block.self_attn, n).weight_quantizer.scale) for n in names}) == 1
