"""What the collection of statistics takes, by shapes alone."""

from __future__ import annotations

from functools import partial

from quark.torch.evaluation.output_head import ROWS_AT_ONCE
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
from quark.torch.statistics.sensitivities import PREDICTED, SEEN

_WEIGHTS = 8  # copies in float32 of a weight whose rounding is measured


def list_work(model: ModelShape, probes: int) -> list[tuple[str, StepWork]]:
    """Return the name of each step of ``collect_statistics``, and what it takes for a block.

    Args:
        model: The model.
        probes: Those of ``collect_statistics``.
    """
    kept = sum(_kept(block) for block in model.blocks)
    steps: list[tuple[str, StepWork]] = [("statistics", partial(_observing, kept))]
    if probes:
        steps.append(("sensitivities", partial(_probing, kept, model, probes)))
    return steps


def _kept(block: BlockShape) -> int:
    """Return the bytes of the statistics of a block, which stay in main memory."""
    range_ = 2 * BINS * FLOAT64
    inputs = sum(range_ + width * (2 * FLOAT32 + TOKENS * FLOAT32) for width in block.input_widths)
    return block.grams + inputs + sum(range_ + 2 * FLOAT32 * x.outputs for x in block.layers)


def _observing(kept: int, block: BlockShape, data: DataShape) -> Work:
    flops = gram_flops(block, data)
    return Work(kept + 2 * block.grams, 1.0, flops, stores=3, changes=False)


def _probing(kept: int, model: ModelShape, probes: int, block: BlockShape, data: DataShape) -> Work:
    """Return the work of running the pieces of data once for each layer of a block.

    Stores hold what the blocks return for each token, and log-probabilities of those that are
    predicted. The output head gives logits of a part of these: they and their log-probabilities,
    beside the stored ones.
    """
    own = data.itemsize if data.itemsize < FLOAT32 else 0
    head = (own + 3 * FLOAT32) * min(
        ROWS_AT_ONCE, PREDICTED
    ) * data.labels + own * model.around_largest
    weights = block.largest(lambda layer: _WEIGHTS * FLOAT32 * layer.elements)
    predictions = FLOAT32 * data.labels // max(1, len(model.blocks))  # their share of a block
    outputs = (PREDICTED + SEEN) * data.hidden * data.itemsize
    held = probes * (outputs + PREDICTED * predictions)
    return Work(kept + head + weights, changes=False, held=held)
