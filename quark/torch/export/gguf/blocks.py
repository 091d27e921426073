"""Weights as blocks of ggml, and back; see ``block_types``.

The package gguf makes blocks of values, with scales of its own, and does not make K-quants. It
reads blocks as values, without codes. Here blocks are made of codes and scales that exist, such
as those of GPTQ, which come back unchanged. ``tests/unit/export/gguf/test_blocks.py`` compares
values with those of the package.
"""

from __future__ import annotations

import torch

from quark.torch.export.formats.layouts.dense_words import to_unsigned
from quark.torch.export.gguf.block_types import BLOCK_TYPES, BlockType
from quark.torch.export.gguf.planes import FACTORS, join_plane, split_plane
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_codec import decode_scale, encode_scale, stored_dtype
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.super_blocks import factors, minima
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor

Parts = dict[str | int, torch.Tensor]  # bytes by the names of parts of a block
BLOCK = 32  # elements of a block with float16 scales
_SMALLEST = 2.0**-24  # float16
_E4M3_ONE = 7 << 3  # bits of the e4m3 number 1
SUPPORTED = (
    "integer weights: symmetric ones of up to 8 bits and asymmetric ones of up to 5, with one "
    "scale per tensor, per output channel or per group of a multiple of 32 inputs; mxfp4; "
    "nvfp4 for layers with a multiple of 64 inputs; iq4_nl; and "
    "q2_k, q3_k, q4_k, q5_k and q6_k for layers with a multiple of 256 inputs"
)


def block_type(spec: QuantizationSpec, columns: int) -> str | None:
    """Return the block type that holds a weight, such as Q4_0 or Q4_K; None if none does.

    Args:
        spec: Specification of the weight.
        columns: Inputs of the layer.
    """
    scheme = spec.scheme
    if spec.quantizes_codes:
        return None
    scale = scheme.scale
    if spec.fmt.is_float or scale.span or scale.two_level:
        fitting = (name for name, kind in BLOCK_TYPES.items() if kind.scheme.fits(spec))
        return next((name for name in fitting if columns % BLOCK_TYPES[name].size == 0), None)
    group = columns if scheme.group == -1 else scheme.group
    fits_by_scheme = {
        QSchemeType.per_tensor: columns % BLOCK == 0,
        QSchemeType.per_channel: columns % BLOCK == 0 and scheme.axis in (0, -2),
        QSchemeType.per_group: group % BLOCK == columns % group == 0 and scheme.axis in (1, -1),
    }
    if not scheme.has_zero_point or scheme.float_zero_point:
        return None
    if not fits_by_scheme.get(scheme.qscheme) or spec.fmt.bits > (8 if scheme.symmetric else 5):
        return None
    by_bits = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"} if scheme.symmetric else {4: "Q4_1", 5: "Q5_1"}
    return next(kind for bits, kind in by_bits.items() if spec.fmt.bits <= bits)


def has_codes(kind: str) -> bool:
    """Whether blocks of a type are read as codes and scales; of others only values are."""
    return kind in BLOCK_TYPES


def has_float_minima(kind: str) -> bool:
    """Whether values of blocks are rounded to float32 otherwise than those of their codes.

    A zero point is the quotient of a minimum, which is rounded.
    """
    scheme = BLOCK_TYPES[kind].scheme if has_codes(kind) else None
    return scheme is not None and scheme.has_minima and scheme.has_super_blocks


def has_tensor_scale(kind: str) -> bool:
    """Whether a number beside the weight multiplies its blocks."""
    return has_codes(kind) and BLOCK_TYPES[kind].scheme.has_tensor_scale


def stored_columns(kind: str, columns: int) -> int:
    """Return the bytes that a row of a weight takes in blocks."""
    return columns // BLOCK_TYPES[kind].size * BLOCK_TYPES[kind].bytes


