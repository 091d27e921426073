"""Unsigned integer codes in 32-bit words without gaps, as GPTQ and compressed-tensors pack them.

Code i of a row takes the bits from i * bits on, the lowest bit first. Example of 3-bit codes::

    code   0    1    2   …   9    10             11   …
    bit    0-2  3-5  6-8 …  27-29 30-32          33-35 …
    word   |<--------------- word 0 -------->|<-- word 1

Code 10 is split: its two low bits end word 0, its high bit begins word 1. Codes of 2, 4 and 8 bits
are never split.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quark.torch.numerics.custom_operators import unpack
from quark.torch.numerics.formats import Dtype, Format
from quark.torch.numerics.packing import pack
from quark.torch.quantization.nn.quantizer import QuantizedTensor


def to_unsigned(state: QuantizedTensor) -> QuantizedTensor:
    """Return the same tensor in unsigned codes.

    Signed codes and zero points are raised by 2^(bits - 1): int4 codes -8 … 7 become 0 … 15, and
    the zero point 0 becomes 8. The values, scale * (code - zero point), stay the same.

    Raises:
        ValueError: The scheme is symmetric, but its zero point is not the middle code.
    """
    fmt = state.scheme.fmt
    middle = 1 << (fmt.bits - 1)
    offset = middle if fmt.signed else 0
    assert state.codes is not None and state.scale is not None
    zeros = state.zero_point
    zeros = torch.zeros_like(state.scale, dtype=torch.int32) if zeros is None else zeros.int()
    zeros = zeros + offset
    if state.scheme.symmetric and (zeros != middle).any():
        raise ValueError(
            f"A symmetric {fmt.name} weight has zero points other than the middle code, as "
            "versions before 1.0 wrote them: only custom_mode='quark' can hold it."
        )
    codes = (state.codes.to(torch.int16) + offset).to(torch.uint8)
    spec = replace(state.spec, dtype=Dtype[fmt.name if not fmt.signed else f"u{fmt.name}"])
    return QuantizedTensor(spec.for_parameter(), codes, state.scale, zeros.to(torch.uint8))


def pack_bytes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the last axis into bytes, the first code in the lowest bits.

    Args:
        codes: (…, n) uint8.
        bits: Width of a code.

    Returns:
        (…, ceil(n * bits / 8)) uint8, unused bits of the last byte 0.
    """
    packed = codes if bits == 8 else pack(codes, _eight_codes(bits))
    # Eight codes at a time may take bytes too much: 3 codes of 7 bits need 3 bytes, 8 codes 7.
    return packed[..., : -(-codes.shape[-1] * bits // 8)].contiguous()


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the last axis into words, the first code in the lowest bits.

    Args:
        codes: (…, n) uint8.
        bits: Width of a code.

    Returns:
        (…, ceil(n * bits / 32)) int32, unused bits of the last word 0.
    """
    packed = pack_bytes(codes, bits)
    packed = nn.functional.pad(packed, (0, -packed.shape[-1] % 4))
    return packed.clone(memory_format=torch.contiguous_format).view(torch.int32)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first ``count`` codes along the last axis: the inverse of ``pack_words``."""
    packed = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return packed[..., :count]
    packed = nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    return unpack(packed, _eight_codes(bits), count)


def _eight_codes(bits: int) -> Format:
    """Return an integer format that packs eight codes of ``bits`` bits into ``bits`` bytes."""
    fmt: Format = Dtype[f"uint{bits}"].value
    return replace(fmt, word_codes=8, word_dtype="uint8", first_high=False)
