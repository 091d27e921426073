"""The blocks of ggml: 32 neighbours of a row with one float16 scale.

=====  =====  ============================================  ==========================
type   bytes  content                                       value
=====  =====  ============================================  ==========================
Q4_0   18     float16 scale, 16 bytes of codes              scale * (code - 8)
Q4_1   20     float16 scale, float16 minimum, 16 bytes      scale * code + minimum
Q8_0   34     float16 scale, 32 int8 codes                  scale * code
=====  =====  ============================================  ==========================

Byte i of 4-bit codes holds element i in the low half and element i + 16 in the high half: byte 0
has the elements 0 and 16, byte 15 the elements 15 and 31.

The package gguf makes blocks of values, with scales of its own. Here blocks are made of codes and
scales that exist, which come back unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quark.torch.export.formats.layouts.dense_words import to_unsigned
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor

BLOCK = 32  # elements
_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_FLOATS = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}  # float16 numbers at the head of a block
SUPPORTED = (
    "integer weights: up to 4 bits (Q4_0 symmetric, Q4_1 asymmetric) and symmetric ones up to 8 "
    "bits (Q8_0), with one scale per tensor, per output channel or per group of a multiple of 32 "
    "inputs"
)


def block_type(spec: QuantizationSpec, columns: int) -> str | None:
    """Return the block type that holds a weight: Q4_0, Q4_1 or Q8_0; or None.

    Args:
        spec: Specification of the weight.
        columns: Inputs of the layer.
    """
    scheme = spec.scheme
    group = columns if scheme.group == -1 else scheme.group
    fits = {
        QSchemeType.per_tensor: columns % BLOCK == 0,
        QSchemeType.per_channel: columns % BLOCK == 0 and scheme.axis in (0, -2),
        QSchemeType.per_group: group % BLOCK == columns % group == 0 and scheme.axis in (1, -1),
    }
    if not scheme.has_zero_point or scheme.float_zero_point or spec.second_stage is not None:
        return None
    if not fits.get(scheme.qscheme) or spec.fmt.bits > (8 if scheme.symmetric else 4):
        return None
    return "Q8_0" if spec.fmt.bits > 4 else "Q4_0" if scheme.symmetric else "Q4_1"


def has_codes(kind: str) -> bool:
    """Whether blocks of a type are read as codes and scales; of others only values are."""
    return kind in _BYTES


def stored_columns(kind: str, columns: int) -> int:
    """Return the bytes that a row of a weight takes in blocks."""
    return columns // BLOCK * _BYTES[kind]


def pack_blocks(state: QuantizedTensor, kind: str) -> torch.Tensor:
    """Return a weight as rows of blocks.

    Scales, and in Q4_1 minima, are rounded to float16. Codes do not change.

    Args:
        state: Codes (N, K) with scales and zero points.
        kind: Block type, from ``block_type``.

    Returns:
        (N, K / 32 * bytes of a block) uint8.

    Raises:
        ValueError: A scale exceeds the range of float16, or the zero point of a symmetric weight
            is not the middle code.
    """
    state = to_unsigned(state)
    codes, scale, zeros = state.codes, state.scale, state.zero_point
    assert codes is not None and scale is not None and zeros is not None
    rows, columns = codes.shape
    scale, zeros = (_per_block(part.float(), rows, columns) for part in (scale, zeros))
    blocks = codes.to(torch.int16).reshape(rows, -1, BLOCK)
    floats, body = _PACK[kind](blocks, scale, zeros)
    halves = torch.stack(floats, -1).half()
    if not halves.isfinite().all():
        raise ValueError("GGUF stores scales as float16, but a scale of the model exceeds 65504.")
    return torch.cat([halves.view(torch.uint8), body], -1).reshape(rows, -1)


Packed = tuple[list[torch.Tensor], torch.Tensor]  # numbers at the head (N, blocks), bytes of codes


def _pack_q4_0(codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> Packed:
    # The middle code of Q4_0 is 8. Codes of fewer bits move there: 2-bit codes 0 … 3 around 2
    # become 6 … 9.
    return [scale], _join_nibbles(codes - zeros.to(torch.int16).unsqueeze(-1) + 8)


def _pack_q4_1(codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> Packed:
    # scale * (code - zero) = scale * code + minimum
    return [scale, -scale * zeros], _join_nibbles(codes)


def _pack_q8_0(codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> Packed:
    signed = codes - zeros.to(torch.int16).unsqueeze(-1)
    return [scale], signed.to(torch.int8).view(torch.uint8)


_PACK: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Packed]] = {
    "Q4_0": _pack_q4_0,
    "Q4_1": _pack_q4_1,
    "Q8_0": _pack_q8_0,
}


def block_spec(kind: str, blocks: torch.Tensor, name: str) -> QuantizationSpec:
    """Return the specification of a weight stored in blocks.

    Zero points of Q4_1 are integers if they reproduce the stored minima exactly, else float32.

    Args:
        kind: Block type.
        blocks: The weight, (N, bytes of a row) uint8.
        name: Its name, for messages.

    Raises:
        ValueError: The block type is not supported, or the weight is not a matrix.
    """
    if kind not in _BYTES or blocks.dim() != 2:
        raise ValueError(
            f"{name} is {kind} with {blocks.dim()} axes: only matrices in {', '.join(_BYTES)}, and "
            "tensors in F32, F16 or BF16, can be read from GGUF."
        )
    fields: dict[str, Any] = {"dtype": "int8" if kind == "Q8_0" else "int4", "symmetric": True}
    if kind == "Q4_1":
        is_integer = _integer_zero_points(*_head_floats(blocks, kind)) is not None
        fields = {"dtype": "uint4", "symmetric": False}
        fields |= {} if is_integer else {"zero_point_type": "float32"}
    return QuantizationSpec(
        **fields,
        qscheme="per_group",  # type: ignore[arg-type]
        ch_axis=-1,
        group_size=BLOCK,
        is_dynamic=False,
        scale_type="float16",  # type: ignore[arg-type]
    )


def unpack_blocks(blocks: torch.Tensor, spec: QuantizationSpec, kind: str) -> QuantizedTensor:
    """Return codes, scales and zero points of a weight: the inverse of ``pack_blocks``.

    Args:
        blocks: (N, bytes of a row) uint8.
        spec: Specification, from ``block_spec``.
        kind: Block type.
    """
    rows = len(blocks)
    body = blocks.reshape(rows, -1, _BYTES[kind])[..., 2 * _FLOATS[kind] :]
    floats = _head_floats(blocks, kind)
    if kind == "Q4_1":
        return _unpack_q4_1(spec, body, *floats)
    scale = floats[0]
    zeros = torch.zeros_like(scale, dtype=torch.int8)
    if kind == "Q8_0":
        codes = body.clone().view(torch.int8)
    else:
        codes = _split_nibbles(body).to(torch.int8) - 8
    return QuantizedTensor(spec, codes.reshape(rows, -1), scale, zeros)


def _unpack_q4_1(
    spec: QuantizationSpec, body: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor
) -> QuantizedTensor:
    codes, rows = _split_nibbles(body), len(body)
    zeros = _integer_zero_points(scale, minimum)
    if zeros is not None:
        return QuantizedTensor(spec, codes.reshape(rows, -1), scale, zeros.to(torch.uint8))
    # A block with scale 0 has one value, its minimum: code 0 with scale 1 and zero point -minimum.
    is_constant = scale == 0
    codes = torch.where(is_constant.unsqueeze(-1), 0, codes)
    scale = torch.where(is_constant, 1, scale)
    return QuantizedTensor(spec, codes.reshape(rows, -1), scale, -minimum.float() / scale.float())


def _join_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes (N, blocks, 32) as bytes (N, blocks, 16) uint8."""
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return low | high << 4


