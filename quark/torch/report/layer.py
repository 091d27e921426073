"""What a report knows of one quantized layer."""

from __future__ import annotations

from dataclasses import dataclass

from quark.torch.report.activations import Inputs
from quark.torch.report.summary import Scheme
from quark.torch.report.weights import Histogram, Scales, Values, WeightError


@dataclass(frozen=True)
class Layer:
    """A quantized layer.

    Attributes:
        name: Full name of the layer.
        kind: What layers of its purpose are called: ``q_proj``.
        scheme: How it is quantized, in words.
        shape: Shape of its weight.
        weights: Number of its weights.
        bytes: What is stored for them: codes, scales, zero points.
        values: How large the quantized weights are.
        original: The same of those of the original, None without one.
        scales: Scales of the weight, None where it has none.
        error: How far the weight is from the original's, None without one.
        inputs: What it reads, None without data.
        output_error: Norm of the error it adds to its outputs in units of their norm, None without
            data or original.
        histogram: Weights before, rescaled where they were, and after; None where many layers have
            larger errors.
    """

    name: str
    kind: str
    scheme: Scheme
    shape: tuple[int, ...]
    weights: int
    bytes: int
    values: Values
    original: Values | None
    scales: Scales | None
    error: WeightError | None
    inputs: Inputs | None
    output_error: float | None
    histogram: Histogram | None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a weight."""
        return 8 * self.bytes / self.weights
