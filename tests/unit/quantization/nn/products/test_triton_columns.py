"""Panels of columns in one launch: on the GPU of the machine, or in the interpreter of Triton."""

import logging
from unittest import mock

import pytest
import torch

from quark.torch.algorithm import gptq_solver
from quark.torch.algorithm.gptq_solver import inverse_factor, round_columns
from quark.torch.numerics.column_rounder import ZeroKeepingRounder
from quark.torch.numerics.stages import TwoRoundings
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.nn.products import triton_columns, triton_functions
from quark.torch.quantization.nn.quantizer import TensorQuantizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUTS, INPUTS = 40, triton_columns.PANEL + 40  # remainders of both tiles
NAMES = [name for name in scheme_names() if not name.endswith(("_64", "_128"))]
ORDINARY = ["int4_wo_32", "w_uint4_per_group_asym", "fp8", "nvfp4", "mxfp4", "mx9"]
CASES = [n if n in ORDINARY else pytest.param(n, marks=pytest.mark.nightly) for n in NAMES]
runs_triton = pytest.mark.triton
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of infinity and NaN


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    """Take the kernel where Triton runs here, and prove it anew."""
    monkeypatch.setitem(gptq_solver.PANELS, DEVICE, triton_columns.panel_rounding)
    triton_functions.log_once.cache_clear()
    triton_columns._is_right.cache_clear()
    yield
    triton_columns._is_right.cache_clear()


def rounding_of(name, weight):
    """The rounding of columns of a weight in a scheme; None if it has no scales."""
    quantizer = TensorQuantizer(scheme(name, 32).weight.for_parameter())
    if not quantizer.scheme.fmt.scaled:
        return None
    quantizer.observer(weight)
    quantizer.compute_scales(weight)
    return quantizer.column_rounder(weight.shape, lambda x: x)


