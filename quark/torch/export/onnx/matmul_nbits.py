"""Linear layers as MatMulNBits, an operator of ONNX Runtime with packed integer weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.export.formats.third_party import integer_problem, unsigned
from quark.torch.export.onnx.dequantize_linear import Held, held
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import State

BITS = (2, 4, 8)  # widths that ONNX Runtime multiplies
CHANNEL_BLOCK = 32  # elements of a block where a channel has one scale
SMALLEST_BLOCK = 16


def bits_problem(spec: QuantizationSpec) -> str | None:
    """Return why a weight is none that MatMulNBits takes, or None."""
    problem = integer_problem(spec, range(2, 9))
    group = spec.scheme.group
    if problem is None and group != -1 and (group < SMALLEST_BLOCK or group & (group - 1)):
        return f"has blocks of a power of two from {SMALLEST_BLOCK} on, not of {group}"
    return problem


class BitsProduct(nn.Module):
    """The product with a weight of packed integers.

    Args:
        state: A weight (N, K) that ``bits_problem`` has nothing against.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        stored = held(unsigned(state))
        assert stored.scale is not None and stored.zero_point is not None
        self.bits = next(bits for bits in BITS if bits >= state.scheme.fmt.bits)
        self.rows, self.columns = stored.codes.shape
        self.block = _block(stored)
        blocks = -(-self.columns // self.block)
        padded = F.pad(stored.codes, (0, blocks * self.block - self.columns))
        packed = _packed(padded, self.bits).reshape(self.rows, blocks, -1)
        scale, zeros = (
            part.reshape(self.rows, -1).expand(-1, blocks)
            for part in (stored.scale, stored.zero_point)
        )
        self.register_buffer("codes", packed)
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("zero_point", _packed(zeros, self.bits))

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


def _block(stored: Held) -> int:
    """Return the elements of a block: a power of two."""
    return (
        stored.block if stored.block & (stored.block - 1) == 0 and stored.block else CHANNEL_BLOCK
    )


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes (…, n) uint8 in bytes (…, ceil(n * bits / 8)), the first in the lowest bits."""
    per_byte = 8 // bits
    codes = F.pad(codes, (0, -codes.shape[-1] % per_byte))
    codes = torch.unflatten(codes, -1, (-1, per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.to(torch.int32) << shifts).sum(-1).to(torch.uint8)
