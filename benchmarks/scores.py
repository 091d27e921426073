"""Distance of a quantized model from the original. Peers import this file: it needs torch only."""

from __future__ import annotations

from typing import Any

import torch


@torch.inference_mode()
def divergences(original: Any, model: Any, windows: torch.Tensor) -> torch.Tensor:
    """Mean KL(original || model) of the next-token distributions in each window, nats, (windows,).

    The sums are in float64.
    """
    result = []
    for window in windows.split(1):
        expected, found = (m(window).logits[0, :-1].log_softmax(-1) for m in (original, model))
        result.append((expected.exp() * (expected - found)).sum(-1).double().mean())
    return torch.stack(result)


def divergence(original: Any, model: Any, windows: torch.Tensor) -> float:
    """Mean over tokens of KL(original || model) between their next-token distributions, in nats."""
    return float(divergences(original, model, windows).mean())


def standard_error(values: torch.Tensor) -> float:
    """Standard error of the mean of some values, (values,); 0 of a single one."""
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0
