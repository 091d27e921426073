"""Scales fitted to codes: against least squares of another kind, and never for the worse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.algorithm import scale_refit
from quark.torch.algorithm.scale_refit import best_scales, round_and_refit
from quark.torch.numerics.super_blocks import factors, minima
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import replace_layers, select_layers

OUTPUTS, INPUTS = 12, 64


def problem(groups=4, seed=0):
    """Codes, scales, a weight close to their product, and a Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-3, 4, (OUTPUTS, INPUTS), generator=generator).float()
    scales = torch.rand(OUTPUTS, groups, generator=generator) + 0.5
    noise = torch.randn(OUTPUTS, INPUTS, generator=generator) / 4
    weight = product(codes, scales) + noise
    x = torch.randn(500, INPUTS, generator=generator) @ torch.randn(
        INPUTS, INPUTS, generator=generator
    )
    return codes, scales, weight, x.T @ x / 500 + torch.eye(INPUTS)


def product(codes, scales):
    return codes * scales.repeat_interleave(INPUTS // scales.shape[1], 1)


def loss(codes, scales, weight, hessian):
    change = (product(codes, scales) - weight).double()
    return ((change @ hessian.double()) * change).sum(1)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("piece", [1, 200, scale_refit.CACHED])
def test_scales_are_those_of_least_squares(groups, piece, monkeypatch):
    monkeypatch.setattr(scale_refit, "CACHED", piece)
    monkeypatch.setattr(scale_refit, "MAX_CHANGE", 1e6)
    codes, scales, weight, hessian = problem(groups)
    found = best_scales(codes, scales, weight, hessian)
    root = torch.linalg.cholesky(hessian.double()).T
    own = torch.eye(groups, dtype=torch.float64).repeat_interleave(INPUTS // groups, 0)
    for row in range(OUTPUTS):
        columns = root @ (own * codes[row, :, None].double())
        expected = torch.linalg.lstsq(columns, root @ weight[row].double()).solution
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-3, atol=1e-4)


@given(seed=st.integers(0, 10**6), groups=st.sampled_from([1, 2, 4, 16, 64]))
def test_no_row_loses_by_it(seed, groups):
    codes, scales, weight, hessian = problem(groups, seed)
    found = best_scales(codes, scales, weight, hessian)
    before, after = (loss(codes, s, weight, hessian) for s in (scales, found))
    assert bool((after <= before * (1 + 1e-4)).all())
    assert bool((found > scales / 2.001).all()) and bool((found < scales * 2.001).all())


def test_what_codes_fit_exactly_is_found():
    codes, scales, _, hessian = problem()
    found = best_scales(codes, scales * 1.3, product(codes, scales), hessian)
    torch.testing.assert_close(found, scales, rtol=1e-4, atol=1e-5)


def test_a_row_whose_best_scales_are_far_away_keeps_its_own():
    codes, scales, weight, hessian = problem()
    weight[3] *= -1
    weight[5] *= 7
    found = best_scales(codes, scales, weight, hessian)
    assert torch.equal(found[[3, 5]], scales[[3, 5]])
    assert not torch.equal(found[4], scales[4])


def test_a_group_of_zeros_keeps_its_scale():
    codes, scales, weight, hessian = problem()
    codes[2, :16] = 0
    found = best_scales(codes, scales, weight, hessian)
    assert found[2, 0] == scales[2, 0]
    assert not torch.equal(found[2, 1:], scales[2, 1:])


FITTED = ("int4_wo_32", "uint4_wo_32", "int8_wo", "w_fp8_per_channel_sym", "w_uint4_per_group_asym")
SUPER_BLOCKS = ("q2_k", "q3_k", "q4_k", "q6_k")
FIXED = ("mxfp4_weight_only", "nvfp4_weight_only", "w_int8_per_tensor_sym", "int4_fp8", "w_mx6")


def layer_of(spec, kind=nn.Linear, width=OUTPUTS):
    linear = nn.Linear(128, width) if kind is nn.Linear else Conv1D(width, 128)
    nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(linear)
    replace_layers(model, select_layers(model, Config(QuantizationConfig(weight=spec))))
    quantizer = model[0].weight_quantizer
    quantizer.observer(model[0].weight)
    quantizer.compute_scales(model[0].weight)
    return model[0]


def turns(layer, kind):
    """Fit twice; return how many attempts there were, and whether scales changed."""
    rows = (layer.weight.T if kind is Conv1D else layer.weight).detach()
    before, seen = layer.weight_quantizer.scale.clone(), []

    def attempt(rounding):
        seen.append(rounding)
        return torch.stack([rounding(rows[:, i], i) for i in range(rows.shape[1])], 1)

    found = round_and_refit(layer, rows.clone(), torch.eye(128), [attempt] * 3)
    layer.weight.data.copy_(found.T if kind is Conv1D else found)
    layer.frozen = True
    return len(seen), not torch.equal(before, layer.weight_quantizer.scale)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("name", (*FITTED, *SUPER_BLOCKS))
def test_scales_of_rows_and_groups_are_fitted(name, kind):
    spec = scheme(name).weight
    if spec.scheme.scale.span:  # their own scales are fitted before
        spec = spec.changed(observer_cls="PerGroupMinMaxObserver")
    layer = layer_of(spec, kind)
    before = layer.weight.detach().clone()
    nearest = layer.weight_quantizer.freeze_(before.clone())
    assert turns(layer, kind) == (3, True)
    assert torch.equal(layer.quantized_tensor("weight").value(torch.float32), layer.weight)
    assert (layer.weight - before).square().sum() < (nearest - before).square().sum()


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_fitted_scales_are_in_super_blocks(name, kind):
    layer = layer_of(scheme(name).weight, kind)
    quantizer, to = layer.weight_quantizer, layer.weight_quantizer.scheme.scale
    before = (quantizer.scale * quantizer.zero_point).clone()
    turns(layer, kind)
    scale, zero_point = quantizer.scale, quantizer.zero_point
    torch.testing.assert_close(scale * zero_point, before)  # the minima do not change
    by_row = (lambda x: x.T) if kind is Conv1D else (lambda x: x)
    factors(by_row(scale), to.fmt, to.span)
    factors(minima(by_row(scale), by_row(zero_point), to.fmt), to.fmt, to.span)


@pytest.mark.parametrize("name", FIXED)
def test_other_scales_stay(name):
    layer = layer_of(scheme(name).weight)
    assert turns(layer, nn.Linear) == (1, False)


# ---- scales of rows -----------------------------------------------------------------------------


def columns_of(target, rounding):
    return torch.stack([rounding(target[:, i], i) for i in range(target.shape[1])], 1)


def rounded_by_parts(layer, target):
    """Round and fit three parts of the rows in turn; return the result and what each part gave."""
    hessian = torch.eye(128) + torch.full((128, 128), 0.3)
    given = {}

    def attempt(rounding):
        result = torch.empty_like(target)
        for rows in torch.randperm(len(target), generator=torch.Generator().manual_seed(2)).chunk(
            3
        ):
            plain = columns_of(target[rows], rounding.select_rows(rows))
            result[rows] = rounding.round_rows(rows, target[rows], hessian, columns_of)
            given.update(zip(rows.tolist(), zip(plain, result[rows], strict=True), strict=True))
        return result

    found = round_and_refit(layer, target.clone(), hessian, [attempt])
    return found, given, hessian


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("name", (*FITTED, "int4_wo_signed_32"))
def test_rows_are_fitted_where_they_are_rounded(name, kind):
    """The scales are those of the parts: the weight is not fitted as a whole behind them."""
    layer = layer_of(scheme(name).weight, kind)
    before = layer.weight_quantizer.scale.clone()
    rows = (layer.weight.T if kind is Conv1D else layer.weight).detach()
    target = rows + 0.05 * rows.roll(1, 0)  # not the weight: what the rows should compensate for
    found, given, hessian = rounded_by_parts(layer, target)
    assert not torch.equal(layer.weight_quantizer.scale, before)
    assert torch.equal(layer.weight_quantizer.scale < 0, before < 0)
    for row, (values, fitted) in given.items():
        torch.testing.assert_close(found[row], fitted, rtol=1e-5, atol=1e-6)
        losses = [float((x - target[row]) @ hessian @ (x - target[row])) for x in (values, fitted)]
        assert losses[1] <= losses[0] * (1 + 1e-5)
    layer.weight.data.copy_(found.T if kind is Conv1D else found)
    layer.frozen = True
    assert torch.equal(layer.quantized_tensor("weight").value(torch.float32), layer.weight)


@pytest.mark.parametrize("name", (*SUPER_BLOCKS, *FIXED))
def test_scales_that_rows_do_not_own_are_left_by_rows(name):
    spec = scheme(name).weight
    if spec.scheme.scale.span:
        spec = spec.changed(observer_cls="PerGroupMinMaxObserver")
    layer = layer_of(spec, width=OUTPUTS)
    _, given, _ = rounded_by_parts(layer, layer.weight.detach().clone())
    assert all(torch.equal(values, fitted) for values, fitted in given.values())


def test_each_row_keeps_the_multiple_of_its_scales_that_suits_it_best():
    """Beside an independent search: each multiple alone, with scales fitted by least squares."""
    layer = layer_of(scheme("int3_wo_32").weight)
    target = layer.weight.detach().clone()
    hessian = torch.eye(128) + torch.full((128, 128), 0.3)
    root = torch.linalg.cholesky(hessian).T
    multiples = (1.0, 0.8, 1.3)
    losses = []
    for multiple in multiples:
        scales = (layer.weight_quantizer.scale.float() * multiple).unsqueeze(-1)
        codes = (target.view(OUTPUTS, -1, 32) / scales).round().clamp(-4, 3)
        losses.append([])
        for row, own in zip(target, codes, strict=True):
            groups = root @ torch.block_diag(*own).T  # a column for each group
            fit = torch.linalg.lstsq(groups, (root @ row).unsqueeze(1)).solution
            losses[-1].append(float((groups @ fit - (root @ row).unsqueeze(1)).square().sum()))
    expected, best = torch.tensor(losses).min(0)
    assert len(best.unique()) > 1

    def attempt(rounding):
        rows = torch.arange(len(target))
        return rounding.round_rows(rows, target, hessian, columns_of, multiples)

    error = round_and_refit(layer, target.clone(), hessian, [attempt]) - target
    torch.testing.assert_close((error @ hessian * error).sum(1), expected, rtol=1e-4, atol=0)
