"""Clipped weights, against an exhaustive search and against the data itself."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.algorithm import clipping
from quark.torch.algorithm.clipping import FRACTIONS, clip_weight, weight_with_best_ranges
from quark.torch.numerics.native import compilation
from quark.torch.quantization.config.config import (
    Config,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    MX6Spec,
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.quantization.preparation import replace_layers, select_layers

INPUTS, OUTPUTS = 256, 6
BLOCKS = QuantizationSpec(
    dtype="fp8_e4m3", qscheme="per_block", block_size=(32, 32), is_dynamic=False
)


def made(layer_config, kind=nn.Linear, inputs=INPUTS, outputs=OUTPUTS, seed=0):
    """A quantized layer with a few large weights, and correlated inputs for it."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(inputs, outputs) if kind is nn.Linear else Conv1D(outputs, inputs)
    values = torch.randn(outputs, inputs, generator=generator)
    values[torch.rand(values.shape, generator=generator) < 0.03] *= 4
    with torch.no_grad():
        linear.weight.copy_(values if kind is nn.Linear else values.T)
    model = nn.Sequential(linear)
    replace_layers(model, select_layers(model, Config(layer_config)))
    x = torch.randn(400, inputs, generator=generator)
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    return model[0], x @ (torch.eye(inputs) + mix)


def int4(x):
    """Symmetric int4 of each row."""
    scale, zeros = x.abs().amax(1) / 7.5, torch.zeros(len(x), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale, zeros, 0, -8, 7)


def errors_of(change, x, width):
    """Squared changes of outputs that each group of each row causes by itself."""
    pieces = change.double().view(len(change), -1, width)
    inputs = x.double().view(len(x), -1, width)
    return torch.einsum("tgi,ogi->otg", inputs, pieces).square().sum(1)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("width", [32, INPUTS])
def test_an_exhaustive_search_finds_the_same(kind, width):
    spec = Int4PerGroupSpec(ch_axis=-1, group_size=width).to_quantization_spec()
    layer, x = made(QuantizationConfig(weight=spec), kind)
    weight = (layer.weight if kind is nn.Linear else layer.weight.T).detach()
    found = clip_weight(layer, x.T @ x)
    found = found if kind is nn.Linear else found.T

    groups = weight.reshape(-1, width)
    candidates = [groups]
    for share in FRACTIONS:
        bound = share * groups.abs().amax(1, keepdim=True)
        candidates.append(groups.clamp(-bound, bound))
    losses = torch.stack(
        [errors_of((int4(c) - groups).view(weight.shape), x, width) for c in candidates]
    )
    best = losses.argmin(0).flatten()
    expected = torch.stack([candidates[int(b)][i] for i, b in enumerate(best)])
    assert bool((best > 0).any())
    torch.testing.assert_close(found, expected.view(weight.shape))


WEIGHTS = {str(scheme(name, 32).weight): name for name in scheme_names()}  # each format once
GROUPED = [
    name
    for name in WEIGHTS.values()
    if (spec := scheme(name, 32).weight) is not None and spec.qscheme is QSchemeType.per_group
]
PER_ROW = ["int8_wo", "fp8_wo", "int4_wo_per_channel", "uint4_wo_per_channel"]


def with_ranges(name):
    """Return a scheme whose super-blocks, if it has any, are made of ranges."""
    config = scheme(name, 32)
    if config.weight.scheme.scale.span:
        weight = config.weight.changed(observer_cls="PerGroupMinMaxObserver")
        config = replace(config, weight=weight)
    return config


@pytest.mark.parametrize("search", [clip_weight, weight_with_best_ranges])
def test_super_blocks_that_fit_their_scales_have_no_range(search):
    layer, x = made(scheme("q4_k"))
    assert search(layer, x.T @ x) is None


@pytest.mark.parametrize("search", [clip_weight, weight_with_best_ranges])
@pytest.mark.parametrize("name", ["int2_wo_signed_32", "int4_wo_signed_32", "q3_k"])
def test_signed_scales_keep_their_signs(name, search):
    layer, x = made(with_ranges(name))
    before = layer.weight.detach().clone()
    found = search(layer, x.T @ x)
    assert not torch.equal(found, before)
    with torch.no_grad():
        layer.weight.neg_()
    assert torch.equal(search(layer, x.T @ x), -found)
    width = layer.weight_quantizer.scheme.group
    is_up = [w.view(-1, width).amax(1) > -w.view(-1, width).amin(1) for w in (before, found)]
    assert torch.equal(*is_up) and 0 < is_up[0].float().mean() < 1


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("name", [*GROUPED, *PER_ROW])
def test_never_worse_whatever_the_format(name, kind):
    layer, x = made(with_ranges(name), kind)
    weight, quantizer = layer.weight.detach(), layer.weight_quantizer
    width = quantizer.scheme.fmt.block or quantizer.scheme.group
    width = width if width > 0 else INPUTS

    def loss(candidate):
        change = quantizer.fake_quantize_copy(candidate) - weight
        return float(errors_of(change if kind is nn.Linear else change.T, x, width).sum())

    before, after = loss(weight), loss(clip_weight(layer, x.T @ x))
    assert after < before if quantizer.scheme.fmt.bits <= 4 else after <= before * (1 + 1e-6)


