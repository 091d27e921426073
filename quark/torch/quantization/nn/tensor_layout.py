"""What a layout of quantized tensors in checkpoints has to offer."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import torch

from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor

StoredParts = dict[str, torch.Tensor]
DeclaredParts = dict[str, tuple[tuple[int, ...], torch.dtype]]


@runtime_checkable
class TensorLayout(Protocol):
    """Layout of a quantized tensor in a checkpoint.

    The names of stored parts are "" for codes or values, those in ``PARTS``, and ``groups`` for the
    group of each input, if inputs are not in the order of groups.

    Attributes:
        stores_values: Whether ``pack`` stores the values of a tensor, not its codes.
    """

    stores_values: ClassVar[bool] = False

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of each part stored for a tensor of shape ``shape``.

        ``is_stored`` is False for activations, of which only scales are stored. Without the part
        "", the values are stored as in a float model.
        """
        ...

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return the stored parts of a tensor.

        Args:
            state: Its codes and scales.
            value: Its quantized values, needed where ``stores_values``.
        """
        ...

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return the unpacked tensor: the inverse of ``pack``."""
        ...

    def value(
        self,
        spec: QuantizationSpec,
        shape: tuple[int, ...],
        stored: StoredParts,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the quantized values in ``dtype``, in the order of the inputs."""
        return self.unpack(spec, shape, stored).value(dtype)
