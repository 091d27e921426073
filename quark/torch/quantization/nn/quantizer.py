"""The quantizer of one tensor of a module."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize, fake_quantize_
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec


class State(NamedTuple):
    """A quantized tensor in full: specification, codes (None for activations), scale, offset."""

    spec: QuantizationSpec
    codes: torch.Tensor | None
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    @property
    def scheme(self) -> Scheme:
        """The specification as the arithmetic takes it."""
        return self.spec.scheme


class TensorQuantizer(nn.Module):
    """Quantizes and dequantizes a tensor by its specification.

    Its state is data: while ``observing`` it looks at tensors and returns them as they are;
    afterwards it uses ``scale`` and ``zero_point``, or those of each tensor if the specification
    is dynamic.

    Attributes:
        spec: Specification of the tensor.
        observing: Whether tensors are observed instead of quantized.
        enabled: Whether anything is done at all.
        scale: Settled scale, [] per tensor, [channels] per channel, a grid per group; or None.
        zero_point: Settled zero point in the same shape, or None.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__()
        self.spec = spec
        self.scheme = spec.scheme
        self.observer = spec.make_observer()
        self.observing = False
        self.enabled = True
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)

    @property
    def is_dynamic(self) -> bool:
        """Whether scales are those of each tensor as it passes."""
        return bool(self.spec.is_dynamic) and self.scheme.fmt.scaled

    @property
    def is_static(self) -> bool:
        """Whether the quantizer needs a settled scale."""
        return self.scheme.fmt.scaled and not self.is_dynamic

    def settle(self) -> None:
        """Derive the scale from what was observed and stop observing.

        Raises:
            RuntimeError: Nothing was observed.
            FloatingPointError: NaN or infinity was observed.
        """
        self.observing = False
        if self.is_static:
            self.scale, self.zero_point = self.observer.calculate_qparams()

    def qparams(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scale and zero point that apply to ``x``.

        Raises:
            RuntimeError: The specification is static and nothing was settled.
        """
        if not self.scheme.fmt.scaled:
            return None, None
        if self.is_dynamic:
            return dynamic_qparams(x, self.scheme)
        if self.scale is None:
            raise RuntimeError(
                "A static quantizer has no scale yet: run ModelQuantizer.quantize_model with a "
                "dataloader first."
            )
        return self.scale, self.zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Observe ``x`` or quantize and dequantize it."""
        if not self.enabled or x.numel() == 0:
            return x
        if self.observing:
            result: torch.Tensor = self.observer(x)
            return result
        return fake_quantize(x, *self.qparams(x), self.scheme)

    def bake_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace the values of ``x`` by what ``forward`` returns for them, without a copy."""
        return fake_quantize_(x, *self.qparams(x), self.scheme)

    def extra_repr(self) -> str:
        """Return format and granularity."""
        spec = self.spec
        parts = [spec.dtype.name]
        if spec.qscheme is not None:
            parts.append(spec.qscheme.name)
        if spec.group_size is not None:
            parts.append(f"group_size={spec.group_size}")
        if self.is_dynamic:
            parts.append("dynamic")
        return ", ".join(parts)