@pytest.mark.parametrize(
    "name", ["int4_wo_32", "int3_wo_signed_32", "mxfp4", "fp8_wo", "mx6", "uint4_wo_32"]
)
def test_the_kernel_of_inputs_gives_the_same_bits(name, monkeypatch):
    """Numba rounds candidates where their scales are for their own range, zero points apart."""
    pytest.importorskip("numba")
    layer, x = made(scheme(name), outputs=64)
    kernel, taken = clipping.fake_quantize, []

    def counted(*args):
        values = kernel(*args)
        taken.append(values is not None)
        return values

    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1)
    monkeypatch.delenv(compilation.SWITCH, raising=False)
    monkeypatch.setattr(clipping, "fake_quantize", counted)
    clipped, ranges = clip_weight(layer, x.T @ x), weight_with_best_ranges(layer, x.T @ x)
    assert len(taken) >= 2 * len(FRACTIONS)
    assert set(taken) == {name != "uint4_wo_32"}
    monkeypatch.setattr(clipping, "fake_quantize", lambda *args: None)
    assert torch.equal(clip_weight(layer, x.T @ x), clipped)
    assert torch.equal(weight_with_best_ranges(layer, x.T @ x), ranges)


@pytest.mark.parametrize("shift", [0.0, 3.0, -30.0], ids=str)
@pytest.mark.parametrize("width", [16, 128])
def test_the_ends_of_a_range_say_as_much_as_its_values(width, shift, monkeypatch):
    """Also where all values of a group have one sign."""
    layer, x = made(scheme("w_int2_per_group_asym", width), outputs=64)
    with torch.no_grad():
        layer.weight[::2] += shift
    move_ends, taken = clipping._move_ends, []

    def moved(*args, by_values=False):
        taken.append(args[-1])
        return move_ends(*args[:-1], args[-1] and not by_values)

    monkeypatch.setattr(clipping, "_move_ends", moved)
    ranges = weight_with_best_ranges(layer, x.T @ x)
    monkeypatch.setattr(clipping, "_move_ends", partial(moved, by_values=True))
    assert torch.equal(weight_with_best_ranges(layer, x.T @ x), ranges)
    assert taken == [True, True]


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp4(values, scale):
    """Values rounded to multiples of fp4 numbers, the largest of which is 6."""
    steps = values.abs() / scale
    nearest = FP4[(steps.unsqueeze(-1) - FP4).abs().argmin(-1)]
    return nearest * scale * values.sign()


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
def test_the_largest_value_of_a_group_may_be_four_or_six(kind):
    spec = QuantizationSpec(
        dtype="fp4", qscheme="per_group", group_size=32, ch_axis=-1, is_dynamic=False
    )
    layer, x = made(QuantizationConfig(weight=spec), kind)
    quantizer, transposed = layer.weight_quantizer, kind is not nn.Linear
    weight, ranges = layer.weight.detach(), weight_with_best_ranges(layer, x.T @ x)
    rounded = quantizer.fake_quantize_copy(weight, ranges)
    weight, rounded = (t.T if transposed else t for t in (weight, rounded))
    chosen = errors_of(rounded - weight, x, 32)
    groups = weight.unflatten(1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True)
    six, four = (errors_of(fp4(groups, amax / n).flatten(1) - weight, x, 32) for n in (6, 4))
    assert bool((four < 0.9 * six).any())
    assert bool((chosen <= torch.minimum(six, four) * (1 + 1e-4)).all())


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
def test_no_block_scale_of_two_levels_is_better(kind):
    """Against all numbers of e4m3 around the usual one, under the same tensor scale."""
    layer, x = made(scheme("nvfp4"), kind, inputs=64)
    quantizer, transposed = layer.weight_quantizer, kind is not nn.Linear
    quantizer.compute_block_scales(layer.weight)
    unit, usual = quantizer.scale_2.clone(), quantizer.scale.clone()
    quantizer.compute_block_scales(weight_with_best_ranges(layer, x.T @ x))
    assert torch.equal(quantizer.scale_2, unit)
    weight = (layer.weight.T if transposed else layer.weight).detach()
    usual, found = (t.T if transposed else t for t in (usual, quantizer.scale))
    groups = weight.unflatten(1, (-1, 16))

    def loss(scales):
        return errors_of(fp4(groups, scales.unsqueeze(-1)).flatten(1) - weight, x, 16)

    chosen = loss(found)
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for scale in codes * unit:
        is_near = (scale > 0.55 * usual) & (scale < 1.85 * usual)
        tried = torch.where(is_near, scale, usual)
        assert bool((chosen <= loss(tried) * (1 + 1e-4)).all())
    assert float(chosen.sum()) < 0.8 * float(loss(usual).sum())


