"""The layout of AutoAWQ's GEMM kernels: unsigned codes, interleaved in words of output channels.

A word of ``qweight`` holds one input of eight neighbouring output channels, four bits each. From
the lowest four bits to the highest it holds the channels 0, 2, 4, 6, 1, 3, 5, 7::

    channels of a word   0  1  2  3  4  5  6  7   with the codes  a b c d e f g h
    word (hexadecimal)   0xhfdbgeca

``numerics.packing`` calls this order "reorder". Words of ``qzeros`` are packed alike.
"""

from __future__ import annotations

import torch

from quark.torch.export.formats.layouts.dense_words import to_unsigned
from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import StoredParts

MIDDLE_ZEROS = -0x77777778  # int32 of 0x88888888: eight zero points of 8


class AwqLayout(PackedLayout):
    """Codes, scales and zero points of 4-bit weights per group as AutoAWQ lays them out.

    Args:
        pack_method: Order of codes in a word. AMD Quark can write "order" too.
    """

    def __init__(self, pack_method: str = "reorder") -> None:
        super().__init__(pack_method)

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return codes, scales and zero points as they are stored."""
        return super().pack(to_unsigned(state), value)