def pack_blocks(state: QuantizedTensor, kind: str) -> torch.Tensor:
    """Return a weight as rows of blocks; the tensor scale of two-level scales is left out.

    Scales of blocks of 32, and their minima, are rounded to float16. Codes do not change.

    Args:
        state: Codes (N, K) with scales and zero points.
        kind: Block type, from ``block_type``.

    Returns:
        (N, K / elements of a block * bytes of a block) uint8.

    Raises:
        ValueError: A scale exceeds the range of float16, the zero point of a symmetric weight is
            not the middle code, or scales are not those of super-blocks.
    """
    form = BLOCK_TYPES[kind]
    assert state.codes is not None and state.scale is not None
    parts: Parts
    rows, columns = state.codes.shape
    if form.scheme.fmt.is_float and form.scheme.has_half_scales:
        codes, parts = state.codes, {"scale": _to_half(state.scale.float().reshape(rows, -1))}
    elif form.scheme.fmt.is_float:
        codes = state.codes
        scales = encode_scale(state.scale, state.scheme, state.scale_2).view(torch.uint8)
        parts = {"scales": scales.reshape(rows, -1, form.part_bytes("scales"))}
    elif form.scheme.has_super_blocks:
        codes = (state.codes.to(torch.int16) + form.offset).to(torch.uint8)
        parts = _pack_super_blocks(state, form)
    else:
        state = to_unsigned(state)
        assert state.codes is not None and state.scale is not None
        assert state.zero_point is not None
        scale, zeros = (
            _per_block(part.float(), rows, columns) for part in (state.scale, state.zero_point)
        )
        codes, parts = _pack_halves(state.codes, scale, zeros, form)
    blocks = codes.reshape(rows, -1, form.size)
    low = 0
    for number, (bits, width) in enumerate(form.planes):
        parts[number] = join_plane(blocks >> low & ((1 << bits) - 1), bits, width)
        low += bits
    return torch.cat([parts[part] for part in form.parts], -1).reshape(rows, -1)


def _pack_halves(
    codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, form: BlockType
) -> tuple[torch.Tensor, Parts]:
    """Return codes as they are stored, (N, K) uint8, and the float16 numbers of blocks as bytes.

    Args:
        codes: (N, K) unsigned.
        scale: (N, blocks).
        zeros: (N, blocks).
        form: The type, with symmetric values or minima.
    """
    if not form.scheme.has_minima:
        # The middle code of Q4_0 is 8. Codes of fewer bits move there: 2-bit codes 0 … 3 around 2
        # become 6 … 9.
        blocks = codes.to(torch.int16).reshape(len(codes), -1, form.size)
        moved = blocks - zeros.to(torch.int16).unsqueeze(-1) + form.offset
        return moved.flatten(1).to(torch.uint8), {"scale": _to_half(scale)}
    # scale * (code - zero) = scale * code + minimum. A minimum of zero is +0, as ggml writes it.
    return codes, {"scale": _to_half(scale), "minimum": _to_half(0 - scale * zeros)}


def _pack_super_blocks(state: QuantizedTensor, form: BlockType) -> Parts:
    """Return the float16 numbers and the factors of super-blocks as bytes, by the name of the part.

    Raises:
        ValueError: Scales or minima are not products of such numbers.
    """
    to = state.scheme.scale
    assert to.fmt is not None and state.scale is not None
    join, _ = FACTORS[form.scheme.scale]
    unit, scales = factors(state.scale.float(), to.fmt, to.span)
    parts: Parts = {"scale": _to_half(unit)}
    of_minima = None
    if form.scheme.has_minima:
        assert state.zero_point is not None
        products = minima(state.scale, state.zero_point, to.fmt)
        unit, of_minima = factors(products, to.fmt, to.span)
        parts["minimum"], of_minima = _to_half(unit), of_minima.to(torch.uint8)
    return parts | {"factors": join(scales.to(torch.uint8), of_minima)}