@pytest.mark.parametrize("name", ["nvfp4", "w_fp4_per_group"])
def test_larger_ranges_lose_less_than_clipping_alone(name):
    layer, x = made(scheme(name, 32))
    weight, quantizer = layer.weight.detach(), layer.weight_quantizer
    width = quantizer.scheme.fmt.block or quantizer.scheme.group

    def loss(ranges):
        change = quantizer.fake_quantize_copy(weight, ranges) - weight
        return float(errors_of(change, x, width).sum())

    assert loss(weight_with_best_ranges(layer, x.T @ x)) < loss(clip_weight(layer, x.T @ x))


@pytest.mark.parametrize("name", ["int4_wo_32", "mxfp4", "mxfp6_e2m3"])
def test_other_formats_are_clipped_only(name):
    layer, x = made(scheme(name))
    assert torch.equal(weight_with_best_ranges(layer, x.T @ x), clip_weight(layer, x.T @ x))


@pytest.mark.parametrize("seed", range(5))
def test_a_scale_of_the_scales_may_shrink(seed):
    """Clipping the largest group changes the scales of all others."""
    layer, x = made(scheme("nvfp4"), seed=seed)
    with torch.no_grad():
        layer.weight[2, :16] *= 30
    weight, quantizer = layer.weight.detach(), layer.weight_quantizer

    def loss(candidate):
        return float(errors_of(quantizer.fake_quantize_copy(candidate) - weight, x, 16).sum())

    assert loss(clip_weight(layer, x.T @ x)) <= loss(weight)


@pytest.mark.parametrize(
    "spec",
    [
        Int8PerTensorSpec().to_quantization_spec(),
        Int4PerChannelSpec(ch_axis=1).to_quantization_spec(),
        Int4PerGroupSpec(ch_axis=0, group_size=2).to_quantization_spec(),
        MX6Spec(ch_axis=0, block_size=16).to_quantization_spec(),
        BLOCKS,
        scheme("int4_fp8").weight,
    ],
    ids=["tensor", "columns", "groups of rows", "shared exponents", "blocks", "two stages"],
)
def test_rows_that_share_a_range_are_left_alone(spec):
    layer, x = made(QuantizationConfig(weight=spec), outputs=64)
    assert clip_weight(layer, x.T @ x) is None


def test_groups_that_are_cut_short_are_left_alone():
    layer, x = made(scheme("mxfp4"), inputs=48)
    assert clip_weight(layer, x.T @ x) is None


def test_inputs_that_are_always_zero_ask_for_nothing():
    layer, _ = made(scheme("int4_wo_32"))
    assert torch.equal(clip_weight(layer, torch.zeros(INPUTS, INPUTS)), layer.weight)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
def test_the_parts_in_which_rows_are_compared_do_not_matter(kind, monkeypatch):
    spec = Int4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
    layer, x = made(QuantizationConfig(weight=spec), kind)
    before, whole = layer.weight.detach().clone(), clip_weight(layer, x.T @ x)
    monkeypatch.setattr(clipping, "CACHED", 3 * INPUTS)
    assert torch.equal(clip_weight(layer, x.T @ x), whole)
    assert torch.equal(layer.weight, before) and not torch.equal(whole, before)


def grids(groups):
    """Every grid of 2 bits that holds zero, among fine scales: (scales, zero points, values)."""
    largest = groups.abs().amax(1, keepdim=True)
    for share in torch.linspace(0.2, 1.4, 61):
        for zero in range(4):
            scale = share * largest
            yield ((groups / scale).round() + zero).clamp(0, 3).sub(zero) * scale


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
def test_scale_and_zero_point_are_chosen_together(kind, monkeypatch):
    """Nearly as good as all scales with all zero points; both ends at once are worse."""
    spec = QuantizationSpec(
        dtype="uint2",
        qscheme="per_group",
        group_size=32,
        ch_axis=-1,
        symmetric=False,
        is_dynamic=False,
    )
    layer, x = made(QuantizationConfig(weight=spec), kind)
    weight = (layer.weight if kind is nn.Linear else layer.weight.T).detach()
    groups = weight.reshape(-1, 32)

    def loss(ranges):
        quantizer = layer.weight_quantizer
        rounded = quantizer.fake_quantize_(layer.weight.detach().clone(), ranges)
        change = (rounded if kind is nn.Linear else rounded.T) - weight
        return errors_of(change, x, 32)

    tried = [errors_of((v - groups).view(weight.shape), x, 32) for v in grids(groups)]
    best = torch.stack(tried).amin(0)
    together = loss(weight_with_best_ranges(layer, x.T @ x))
    monkeypatch.setattr(clipping, "FEW_BITS", 0)
    apart = loss(weight_with_best_ranges(layer, x.T @ x))
    assert bool((together <= apart * (1 + 1e-5)).all())
    assert float(together.sum()) < 0.95 * float(apart.sum())
    assert float(together.sum()) < 1.1 * float(best.sum())
