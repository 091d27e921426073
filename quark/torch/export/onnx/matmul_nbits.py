"""Linear layers as MatMulNBits, an operator of ONNX Runtime with packed integer weights.

Codes are uint8 [N, blocks, bytes of a block], the first code of a byte in its lowest bits. Codes
of 3 bits are stored in 4, those of 5 to 7 bits in 8. Example: the 4-bit codes 1, 2, 3, 4 of a row
are the bytes 0x21, 0x43.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.export.formats.layer_checks import integer_weight_problem
from quark.torch.export.formats.layouts.dense_words import pack_bytes, to_unsigned
from quark.torch.export.onnx.dequantize_linear import DequantizeInputs, to_dequantize_inputs
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor

BITS = (2, 4, 8)  # widths with a kernel in ONNX Runtime
CHANNEL_BLOCK = 32  # elements of a block of weights per channel
SMALLEST_BLOCK = 16


def matmul_nbits_problem(spec: QuantizationSpec) -> str | None:
    """Return why MatMulNBits cannot hold a weight, or None."""
    problem = integer_weight_problem(spec, range(2, 9))
    group = spec.scheme.group
    if problem is None and group != -1 and (group < SMALLEST_BLOCK or group & (group - 1)):
        return f"has blocks of a power of two from {SMALLEST_BLOCK} on, not of {group}"
    return problem


class MatMulNBits(nn.Module):
    """The product with a weight of packed integers.

    Args:
        state: A weight (N, K) for which ``matmul_nbits_problem`` is None.
        dtype: Type of its values.
    """

    def __init__(self, state: QuantizedTensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        assert state.codes is not None
        # Models read these of a weight, as in x.to(layer.weight.dtype).
        self.dtype, self.device, self.shape = dtype, state.codes.device, state.codes.shape
        stored = to_dequantize_inputs(to_unsigned(state))
        assert stored.scale is not None and stored.zero_point is not None
        self.bits = next(bits for bits in BITS if bits >= state.scheme.fmt.bits)
        self.rows, self.columns = stored.codes.shape
        self.block = _block_size(stored)
        blocks = -(-self.columns // self.block)
        padded = F.pad(stored.codes, (0, blocks * self.block - self.columns))
        packed = pack_bytes(padded, self.bits).reshape(self.rows, blocks, -1)
        scale, zeros = (
            part.reshape(self.rows, -1).expand(-1, blocks)
            for part in (stored.scale, stored.zero_point)
        )
        self.register_buffer("codes", packed)
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("zero_point", pack_bytes(zeros, self.bits))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (…, K) with the weight: (…, N)."""
        attributes: dict[str, Any] = {
            "K": self.columns,
            "N": self.rows,
            "bits": self.bits,
            "block_size": self.block,
        }
        y: torch.Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            [x.float(), self.codes, self.scale, self.zero_point],  # type: ignore[list-item]
            attributes,
            dtype=torch.float32,
            shape=(*x.shape[:-1], self.rows),
            version=1,
        )
        return y.to(x.dtype)


def _block_size(stored: DequantizeInputs) -> int:
    """Return the elements of a block, a power of two.

    A weight per channel, or per group of a whole row, has one scale that is repeated per block.
    """
    is_power_of_two = stored.block > 0 and stored.block & (stored.block - 1) == 0
    return stored.block if is_power_of_two else CHANNEL_BLOCK