def _to_half(numbers: torch.Tensor) -> torch.Tensor:
    """Return a number for each block, (N, blocks), as bytes of float16 (N, blocks, 2).

    Raises:
        ValueError: One exceeds the range of float16.
    """
    halves = numbers.unsqueeze(-1).half()
    if not halves.isfinite().all():
        raise ValueError("GGUF stores scales as float16, but a scale of the model exceeds 65504.")
    return halves.view(torch.uint8)


def block_spec(kind: str, blocks: torch.Tensor, name: str) -> QuantizationSpec:
    """Return the specification of a weight stored in blocks.

    Zero points of Q4_1 and Q5_1 are integers if they reproduce the stored minima exactly, else
    float32.

    Args:
        kind: Block type.
        blocks: The weight, (N, bytes of a row) uint8.
        name: Its name, for messages.

    Raises:
        ValueError: The block type is not supported, or the weight is not a matrix.
    """
    if kind not in BLOCK_TYPES or blocks.dim() != 2:
        raise ValueError(
            f"{name} is {kind} with {blocks.dim()} axes: only matrices in "
            f"{', '.join(BLOCK_TYPES)}, and tensors in F32, F16 or BF16, can be read from GGUF."
        )
    form = BLOCK_TYPES[kind]
    spec = form.scheme.spec()
    if not form.scheme.has_minima or form.scheme.has_super_blocks:
        return spec
    parts = _split_parts(blocks, form)
    zeros = _integer_zero_points(_halves(parts["scale"]), _halves(parts["minimum"]), spec.scheme)
    if zeros is None:
        return form.scheme.spec(zero_point_type="float32")
    return spec


