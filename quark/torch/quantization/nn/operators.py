"""Quantized operators: a class of a line each, and the table that finds them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.quantization.nn.mixin import QuantMixin


class QuantLinear(QuantMixin, nn.Linear):
    """``nn.Linear`` with quantized tensors."""

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        return F.linear(x, weight, bias)


# Operators that can be quantized, by the exact type they have in a float model.
OPERATORS: dict[type[nn.Module], type[QuantMixin]] = {nn.Linear: QuantLinear}
