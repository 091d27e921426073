"""What the collection of statistics takes, by shapes alone."""

from __future__ import annotations

from functools import partial

from quark.torch.pipeline.run_steps import StepWork
from quark.torch.pipeline.shapes import (
    FLOAT32,
    FLOAT64,
    BlockShape,
    DataShape,
    ModelShape,
    Work,
    gram_flops,
)
from quark.torch.quantization.observer.histogram import BINS
from quark.torch.statistics.collection import TOKENS

_COPIES = 5  # of the log-probabilities of a call: two, and what their difference takes


def list_work(model: ModelShape, call: int) -> list[tuple[str, StepWork]]:
    """Return the name of each step of ``collect_statistics``, and what it takes for a block.

    Args:
        model: The model.
        call: Tokens of a model call on which sensitivities are measured, 0 for none.
    """
    kept = sum(_kept(block) for block in model.blocks)
    steps: list[tuple[str, StepWork]] = [("statistics", partial(_observing, kept))]
    if call:
        steps.append(("sensitivities", partial(_probing, kept, call)))
    return steps


def _kept(block: BlockShape) -> int:
    """Return the bytes of the statistics of a block, which stay in main memory."""
    range_ = 2 * BINS * FLOAT64
    inputs = sum(range_ + width * (2 * FLOAT32 + TOKENS * FLOAT32) for width in block.input_widths)
    return block.grams + inputs + sum(range_ + 2 * FLOAT32 * x.outputs for x in block.layers)


def _observing(kept: int, block: BlockShape, data: DataShape) -> Work:
    flops = gram_flops(block, data)
    return Work(kept + 2 * block.grams, 1.0, flops, stores=3, changes=False)


def _probing(kept: int, call: int, block: BlockShape, data: DataShape) -> Work:
    memory = kept + _COPIES * FLOAT32 * call * data.labels
    return Work(memory, changes=False, runs_model=True)
