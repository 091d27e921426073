"""Models whose sequences have several rows of a batch each, such as the codebooks of MusicGen.

A batch alone does not tell that, so a model runs without values on one row, then on two, and so on.
Batches of such a model stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.pipeline.batches import (
    WholeBatches,
    count_sequences,
    flatten_batches,
    join_sequences,
    run_batch,
    split_sequences,
)
from quark.torch.quantization.dry_run import without_products

MOST_ROWS = 16  # of a sequence


def keep_rows_together(model: nn.Module, batches: Iterable[Any]) -> Iterable[Any]:
    """Return data for a model, whose batches are not split if a sequence has several rows.

    Args:
        model: A float model. It is not changed.
        batches: Data that can be iterated repeatedly, with a row at least.

    Raises:
        ValueError: A batch has a part of a sequence.
    """
    rows = rows_of_sequence(model, next(iter(flatten_batches(batches))))
    if rows == 1:
        return batches
    for number, batch in enumerate(flatten_batches(batches)):
        count = count_sequences(batch)
        if count is not None and count % rows:
            raise ValueError(
                f"Batch {number} of the dataloader has {count} rows, but a sequence of "
                f"{type(model).__name__} has {rows}. Give batches of a multiple of {rows} rows."
            )
    return WholeBatches(batches)


@torch.no_grad()
def rows_of_sequence(model: nn.Module, batch: Any) -> int:
    """Return the least number of rows that a model of Transformers runs on; 1 if none is found.

    Args:
        model: The model; its parameters need no values.
        batch: A batch for it.
    """
    if not hasattr(model, "main_input_name") or count_sequences(batch) is None:
        return 1
    with suppress(Exception):  # models that cannot be copied
        shape, row = without_products(model), next(split_sequences([batch]))
        for rows in range(1, MOST_ROWS + 1):
            with suppress(Exception), eval_mode(shape):  # whatever the code of a model raises
                run_batch(shape, join_sequences([row] * rows))
                return rows
    return 1
