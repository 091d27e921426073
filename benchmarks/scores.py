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


@torch.inference_mode()
def predict(model: Any, window: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of all tokens but the first, (tokens - 1, vocabulary)."""
    return model(window.unsqueeze(0)).logits[0, :-1].float().log_softmax(-1)


def losses(predictions: list[torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the tokens of each window under log-probabilities, nats, (windows,).

    The sums are in float64.
    """
    found = [
        -p.gather(1, window[1:].unsqueeze(1)).double().mean()
        for p, window in zip(predictions, windows, strict=True)
    ]
    return torch.stack(found)


def perplexity(predictions: list[torch.Tensor], windows: torch.Tensor) -> float:
    """Return the perplexity of the tokens of some windows under log-probabilities."""
    return float(f"{losses(predictions, windows).mean().exp():.5g}")


def judge_text(expected: list[torch.Tensor], model: Any, windows: torch.Tensor) -> dict[str, Any]:
    """Return the perplexity of a model on a text, and KL and loss in millinats of each window.

    Args:
        expected: Log-probabilities by the original for each window; see ``predict``.
        model: The quantized model.
        windows: Tokens of the text, (windows, tokens).
    """
    predictions = [predict(model, window) for window in windows]
    lost = [
        1000 * float((before.exp() * (before - after)).sum(-1).double().mean())
        for before, after in zip(expected, predictions, strict=True)
    ]
    kl = [float(f"{value:.4g}") for value in lost]
    loss = [float(f"{1000 * value:.5g}") for value in losses(predictions, windows).tolist()]
    return {"perplexity": perplexity(predictions, windows), "kl": kl, "loss": loss}
