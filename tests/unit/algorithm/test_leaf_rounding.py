"""Columns that a kernel of numba rounds: the bits of torch, whatever the rows, and refusals."""

import logging
from dataclasses import replace

import pytest
import torch

from quark.torch.algorithm import leaf_rounding
from quark.torch.algorithm.gptq_solver import (
    Inputs,
    descend_columns,
    descent_factor,
    round_columns,
)
from quark.torch.numerics.column_rounder import ColumnRounder
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.native import compilation
from quark.torch.numerics.qdq import Factors
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.quantization.config.presets import scheme

pytest.importorskip("numba")
INPUTS = 40
# Scheme of a weight -> what is changed in it.
SCHEMES = {
    "int4_wo_32": {},
    "int8_wo_32": {},
    "uint4_wo_32": {},
    "w_int2_per_group_asym": {},
    "w_uint8_per_group_asym": {"float_zero_point": True},
    "w_int4_per_group_asym": {"float_zero_point": True},
    "mxfp4": {},
    "nvfp4": {},
    "mxfp6_e2m3": {},
    "mxfp6_e3m2": {},
    "mxfp8": {},
    "fp8_wo": {},
}


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    """Small weights take the kernel too, on one thread: torch may divide rows among several."""
    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(leaf_rounding, "_LEAST_IN_MEMORY", 1)
    monkeypatch.delenv(compilation.SWITCH, raising=False)
    leaf_rounding._rows_rounded_once.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problem(rows, name="int4_wo_32", **changed):
    """A weight, a factor, an order of columns and a rounding.

    Some values are ties, some lie beyond the range, and some round to zero.
    """
    random = torch.Generator().manual_seed(rows)
    given = replace(scheme(name).weight.scheme, **changed)
    fmt, shape = given.fmt, (INPUTS, rows)
    scale = torch.rand(shape, generator=random) + 0.1
    if given.scales_by_powers:
        scale = 2.0 ** torch.randint(-20, 20, shape, generator=random)
    zeros = None
    if not given.symmetric:
        zeros = torch.randint(fmt.qmin, fmt.qmax + 1, shape, generator=random).float()
        zeros[::2] += 0.4 * given.float_zero_point
    rounding = ColumnRounder(Factors(scale, scale.reciprocal(), zeros), given)
    factor = torch.randn(INPUTS, INPUTS, generator=random).triu_().div_(8)
    factor.diagonal().copy_(torch.rand(INPUTS, generator=random) + 0.5)
    reach = fmt.max_value if fmt.is_float else fmt.qmax
    weight = torch.randn(rows, INPUTS, generator=random) * max(reach, 2) * 0.7
    weight[:, ::3] = (weight[:, ::3] * 4).round() / 4
    weight[:, 1::4] *= 1e-3
    weight *= scale.T
    return weight, factor, torch.randperm(INPUTS, generator=random), rounding


def unrounded(values, factor, order):
    results = torch.empty_like(values), torch.empty_like(values)
    return leaf_rounding.Columns(values, *results, factor, order)


def solved(given, monkeypatch, kernel):
    """The bits of the rounded weight and of the errors, by a kernel that is not refused, or not."""
    monkeypatch.setenv(compilation.SWITCH, "auto" if kernel else "torch")
    weight, factor, order, rounding = given
    columns = unrounded(weight.T.contiguous(), factor, order)
    assert (leaf_rounding._kernel(columns, rounding) is not None) == kernel
    return torch.stack(round_columns(*given)).view(torch.int32)


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 300, 1001])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_bits_are_those_of_torch(rows, name, monkeypatch):
    given = problem(rows, name, **SCHEMES[name])
    calls, run = [], leaf_rounding._by_kernel
    monkeypatch.setattr(leaf_rounding, "_by_kernel", lambda *args: calls.append(1) or run(*args))
    expected = solved(given, monkeypatch, kernel=False)
    assert not calls
    assert torch.equal(solved(given, monkeypatch, kernel=True), expected)
    assert calls


