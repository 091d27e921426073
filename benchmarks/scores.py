"""Distance of a quantized model from the original. Peers import this file: it needs torch only."""

from __future__ import annotations

from typing import Any

import torch


@torch.inference_mode()
def divergence(original: Any, model: Any, windows: torch.Tensor) -> float:
    """Mean over tokens of KL(original || model) between their next-token distributions, in nats."""
    total = torch.zeros((), dtype=torch.float64)
    for window in windows.split(1):
        expected, found = (m(window).logits[0, :-1].log_softmax(-1) for m in (original, model))
        total += (expected.exp() * (expected - found)).sum(-1).double().sum()
    return float(total / (windows.shape[0] * (windows.shape[1] - 1)))
