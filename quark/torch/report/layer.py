"""Figures of one quantized layer in a report."""

from __future__ import annotations

from dataclasses import dataclass

from quark.torch.quantization.config.description import LayerDescription
from quark.torch.report.activations import Inputs
from quark.torch.report.weights import Histogram, Scales, Values, WeightError


@dataclass(frozen=True)
class Layer:
    """A quantized layer.

    Attributes:
        name: Full name of the layer.
        kind: Name of layers with its purpose, such as ``q_proj``.
        scheme: How it is quantized, in words.
        shape: Shape of its weight.
        weights: Number of its weights.
        bytes: Bytes stored for them: codes, scales, zero points.
        values: Magnitudes of the quantized weights.
        original: Magnitudes of the weights of the original, None without one.
        scales: Scales of the weight, None if it has none.
        error: Error of the weight against the original, None without one.
        inputs: Its inputs, None without data.
        output_error: Norm of the error it adds to its outputs in units of their norm, None without
            data or original.
        histogram: Weights before and after quantization; None if many layers have larger errors.
    """

    name: str
    kind: str
    scheme: LayerDescription
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