@pytest.mark.parametrize("rows", [7, 33, 300])
@pytest.mark.parametrize("name", ["int4_wo_32", "uint4_wo_32", "nvfp4"])
def test_the_bits_of_a_sweep_are_those_of_torch(rows, name, monkeypatch):
    weight, factor, order, rounding = problem(rows, name)
    hessian = factor.T @ factor + torch.eye(INPUTS)
    inputs = Inputs(hessian, factor, order)
    current = torch.stack([rounding(weight[:, i] + 0.3, i) for i in range(INPUTS)], 1)
    given = current, weight, inputs, descent_factor(inputs), rounding
    calls, run = [], leaf_rounding._by_kernel
    monkeypatch.setattr(leaf_rounding, "_by_kernel", lambda *args: calls.append(1) or run(*args))
    results = []
    for kernels in ("torch", "auto"):
        monkeypatch.setenv(compilation.SWITCH, kernels)
        results.append(descend_columns(*given))
        assert bool(calls) == (kernels == "auto")
    assert torch.equal(*results) and not torch.equal(results[0], current)


def test_few_rows_take_the_kernel_once_numba_is_in_memory(monkeypatch):
    _, factor, order, rounding = problem(32)
    columns = unrounded(torch.ones(INPUTS, 32), factor, order)
    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", INPUTS * 32 + 1)
    monkeypatch.setattr(leaf_rounding, "_LEAST_IN_MEMORY", INPUTS * 32)
    assert leaf_rounding._kernel(columns, rounding) is not None
    monkeypatch.setattr(leaf_rounding, "is_in_memory", lambda: False)
    assert leaf_rounding._kernel(columns, rounding) is None


@pytest.mark.parametrize("name", SCHEMES)
def test_values_that_are_not_finite_and_zeros_of_both_signs(name, monkeypatch):
    weight, *others = problem(64, name, **SCHEMES[name])
    weight[0], weight[1], weight[2], weight[3] = float("nan"), float("inf"), -0.0, -1e-9
    given = weight, *others
    expected = solved(given, monkeypatch, kernel=False).view(torch.float32)
    found = solved(given, monkeypatch, kernel=True).view(torch.float32)
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
    numbers = ~found.isnan()
    assert torch.equal(found[numbers].view(torch.int32), expected[numbers].view(torch.int32))


def test_zeros_keep_their_sign_where_a_zero_point_with_a_fraction_is_zero(monkeypatch):
    weight, factor, order, rounding = problem(64, "w_int4_per_group_asym", float_zero_point=True)
    rounding.factors.zero_point.zero_()
    given = weight.mul_(0).sub_(1e-3), factor, order, rounding
    expected = solved(given, monkeypatch, kernel=False)
    assert (expected[0] == torch.iinfo(torch.int32).min).any()  # -0
    assert torch.equal(solved(given, monkeypatch, kernel=True), expected)


@pytest.mark.parametrize(
    "changed",
    [
        {"rounding": RoundType.floor},
        {"fmt": Dtype.mx6.value},
        {"fmt": Dtype.mx.value, "scale": E8M0},
        {"fmt": Dtype.iq4_nl.value},
        {"fmt": Dtype.fp8_e5m3.value},
        {"fmt": Dtype.int32.value},
    ],
)
def test_other_roundings_are_left_to_torch(changed):
    weight, factor, order, rounding = problem(64)
    columns = unrounded(weight.T.contiguous(), factor, order)
    assert leaf_rounding._kernel(columns, rounding) is not None
    other = ColumnRounder(rounding.factors, replace(rounding.scheme, **changed))
    assert leaf_rounding._kernel(columns, other) is None


def test_a_wrong_kernel_is_refused_once(monkeypatch, caplog):
    given = problem(64)
    expected = solved(given, monkeypatch, kernel=False)
    run = leaf_rounding.round_columns_to_integers

    def wrong(remaining, rounded, *others):
        run(remaining, rounded, *others)
        rounded[0, 0] += 1

    monkeypatch.setattr(leaf_rounding, "round_columns_to_integers", wrong)
    monkeypatch.setenv(compilation.SWITCH, "auto")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(torch.stack(round_columns(*given)).view(torch.int32), expected)
    (record,) = caplog.records
    assert "int4 are not rounded by a kernel of numba: its values" in record.message
