"""The layout of AutoGPTQ and gptqmodel: unsigned codes in dense words of inputs.

``qweight`` is packed along the inputs, ``qzeros`` along the output channels. Example of a 4-bit
weight of 4096 outputs and 1024 inputs in groups of 128::

    qweight  int32 [128, 4096]   word [i, n] holds the inputs 8i … 8i + 7 of output n
    qzeros   int32 [8, 512]      word [g, j] holds the outputs 8j … 8j + 7 of group g
    scales         [8, 4096]
"""

from __future__ import annotations

import torch

from quark.torch.export.formats.layouts.dense_words import pack_words, to_unsigned, unpack_words
from quark.torch.numerics.scale_codec import stored_dtype
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import DeclaredParts, StoredParts, TensorLayout


class GptqLayout(TensorLayout):
    """Codes, scales and zero points of an integer weight as AutoGPTQ lays them out.

    Args:
        zero_offset: Subtracted from zero points, modulo the number of codes, when they are
            stored: 1 for ``checkpoint_format`` "gptq", 0 for "gptq_v2". A 4-bit zero point of 8
            is stored as 7, and 0 as 15.
    """

    def __init__(self, zero_offset: int) -> None:
        self.zero_offset = zero_offset

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of codes, scales and zero points."""
        (outputs, inputs), bits = shape, spec.fmt.bits
        groups = spec.scheme.scale_shape(shape)[1]
        return {
            "": ((inputs * bits // 32, outputs), torch.int32),
            "scale": ((groups, outputs), stored_dtype(spec.scheme)),
            "zero_point": ((groups, outputs * bits // 32), torch.int32),
        }

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return codes, scales and zero points as they are stored."""
        bits = state.scheme.fmt.bits
        state = to_unsigned(state)
        assert state.codes is not None and state.scale is not None and state.zero_point is not None
        outputs = len(state.codes)
        zeros = (state.zero_point.int() - self.zero_offset) & ((1 << bits) - 1)
        zeros = zeros.reshape(outputs, -1).T.to(torch.uint8)  # (groups, outputs)
        return {
            "": pack_words(state.codes, bits).T.contiguous(),
            "scale": state.scale.reshape(outputs, -1).T.contiguous(),
            "zero_point": pack_words(zeros, bits).contiguous(),
        }

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return codes, scales and zero points: the inverse of ``pack``."""
        (outputs, inputs), bits = shape, spec.fmt.bits
        zeros = unpack_words(stored["zero_point"], bits, outputs).T.int() + self.zero_offset
        zeros = zeros & ((1 << bits) - 1)
        codes = unpack_words(stored[""].T, bits, inputs)
        return QuantizedTensor(spec, codes, stored["scale"].T, zeros)
