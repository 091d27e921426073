"""Columns that a kernel of numba rounds: the bits of torch, whatever the rows, and refusals."""

import logging

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
from quark.torch.numerics.native import compilation
from quark.torch.numerics.qdq import Factors
from quark.torch.quantization.config.presets import scheme

pytest.importorskip("numba")
INPUTS = 40


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


def problem(rows, name="int4_wo_32"):
    """A weight, a factor, an order of columns and a rounding."""
    random = torch.Generator().manual_seed(rows)
    scale = torch.rand(INPUTS, rows, generator=random) + 0.1
    rounding = ColumnRounder(Factors(scale, scale.reciprocal(), None), scheme(name).weight.scheme)
    factor = torch.randn(INPUTS, INPUTS, generator=random).triu_().div_(8)
    factor.diagonal().copy_(torch.rand(INPUTS, generator=random) + 0.5)
    weight = torch.randn(rows, INPUTS, generator=random) * 3
    return weight, factor, torch.randperm(INPUTS, generator=random), rounding


def solved(given, monkeypatch, kernel):
    monkeypatch.setenv(compilation.SWITCH, "auto" if kernel else "torch")
    return torch.stack(round_columns(*given)).view(torch.int32)


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 300, 1001])
@pytest.mark.parametrize("name", ["int4_wo_32", "int8_wo_32"])
def test_the_bits_are_those_of_torch(rows, name, monkeypatch):
    given = problem(rows, name)
    calls, run = [], leaf_rounding._by_kernel
    monkeypatch.setattr(leaf_rounding, "_by_kernel", lambda *args: calls.append(1) or run(*args))
    expected = solved(given, monkeypatch, kernel=False)
    assert not calls
    assert torch.equal(solved(given, monkeypatch, kernel=True), expected)
    assert calls


@pytest.mark.parametrize("rows", [7, 33, 300])
def test_the_bits_of_a_sweep_are_those_of_torch(rows, monkeypatch):
    weight, factor, order, rounding = problem(rows)
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
    columns = leaf_rounding.Columns(torch.ones(INPUTS, 32), None, None, factor, order)
    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", INPUTS * 32 + 1)
    monkeypatch.setattr(leaf_rounding, "_LEAST_IN_MEMORY", INPUTS * 32)
    assert leaf_rounding._kernel(columns, rounding) is not None
    monkeypatch.setattr(leaf_rounding, "is_in_memory", lambda: False)
    assert leaf_rounding._kernel(columns, rounding) is None


def test_values_that_are_not_finite_and_zeros_of_both_signs(monkeypatch):
    weight, *others = problem(64)
    weight[0], weight[1], weight[2], weight[3] = float("nan"), float("inf"), -0.0, -1e-3
    given = weight, *others
    expected = solved(given, monkeypatch, kernel=False).view(torch.float32)
    found = solved(given, monkeypatch, kernel=True).view(torch.float32)
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
    numbers = ~found.isnan()
    assert torch.equal(found[numbers].view(torch.int32), expected[numbers].view(torch.int32))


@pytest.mark.parametrize("name", ["mxfp4", "fp8_wo"])
def test_floats_and_zero_points_are_left_to_torch(name):
    weight, factor, order, rounding = problem(64, name)
    columns = leaf_rounding.Columns(weight.T.contiguous(), None, None, factor, order)
    assert leaf_rounding._kernel(columns, rounding) is None
    with_zeros = ColumnRounder(
        rounding.factors._replace(zero_point=torch.ones(INPUTS, 64)),
        scheme("uint4_wo_32").weight.scheme,
    )
    assert leaf_rounding._kernel(columns, with_zeros) is None


def test_a_wrong_kernel_is_refused_once(monkeypatch, caplog):
    given = problem(64)
    expected = solved(given, monkeypatch, kernel=False)
    run = leaf_rounding.round_columns

    def wrong(remaining, rounded, *others):
        run(remaining, rounded, *others)
        rounded[0, 0] += 1

    monkeypatch.setattr(leaf_rounding, "round_columns", wrong)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(solved(given, monkeypatch, kernel=True), expected)
    (record,) = caplog.records
    assert "int4 are not rounded by a kernel of numba: its values" in record.message
