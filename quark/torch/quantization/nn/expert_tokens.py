"""The tokens that calibration data sends to experts: their counts, and all of them to each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from quark.torch.quantization.nn.linear_experts import LinearExperts

logger = logging.getLogger(__name__)


@contextmanager
def count_tokens(module: nn.Module, batch: int) -> Iterator[None]:
    """Count the tokens of a batch that are sent to each expert in a module.

    A batch that runs again replaces its earlier counts, if it reaches the experts.
    """
    layers = [m for m in module.modules() if isinstance(m, LinearExperts)]
    for experts in layers:
        experts._calls = []
    try:
        yield
    finally:
        for experts in layers:
            if experts._calls:
                experts.token_counts[batch] = [sum(n) for n in zip(*experts._calls, strict=True)]
            del experts._calls


@contextmanager
def all_experts_observed(model: nn.Module) -> Iterator[None]:
    """Let calibration data inside the context run through all experts of a model.

    The inputs of each expert are observed for all tokens. What the model computes is unchanged.
    """
    layers = [m for m in model.modules() if isinstance(m, LinearExperts)]
    if not layers:
        logger.warning("moe_calibrate_all_experts has no effect: no experts are quantized.")
    for experts in layers:
        experts.observes_all = True
    try:
        yield
    finally:
        for experts in layers:
            vars(experts).pop("observes_all", None)


@contextmanager
def unchanged_token_counts(model: nn.Module) -> Iterator[None]:
    """Restore the counts of calibration after other data has run."""
    counts = [(m, dict(m.token_counts)) for m in model.modules() if isinstance(m, LinearExperts)]
    try:
        yield
    finally:
        for experts, before in counts:
            experts.token_counts = before