def unpack_blocks(
    blocks: torch.Tensor,
    spec: QuantizationSpec,
    kind: str,
    tensor_scale: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Return codes, scales and zero points of a weight: the inverse of ``pack_blocks``.

    Args:
        blocks: (N, bytes of a row) uint8.
        spec: Specification, from ``block_spec``.
        kind: Block type.
        tensor_scale: Tensor scale [] of two-level scales; None for other block types.
    """
    form = BLOCK_TYPES[kind]
    parts = _split_parts(blocks, form)
    codes = torch.zeros((), dtype=torch.uint8, device="cpu")
    low = 0
    for number, (bits, width) in enumerate(form.planes):
        codes = codes | split_plane(parts[number], bits, width) << low
        low += bits
    rows = len(blocks)
    if form.scheme.fmt.is_float and form.scheme.has_half_scales:
        return QuantizedTensor(spec, codes.reshape(rows, -1), _halves(parts["scale"]), None)
    if form.scheme.fmt.is_float:
        codes, scales = codes.reshape(rows, -1), parts["scales"].reshape(rows, -1)
        if form.scheme.has_tensor_scale:
            codes, scales = _without_zero_scales(codes, scales)
        scales = scales.contiguous().view(stored_dtype(spec.scheme))
        scale = decode_scale(scales, spec.scheme, tuple(codes.shape), tensor_scale)
        return QuantizedTensor(spec, codes, scale, None, tensor_scale)
    if form.scheme.fmt.signed:
        codes = (codes - form.offset).view(torch.int8)
    if form.scheme.has_super_blocks:
        return _unpack_super_blocks(spec, form, codes, parts)
    scale = _halves(parts["scale"])
    if not form.scheme.has_minima:
        zeros = torch.zeros_like(scale, dtype=torch.int8)
        return QuantizedTensor(spec, codes.reshape(rows, -1), scale, zeros)
    return _unpack_minima(spec, codes, scale, _halves(parts["minimum"]))


def _without_zero_scales(
    codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and e4m3 scales in which groups of zeros have the scale 1.

    ggml has no sign in the bytes of scales, and reads 0x7F as zero.

    Args:
        codes: (N, K) uint8.
        scales: (N, groups) uint8.
    """
    scales = scales & 0x7F
    is_zero = (scales == 0) | (scales == 0x7F)
    is_kept = ~is_zero.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    return codes * is_kept, torch.where(is_zero, _E4M3_ONE, scales)


def _unpack_super_blocks(
    spec: QuantizationSpec,
    form: BlockType,
    codes: torch.Tensor,
    parts: Parts,
) -> QuantizedTensor:
    rows = len(codes)
    _, split = FACTORS[form.scheme.scale]
    of_scales, of_minima = split(parts["factors"])  # (N, super-blocks, groups)
    if spec.scheme.scale.fmt is not None and spec.scheme.scale.fmt.signed:
        of_scales = of_scales.view(torch.int8)
    unit = _halves(parts["scale"]).float().unsqueeze(-1)
    # A group with scale 0 has one value. Any scale and code 0 stand for it.
    unit = torch.where(unit == 0, _SMALLEST, unit)
    is_constant = (of_scales == 0) | (_halves(parts["scale"]) == 0).unsqueeze(-1)
    codes = codes.reshape(
        *of_scales.shape, form.scheme.group
    )  # (N, super-blocks, groups, elements)
    codes = torch.where(is_constant.unsqueeze(-1), 0, codes).reshape(rows, -1)
    scale = (unit * torch.where(is_constant, 1, of_scales)).reshape(rows, -1)
    if of_minima is None:
        zeros = torch.zeros_like(scale, dtype=torch.int8)
    else:
        minimum = _halves(parts["minimum"]).float().unsqueeze(-1) * of_minima
        zeros = minimum.reshape(rows, -1) / scale
    return QuantizedTensor(spec, codes, scale, zeros)


def _unpack_minima(
    spec: QuantizationSpec, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor
) -> QuantizedTensor:
    rows = len(codes)
    if not spec.scheme.float_zero_point:
        zeros = _integer_zero_points(scale, minimum, spec.scheme)
        assert zeros is not None  # as ``block_spec`` found
        return QuantizedTensor(spec, codes.reshape(rows, -1), scale, zeros.to(torch.uint8))
    # A block with scale 0 has one value, its minimum: code 0 with scale 1 and zero point -minimum.
    is_constant = scale == 0
    codes = torch.where(is_constant.unsqueeze(-1), 0, codes)
    scale = torch.where(is_constant, 1, scale)
    return QuantizedTensor(spec, codes.reshape(rows, -1), scale, -minimum.float() / scale.float())


def _split_parts(blocks: torch.Tensor, form: BlockType) -> Parts:
    """Return the bytes of each part of blocks, (N, blocks, bytes of the part)."""
    sizes = [form.part_bytes(part) for part in form.parts]
    pieces = torch.split(blocks.reshape(len(blocks), -1, form.bytes), sizes, -1)
    return dict(zip(form.parts, pieces, strict=True))


def _halves(body: torch.Tensor) -> torch.Tensor:
    """Return bytes (N, blocks, 2) as float16 (N, blocks)."""
    return body.clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1)


def _integer_zero_points(
    scale: torch.Tensor, minimum: torch.Tensor, scheme: Scheme
) -> torch.Tensor | None:
    """Return the codes that reproduce all stored minima exactly, None if a block has none.

    Example: scale 0.5 and minimum -4 give the zero point 8; minimum -4.1 gives None.
    """
    zeros = (-minimum.float() / scale.float()).round()
    zeros = torch.where(scale == 0, 0, zeros)
    is_code = (zeros >= 0) & (zeros <= scheme.fmt.qmax)
    exact = (-scale.float() * zeros).half() == minimum
    return zeros if bool((is_code & exact).all()) else None


def _per_block(parts: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales or zero points of any granularity as (rows, columns / 32)."""
    parts = parts.expand(rows).unsqueeze(-1) if parts.dim() == 0 else parts.reshape(rows, -1)
    return parts.repeat_interleave(columns // BLOCK // parts.shape[1], 1)
