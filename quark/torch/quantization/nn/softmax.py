"""Softmax with quantized results, inside of a function that is not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SOFTMAX = {torch.softmax, torch.Tensor.softmax, nn.functional.softmax}


class QuantizedSoftmax(TorchFunctionMode):
    """Quantizes the results of every softmax that this thread computes inside the context.

    Args:
        quantize: Quantizes a tensor.
        dtype: Type that results have when they are quantized. Attention casts them to the type of
            the queries.

    Attributes:
        calls: Number of softmaxes so far.
    """

    def __init__(
        self, quantize: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._quantize, self._dtype = quantize, dtype
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and quantize its result if it is a softmax."""
        result = func(*args, **(kwargs or {}))
        if func not in _SOFTMAX:
            return result
        self.calls += 1
        return self._quantize(result.to(self._dtype)).to(result.dtype)