def _split_nibbles(body: torch.Tensor) -> torch.Tensor:
    """Return bytes (N, blocks, 16) as 4-bit codes (N, blocks, 32) uint8."""
    return torch.cat([body & 15, body >> 4], -1)


def _head_floats(blocks: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """Return the numbers at the head of each block, (N, blocks) float16 each."""
    head = blocks.reshape(len(blocks), -1, _BYTES[kind])[..., : 2 * _FLOATS[kind]].clone()
    return list(head.view(torch.float16).unbind(-1))


def _integer_zero_points(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor | None:
    """Return the codes 0 to 15 that reproduce all stored minima exactly, None if a block has none.

    Example: scale 0.5 and minimum -4 give the zero point 8; minimum -4.1 gives None.
    """
    zeros = (-minimum.float() / scale.float()).round()
    zeros = torch.where(scale == 0, 0, zeros)
    is_code = (zeros >= 0) & (zeros <= 15)
    exact = (-scale.float() * zeros).half() == minimum
    return zeros if bool((is_code & exact).all()) else None


def _per_block(parts: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales or zero points of any granularity as (rows, columns / 32)."""
    parts = parts.expand(rows).unsqueeze(-1) if parts.dim() == 0 else parts.reshape(rows, -1)
    return parts.repeat_interleave(columns // BLOCK // parts.shape[1], 1)