def problem(outputs=OUTPUTS, inputs=INPUTS):
    """A weight, the factor of correlated inputs, and an order."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=random)
    x = torch.randn(2 * inputs, inputs, generator=random)
    x[:, 1:] += 0.5 * x[:, :-1]
    order = torch.randperm(inputs, generator=random)
    hessian = (x.T @ x / len(x))[order][:, order]
    parts = weight, inverse_factor(hessian, 0.01), order
    return tuple(part.to(DEVICE) for part in parts)


def by_columns(weight, factor, order, rounding):
    """The same panels, column by column, products and sums rounded apart as the kernel does."""

    def round_panel(start, end):
        for i in range(start, end):
            rounded[i] = rounding(remaining[i], int(order[i]))
            errors[i] = (remaining[i] - rounded[i]) / factor[i, i]
            remaining[i + 1 : end] -= factor[i, i + 1 : end, None] * errors[i]

    remaining = weight.T[order].contiguous()
    rounded, errors = torch.empty_like(remaining), torch.empty_like(remaining)
    panel = triton_columns.PANEL
    visit = gptq_solver._visit_leaves
    visit(remaining, errors, factor, 0, len(order), panel, panel, round_panel)
    return torch.empty_like(rounded).index_copy_(0, order, rounded).T, errors


def launched(function):
    """The result of a function, and how often it launched the kernel."""
    call = triton_columns.PanelRounding.__call__
    with mock.patch.object(
        triton_columns.PanelRounding, "__call__", autospec=True, side_effect=call
    ) as counted:
        result = function()
    return result, counted.call_count


def check(weight, factor, order, rounding):
    """Values and errors are those of single columns, bit for bit."""
    assert triton_columns.panel_rounding(rounding, weight.device) is not None
    given = weight, factor, order, rounding
    (values, errors), count = launched(lambda: round_columns(*given))
    assert count == 2
    expected = by_columns(*given)
    by_column = torch.empty_like(errors.T).index_copy_(0, order, expected[1])
    assert torch.equal(values, expected[0])
    assert torch.equal(errors, by_column.T)


@runs_triton
@pytest.mark.parametrize("name", CASES)
def test_every_scheme(name):
    weight, factor, order = problem()
    rounding = rounding_of(name, weight)
    if rounding is None or isinstance(rounding, TwoRoundings):
        pytest.skip("it has no scales, or two stages")
    check(weight, factor, order, rounding)


@runs_triton
def test_a_factor_by_columns():
    weight, factor, order = problem()
    given = weight, factor.T.contiguous().T, order, rounding_of("int4_wo_32", weight)
    assert given[1].stride(0) == 1
    check(*given)


@runs_triton
def test_zeros_of_pruned_weights_stay():
    weight, factor, order = problem()
    zeros = torch.rand(OUTPUTS, INPUTS, device=DEVICE) < 0.5
    weight.masked_fill_(zeros, 0.0)
    rounding = ZeroKeepingRounder(rounding_of("int4_wo_32", weight), zeros)
    check(weight, factor, order, rounding)
    assert not round_columns(weight, factor, order, rounding)[0][zeros].any()
    rows = torch.arange(7, 21, device=DEVICE)
    check(weight[rows], factor, order, rounding.select_rows(rows))


@runs_triton
@pytest.mark.parametrize("name", ["int4_wo_32", "w_uint4_per_group_asym", "mxfp4"])
def test_a_sweep_counts_errors_from_the_present_values(name, monkeypatch):
    """Beside operations of torch, which may round a product and a sum once."""
    weight, factor, order = problem()
    rounding = rounding_of(name, weight)
    hessian = factor.T @ factor + torch.eye(INPUTS, device=DEVICE)
    inputs = gptq_solver.Inputs(hessian, factor, order)
    start = torch.stack([rounding(weight[:, i] * 1.1, i) for i in range(INPUTS)], 1)
    given = start, weight, inputs, gptq_solver.descent_factor(inputs), rounding
    assert triton_columns.panel_rounding(rounding, weight.device) is not None
    found, count = launched(lambda: gptq_solver.descend_columns(*given))
    assert count == 2
    monkeypatch.delitem(gptq_solver.PANELS, DEVICE)
    expected = gptq_solver.descend_columns(*given)
    assert (found != expected).float().mean() < 0.01 and not torch.equal(found, start)


@runs_triton
def test_two_stages_are_rounded_column_by_column():
    weight, factor, order = problem()
    rounding = rounding_of("int4_fp8", weight)
    (values, _), count = launched(lambda: round_columns(weight, factor, order, rounding))
    assert count == 0
    assert torch.equal(rounding(values[:, 3], 3), values[:, 3])


@runs_triton
def test_a_wrong_kernel_is_refused_and_logged(monkeypatch, caplog):
    call = triton_columns.PanelRounding.__call__

    def wrong(self, remaining, rounded, errors, *others):
        call(self, remaining, rounded, errors, *others)
        errors *= 1.001

    monkeypatch.setattr(triton_columns.PanelRounding, "__call__", wrong)
    weight, *_ = problem()
    rounding = rounding_of("int4_wo_32", weight)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert triton_columns.panel_rounding(rounding, weight.device) is None
    (record,) = caplog.records
    assert "the errors of a sample are wrong by" in record.message
    monkeypatch.setattr(
        triton_columns.PanelRounding,
        "__call__",
        lambda self, x, rounded, *others: rounded.copy_(x),
    )
    triton_columns._is_right.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert triton_columns.panel_rounding(rounding, weight.device) is None
    assert "differ from those of single columns" in caplog.records[-1].message


def test_without_triton_columns_are_rounded_one_by_one(monkeypatch, caplog):
    monkeypatch.setattr(triton_functions, "find_spec", lambda name: None)
    triton_functions.load_functions.cache_clear()
    weight, factor, order = problem()
    rounding = rounding_of("int4_wo_32", weight)
    with caplog.at_level(logging.WARNING):
        result = round_columns(weight, factor, order, rounding)
    assert any("pip install triton" in record.message for record in caplog.records)
    monkeypatch.delitem(gptq_solver.PANELS, DEVICE)
    assert torch.equal(result[0], round_columns(weight, factor, order, rounding)[0])
    triton_functions.load_functions.cache_clear()
