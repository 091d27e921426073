"""Launches of operations and waits for the device, per decoder block, stay within a budget.

A launch costs some microseconds of the CPU, and a wait leaves the device without work. Models of
one block and of two are compared, so what happens once for a model does not count. Each budget is
what was counted, and a tenth more.
"""

from typing import NamedTuple

import pytest

from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig
from tests.configurations import preset, quantized
from tests.device.stand_in import counted


class Budget(NamedTuple):
    """What a block may cost."""

    launches: int
    synchronizations: int


# A block has 7 quantized layers with 480 inputs together.
BUDGETS = {
    # Per layer 38 launches, and a wait to learn whether the weight is finite.
    "int4_wo_32": (preset("int4_wo_32"), Budget(290, 7)),
    # Per layer twice of that, for the weight and the input.
    "fp8": (preset("fp8"), Budget(660, 15)),
    # Per column 10 launches, the others for clipping; per layer 10 waits.
    "gptq": (preset("int4_wo_32", GPTQConfig()), Budget(9300, 81)),
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
