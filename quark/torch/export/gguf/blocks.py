"""Quantized weights as the blocks of ggml: 32 neighbours of a row with one float16 scale."""

from __future__ import annotations

from typing import Any

import torch

from quark.torch.export.formats.third_party import unsigned
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import State

BLOCK = 32
_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
HOLDS = (
    "integer weights: up to 4 bits (Q4_0 symmetric, Q4_1 asymmetric) and symmetric ones up to 8 "
    "bits (Q8_0), with one scale per tensor, per output channel or per group of a multiple of 32 "
    "inputs"
)


def block_type(spec: QuantizationSpec, columns: int) -> str | None:
    """Return Q4_0, Q4_1 or Q8_0, whichever holds a weight, or None if none does.

    Args:
        spec: Specification of the weight.
        columns: Inputs of a row.
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


def to_blocks(state: State, kind: str) -> torch.Tensor:
    """Return a weight as rows of blocks.

    The scale of a block, and in Q4_1 the value of code 0, are rounded to float16; codes stay.

    Args:
        state: Codes (N, K) and their scales and zero points.
        kind: What ``block_type`` returned.

    Returns:
        (N, K / 32 * bytes of a block) uint8.

    Raises:
        ValueError: A scale is too large for float16, or a symmetric weight has another zero point
            than the middle code.
    """
    state = unsigned(state)
    codes, scale, zeros = state.codes, state.scale, state.zero_point
    assert codes is not None and scale is not None and zeros is not None
    rows, columns = codes.shape
    scale, zeros = (_per_block(part.float(), rows, columns) for part in (scale, zeros))
    blocks = codes.to(torch.int16).reshape(rows, -1, BLOCK)
    head = [scale]
    if kind == "Q4_1":
        head.append(-scale * zeros)
    else:
        blocks = blocks - zeros.to(torch.int16).unsqueeze(-1) + (8 if kind == "Q4_0" else 0)
    halves = torch.stack(head, -1).half()
    if not halves.isfinite().all():
        raise ValueError("GGUF stores scales as float16, but a scale of the model exceeds 65504.")
    if kind == "Q8_0":
        body = blocks.to(torch.int8).view(torch.uint8)
    else:
        low, high = blocks.to(torch.uint8).chunk(2, -1)
        body = low | high << 4
    return torch.cat([halves.view(torch.uint8), body], -1).reshape(rows, -1)


def spec_of(kind: str, blocks: torch.Tensor, name: str) -> QuantizationSpec:
    """Return the specification of a weight that is stored in blocks.

    Offsets of Q4_1 are integers if these give the stored minima exactly, else float32.

    Args:
        kind: Type of the blocks.
        blocks: The weight, (N, bytes of a row) uint8.
        name: Its name, for messages.

    Raises:
        ValueError: The type is not read here, or the weight is no matrix.
    """
    if kind not in _BYTES or blocks.dim() != 2:
        raise ValueError(
            f"{name} is {kind} with {blocks.dim()} axes: GGUF is read where it holds matrices in "
            f"{', '.join(_BYTES)}, and F32, F16 or BF16."
        )
    fields: dict[str, Any] = {"dtype": "int8" if kind == "Q8_0" else "int4", "symmetric": True}
    if kind == "Q4_1":
        is_whole = _whole_offsets(*_heads(blocks, kind)) is not None
        fields = {"dtype": "uint4", "symmetric": False}
        fields |= {} if is_whole else {"zero_point_type": "float32"}
    return QuantizationSpec(
        **fields,
        qscheme="per_group",  # type: ignore[arg-type]
        ch_axis=-1,
        group_size=BLOCK,
        is_dynamic=False,
        scale_type="float16",  # type: ignore[arg-type]
    )


def from_blocks(blocks: torch.Tensor, spec: QuantizationSpec, kind: str) -> State:
    """Return codes, scales and offsets of a weight: the inverse of ``to_blocks``.

    Blocks of Q4_1 with the scale 0 have one value, which is not 0 perhaps: they get the scale 1
    and that value as their offset.

    Args:
        blocks: (N, bytes of a row) uint8.
        spec: What ``spec_of`` returned.
        kind: Type of the blocks.
    """
    rows = len(blocks)
    body = blocks.reshape(rows, -1, _BYTES[kind])[..., 2 * (1 + (kind == "Q4_1")) :]
    heads = _heads(blocks, kind)
    scale = heads[0]
    if kind == "Q8_0":
        codes = body.clone().view(torch.int8)
        return State(
            spec, codes.reshape(rows, -1), scale, torch.zeros_like(scale, dtype=torch.int8)
        )
    codes = torch.cat([body & 15, body >> 4], -1)
    if kind == "Q4_0":
        signed = codes.to(torch.int8) - 8
        zeros = torch.zeros_like(scale, dtype=torch.int8)
        return State(spec, signed.reshape(rows, -1), scale, zeros)
    whole = _whole_offsets(*heads)
    if whole is None:
        empty = scale == 0
        codes = torch.where(empty.unsqueeze(-1), 0, codes)
        scale = torch.where(empty, 1, scale)
        return State(spec, codes.reshape(rows, -1), scale, -heads[1].float() / scale.float())
    return State(spec, codes.reshape(rows, -1), scale, whole.to(torch.uint8))


def _heads(blocks: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """Return the numbers at the head of each block, (N, blocks) float16 each."""
    count = 1 + (kind == "Q4_1")
    parts = blocks.reshape(len(blocks), -1, _BYTES[kind])[..., : 2 * count].clone()
    return list(parts.view(torch.float16).unbind(-1))


def _whole_offsets(scale: torch.Tensor, least: torch.Tensor) -> torch.Tensor | None:
    """Return the codes of 0 if all minima are those of whole ones, exactly, else None."""
    zeros = (-least.float() / scale.float()).round()
    zeros = torch.where(scale == 0, 0, zeros)
    is_code = (zeros >= 0) & (zeros <= 15)
    exact = (-scale.float() * zeros).half() == least
    return zeros if bool((is_code & exact).all()) else None


def _per_block(parts: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales or zero points of any granularity as (rows, columns / 32)."""
    parts = parts.expand(rows).unsqueeze(-1) if parts.dim() == 0 else parts.reshape(rows, -1)
    return parts.repeat_interleave(columns // BLOCK // parts.shape[1], 1)
