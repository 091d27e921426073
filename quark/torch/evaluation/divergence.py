"""Kullback-Leibler divergence between predictions."""

import torch

AT_ONCE = 1 << 20  # predictions that are compared together: what is computed takes 12 MiB


def kl_divergence(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return KL(expected ‖ actual) at each position, in nats.

    Memory holds copies of a few positions at a time.

    Args:
        expected: Log-probabilities, (…, classes) float32.
        actual: Other ones of the same shape, on the same device.

    Returns:
        The divergences, (…) float64, on the CPU.
    """
    step = max(1, AT_ONCE // expected.shape[-1])
    rows = (torch.split(x.flatten(0, -2), step) for x in (expected, actual))
    pairs = zip(*rows, strict=True)
    parts = [(p.exp() * (p - q)).sum(-1) for p, q in pairs]
    return torch.cat(parts).cpu().double().view(expected.shape[:-1])
