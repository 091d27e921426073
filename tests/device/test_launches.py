"""Launches of operations and waits for the device, per decoder block, stay within a budget.

A launch costs some microseconds of the CPU, and a wait leaves the device without work. Models of
one block and of two are compared, so what happens once for a model does not count. Each budget is
what was counted, and a tenth more.
"""

from typing import NamedTuple

import pytest
import torch

from quark.torch.algorithm import gptq, gptq_solver
from quark.torch.algorithm.leaf_rounding import Columns, by_columns
from quark.torch.algorithm.scale_refit import best_scales
from quark.torch.numerics.column_rounder import ColumnRounder
from quark.torch.numerics.qdq import Factors
from quark.torch.quantization.config.algo import (
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.products import triton_columns
from tests.configurations import preset, quantized
from tests.device.stand_in import TYPE, count_kernel, counted


class Budget(NamedTuple):
    """What a block may cost."""

    launches: int
    synchronizations: int


# A block has 7 quantized layers with 480 inputs together.
BUDGETS = {
    # Per layer 36 launches, and a wait to learn whether the weight is finite.
    "int4_wo_32": (preset("int4_wo_32"), Budget(277, 7)),
    # Per layer twice of that, for the weight and the input.
    "fp8": (preset("fp8"), Budget(640, 15)),
    # Per column 10 launches, the others for clipping; per layer 10 waits.
    "gptq": (preset("int4_wo_32", GPTQConfig()), Budget(8860, 72)),
    # Per candidate 90 launches and a wait.
    "awq": (preset("int4_wo_32", AWQConfig()), Budget(11600, 232)),
}


@pytest.fixture
def count(standin, plain, batches):
    """Count what quantizing a model of some blocks takes."""

    def count(config, blocks, batches=batches):
        model = plain(num_hidden_layers=blocks).to(standin)
        with counted() as counts:
            quantized(model, config, batches)
            return counts.launches.total(), counts.synchronizations.total()

    return count


@pytest.mark.parametrize("name", BUDGETS)
def test_blocks(name, count):
    config, budget = BUDGETS[name]
    one, two = count(config, 1), count(config, 2)
    launches, synchronizations = (y - x for x, y in zip(one, two, strict=True))
    assert launches <= budget.launches
    assert synchronizations <= budget.synchronizations


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_batches_of_static_ranges(name, count, batches):
    """A batch waits for its copy to the device, and for a condition of the model on its mask."""
    one, two = (count(preset(name), 2, data) for data in ([batches[0]], [batches[0]] * 2))
    assert two[1] - one[1] <= 2


class HostPanels(triton_columns.PanelRounding):
    """Panels of columns on the stand-in: a launch for each, whose work the CPU does."""

    def __call__(self, remaining, rounded, errors, factor, order, start, end, current):
        count_kernel("round_panel", remaining.device)
        scales = Factors(*(None if x is None else x.host for x in self.factors))
        given = remaining, rounded, errors, factor, order, current
        tensors = (None if x is None else x.host for x in given)
        rounding = ColumnRounder(scales, self.scheme)
        by_columns(Columns(*tensors), rounding)(start, end)


# Per layer 360 launches for clipping, 2 for columns; the others refit scales and correct weights.
PANELS = {
    "gptq": (GPTQConfig(), Budget(3600, 64)),
    "gptaq": (GPTAQConfig(), Budget(6280, 187)),
    "qronos": (QronosConfig(), Budget(6280, 187)),
    "yaqa": (YaqaConfig(), Budget(41500, 272)),
}


@pytest.mark.parametrize("name", PANELS)
@pytest.mark.sampled(2)
def test_blocks_whose_columns_are_rounded_in_panels(name, count, monkeypatch):
    """As by Triton on a GPU; its kernel is compared with single columns in its own test."""
    monkeypatch.setitem(gptq_solver.PANELS, TYPE, lambda given, _: HostPanels.of(given))
    algorithm, budget = PANELS[name]
    one, two = (count(preset("int4_wo_32", algorithm), blocks) for blocks in (1, 2))
    launches, synchronizations = (y - x for x, y in zip(one, two, strict=True))
    assert launches <= budget.launches
    assert synchronizations <= budget.synchronizations


def test_columns_of_4096_inputs(standin, monkeypatch):
    """A launch for each of 32 panels and each of 31 products between them, and 9 around these."""
    monkeypatch.setitem(gptq_solver.PANELS, TYPE, lambda given, _: HostPanels.of(given))
    weight, factor = torch.randn(4, 4096), torch.eye(4096)
    shape = (4096, 4)
    scale = torch.full(shape, 0.25)
    given = Factors(*(x.to(standin) for x in (scale, 1 / scale)), None)
    rounding = ColumnRounder(given, scheme("int4_wo_128").weight.scheme)
    tensors = weight.to(standin), factor.to(standin), torch.arange(4096).to(standin)
    with counted() as counts:
        rounded, _ = gptq_solver.round_columns(*tensors, rounding)
    assert counts.launches.total() <= 32 + 31 + 9
    assert not counts.synchronizations
    assert torch.equal(rounded.cpu(), (weight * 4).round().clamp(-8, 7) / 4)


@pytest.mark.parametrize(("name", "most"), [("int4_wo_32", 450), ("uint4_wo_32", 600)])
def test_a_layer_of_4096_inputs(standin, name, most, monkeypatch):
    """Ranges are chosen, columns rounded, and scales refitted; a panel of columns adds two."""
    monkeypatch.setitem(gptq_solver.PANELS, TYPE, lambda given, _: HostPanels.of(given))
    launches = []

    def counting(*given, round_by_input=gptq.round_by_input):
        with counted() as counts:
            round_by_input(*given)
            launches.append(counts.launches.total())

    monkeypatch.setattr(gptq, "round_by_input", counting)
    config = preset(name, GPTQConfig(), exclude=())
    for panels in (2, 4):
        inputs = panels * gptq_solver.PANEL
        model = torch.nn.Sequential(torch.nn.Linear(inputs, 8, bias=False)).to(standin)
        quantized(model, config, [torch.randn(1, 64, inputs).to(standin)])
    two, four = launches
    assert four - two == 4
    assert two + 2 * (4096 // gptq_solver.PANEL - 2) <= most


@pytest.mark.parametrize("groups", [1, 8, 64])
def test_scales_of_all_groups_are_refitted_together(standin, groups):
    """In pieces of the memory that is allowed, not one group after another as on a CPU."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-7, 8, (6, 256), generator=generator).float()
    scales = torch.rand(6, groups, generator=generator) + 0.5
    weight = codes * scales.repeat_interleave(256 // groups, 1) * 1.2
    x = torch.randn(512, 256, generator=generator)
    given = codes, scales, weight, x.T @ x
    with counted() as counts:
        found = best_scales(*(tensor.to(standin) for tensor in given))
    assert counts.launches.total() <= 28
    torch.testing.assert_close(found.cpu(), best_scales(*given))
    torch.testing.assert_close(found.cpu(), 1.2 * scales, rtol=1e-3, atol=0)
