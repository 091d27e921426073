"""Quantize (values to codes), dequantize (codes to values) and fake-quantize (both).

All arithmetic is float32, whatever the type of the tensor; integers of more than 24 bits need
float64. For integers, values are multiplied by the reciprocal of the scale, as in
``torch.fake_quantize_per_tensor_affine``. For floats, values are divided by the scale, as the
formats document. The two methods round one in eight exact ties differently. Scales that are powers
of two divide: that is exact, and their reciprocal could overflow. On a CPU, tensors are processed
in pieces that fit the cache, and bfloat16 under powers of two as integers, with the same codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quark.torch.numerics.codec import (
    countable_scales,
    decode,
    round_bfloat16_to_codes,
    round_to_codes,
)
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.four_over_six import WIDER, choose_scales
from quark.torch.numerics.native.codes import find_codes
from quark.torch.numerics.pieces import join_rows, row_pieces
from quark.torch.numerics.rounding import round_, round_to_grid_
from quark.torch.numerics.scales import (
    block_range,
    largest_value,
    qparams_from_range,
    tensor_scale_from_range,
)
from quark.torch.numerics.scheme import Scheme

CHUNK = 1 << 18  # elements of a piece: 1 MiB of float32
RANGE_CHUNK = 1 << 20  # elements of a piece whose ranges are computed, with smaller results
FLOAT16_MAX = torch.finfo(torch.float16).max
E4M3_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()

QParams = tuple[torch.Tensor, torch.Tensor | None]


def quantize(
    x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor:
    """Return the codes of ``x``: same shape, type ``scheme.fmt.code_dtype``.

    Args:
        x: Values.
        scale: One per block, any shape; None for formats without a scale.
        zero_point: Like ``scale``, or None.
        scheme: How the tensor is quantized.
    """
    fmt = scheme.fmt
    if not fmt.scaled:
        return _cast(x, fmt.code_dtype)
    by_kernel = None if scale is None else find_codes(x, scale, zero_point, scheme)
    if by_kernel is not None:
        return by_kernel
    if scale is not None and _is_counted(x, scale, scheme):
        return _count_codes(x.detach(), scale, scheme)
    # Codes of floats take two tensors beside the piece, so smaller pieces fit the cache.
    size = CHUNK // 2 if fmt.is_encoded else CHUNK
    return _map(_to_codes, x, scale, zero_point, scheme, fmt.code_dtype, size=size)


def recover_codes(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
) -> torch.Tensor:
    """Return the codes of values that are quantized already: the nearest codes.

    The rounding mode of the scheme does not apply. Example: code 3 under the scale 0.1 has the
    value 0.3, which may be stored as 0.29999998. Rounding that down would give code 2.
    """
    return quantize(values, scale, zero_point, replace(scheme, rounding=RoundType.half_even))


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the values of ``codes`` in ``dtype``: (codes - zero_point) * scale in float32."""
    if not scheme.fmt.scaled:
        return _cast(codes, dtype)
    return _map(_from_codes, codes, scale, zero_point, scheme, dtype)


def fake_quantize_(
    x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor:
    """Replace ``x`` by dequantize(quantize(x)) in place and return it."""
    if not scheme.fmt.scaled:
        return x.copy_(quantize(x, None, None, scheme))
    result = _map(round_trip, x, scale, zero_point, scheme, x.dtype, out=x)
    return x if result.data_ptr() == x.data_ptr() else x.copy_(result)


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
) -> torch.Tensor:
    """Return dequantize(quantize(x)) in the type of ``x``.

    The gradient passes straight through if x is inside the range of the codes, and is zero
    if x saturates (Bengio et al. 2013, section 4).
    """
    result: torch.Tensor = _FakeQuantize.apply(x, scale, zero_point, scheme)  # type: ignore[no-untyped-call]
    return result


def is_inside(
    x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor:
    """Return which values lie inside the range of the codes, bool in the shape of ``x``."""
    return _map(_is_inside, x, scale, zero_point, scheme, torch.bool)


def dynamic_qparams(
    x: torch.Tensor, scheme: Scheme, tensor_scale: torch.Tensor | None = None
) -> QParams:
    """Return scale and zero point for the range of ``x`` itself.

    Two-level block scales are relative to ``tensor_scale``.
    """
    x = x.detach()
    # Rows can be processed in pieces if no block spans two rows and no tensor scale is needed.
    apart = scheme.blocks(x.shape).grid[:1] == x.shape[:1]
    whole = scheme.scale.two_level and tensor_scale is None
    pieces = row_pieces(x, RANGE_CHUNK) if apart and not whole else [x]
    parts = [_own_qparams(piece, scheme, tensor_scale) for piece in pieces]
    zeros = [zero_point for _, zero_point in parts if zero_point is not None]
    return join_rows([scale for scale, _ in parts]), join_rows(zeros) if zeros else None


def _own_qparams(x: torch.Tensor, scheme: Scheme, tensor_scale: torch.Tensor | None) -> QParams:
    lo, hi = block_range(x, scheme)
    if scheme.four_over_six and scheme.scale.two_level and tensor_scale is None:
        tensor_scale = tensor_scale_from_range(lo, hi, scheme)
    given = scheme, tensor_scale, largest_value(x.dtype)
    scale, zero_point = qparams_from_range(lo, hi, *given)
    if scheme.four_over_six:
        wider, _ = qparams_from_range(WIDER * lo, WIDER * hi, *given)
        scale = choose_scales(x, scale, wider, scheme)
    return scale, zero_point


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to a float type; values beyond its range saturate."""
    bound = torch.finfo(dtype).max
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    size = CHUNK if x.device.type == "cpu" else max(1, x.numel())
    flat = x.detach().reshape(-1)
    for src, dst in zip(torch.split(flat, size), torch.split(out.view(-1), size), strict=True):
        dst.copy_(src.float().clamp(-bound, bound))
    return out


def without_view(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is not a view, so that the next operation may change it in place."""
    return x.clone() if x._is_view() else x


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        zero_point: torch.Tensor | None,
        scheme: Scheme,
    ) -> torch.Tensor:
        if not scheme.fmt.scaled:
            return dequantize(quantize(x, None, None, scheme), None, None, scheme, x.dtype)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(is_inside(x, scale, zero_point, scheme))
        return without_view(_map(round_trip, x, scale, zero_point, scheme, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        inside = ctx.saved_tensors
        return (grads[0] * inside[0] if inside else grads[0], None, None, None)


class Factors(NamedTuple):
    """Scale, its reciprocal and zero point of a piece, in shapes that broadcast over it."""

    scale: torch.Tensor
    inverse: torch.Tensor
    zero_point: torch.Tensor | None

    @classmethod
    def of(cls, scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme) -> Factors:
        """Return the factors of scales and zero points that broadcast already, in float32."""
        scale = scale.float()
        has_zeros = zero_point is not None and not (scheme.symmetric and scheme.fmt.signed)
        zeros = zero_point.float() if zero_point is not None and has_zeros else None
        return cls(scale, scale.reciprocal(), zeros)

    def slice_rows(self, rows: slice) -> Factors:
        """Return the factors of some rows of the view."""
        if self.scale.shape[0] == 1:
            return self
        zeros = None if self.zero_point is None else self.zero_point[rows]
        return Factors(self.scale[rows], self.inverse[rows], zeros)

    def split_columns(self) -> list[Factors]:
        """Return the factors of each column of factors of shape (columns, rows)."""
        zeros = [None] * len(self.scale) if self.zero_point is None else self.zero_point.unbind()
        parts = zip(self.scale.unbind(), self.inverse.unbind(), zeros, strict=True)
        return [Factors(*part) for part in parts]

    def select_rows(self, rows: torch.Tensor) -> Factors:
        """Return the factors of some rows of factors of shape (columns, rows)."""
        zeros = None if self.zero_point is None else self.zero_point[:, rows]
        return Factors(self.scale[:, rows], self.inverse[:, rows], zeros)


# The functions below process one piece in float32 or float64, and may overwrite it.
_Piece = Callable[[torch.Tensor, Factors, Scheme], torch.Tensor]


def _divide(x: torch.Tensor, by: Factors, scheme: Scheme) -> torch.Tensor:
    return x.div_(by.scale) if scheme.divides else x.mul_(by.inverse)


def _round(x: torch.Tensor, by: Factors, scheme: Scheme) -> torch.Tensor:
    """Return integer codes, or for a float format the rounded values x / scale."""
    fmt, mode = scheme.fmt, scheme.rounding
    x = _divide(x, by, scheme)
    if fmt.is_float:
        return round_to_grid_(x, fmt, mode)
    if by.zero_point is None:
        x = round_(x, mode)
    elif scheme.float_zero_point:
        x = round_(x.add_(by.zero_point), mode)
    else:
        x = round_(x, mode).add_(by.zero_point)
    return x.clamp_(fmt.qmin, fmt.qmax)


def _rescale(x: torch.Tensor, by: Factors, scheme: Scheme) -> torch.Tensor:
    return (x if by.zero_point is None else x.sub_(by.zero_point)).mul_(by.scale)


def _to_codes(x: torch.Tensor, by: Factors, scheme: Scheme) -> torch.Tensor:
    fmt = scheme.fmt
    if fmt.is_encoded:
        return round_to_codes(_divide(x, by, scheme), fmt, scheme.rounding)
    if fmt.native is not None and scheme.rounding is RoundType.half_even:
        return _divide(x, by, scheme).clamp_(-fmt.max_value, fmt.max_value)  # the cast rounds
    return _round(x, by, scheme)


def _is_counted(x: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> bool:
    """Whether ``round_bfloat16_to_codes`` gives the codes: the same, in half the time on a CPU."""
    fmt = scheme.fmt
    is_counted = fmt.is_encoded and fmt.has_rule and fmt.signed and fmt.bits <= 8
    is_narrow = x.dtype == torch.bfloat16 and is_counted
    if not is_narrow or not scheme.scales_by_powers or scheme.rounding is not RoundType.half_even:
        return False
    if x.device.type != "cpu" or not x.numel():
        return False
    (least, most), (lo, hi) = countable_scales(fmt), scale.aminmax()
    return bool(least <= lo) and bool(hi <= most)


def _count_codes(x: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the codes of a bfloat16 tensor by ``round_bfloat16_to_codes``."""
    blocks = scheme.blocks(x.shape)
    out = torch.empty(blocks.padded, dtype=scheme.fmt.code_dtype, device="cpu")
    scales = blocks.spread(scale.float())
    views = blocks.split(x.view(torch.int16)), out.view(blocks.view)
    scratch = torch.empty(3, 0, dtype=torch.int16, device="cpu")
    for src, dst, by in _pieces(*views, Factors(scales, scales, None), CHUNK // 2):
        if not scratch.numel():  # the first piece is the largest
            scratch = torch.empty(3, src.numel(), dtype=torch.int16, device="cpu")
        dst.copy_(round_bfloat16_to_codes(src, by.scale, scheme.fmt, scratch))
    return blocks.join(out).reshape(x.shape)


def _from_codes(x: torch.Tensor, by: Factors, scheme: Scheme) -> torch.Tensor:
    return _rescale(decode(x, scheme.fmt) if scheme.fmt.is_encoded else x, by, scheme)


def round_trip(x: torch.Tensor, by: Factors, scheme: Scheme) -> torch.Tensor:
    """Return values quantized and dequantized; float32 ``x`` may be overwritten."""
    x = _round(x, by, scheme)
    if by.zero_point is None and not scheme.fmt.is_float:
        x = x.add_(0.0)  # integers have no -0
    return _rescale(x, by, scheme)


def _is_inside(x: torch.Tensor, by: Factors, scheme: Scheme) -> torch.Tensor:
    fmt = scheme.fmt
    x = _divide(x, by, scheme)
    # Values up to half a step beyond the last code still round to it. 0.501 instead of 0.5 allows
    # for the rounding of the reciprocal. Example, fp4: max 6, step 2, so the limit is 7.002.
    if not fmt.is_float and by.zero_point is not None:
        x = x.add_(by.zero_point)
    least, most = fmt.reach(0.501)
    return (x >= least) & (x <= most)


def _map(
    piece: _Piece,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    size: int | None = None,
) -> torch.Tensor:
    """Apply ``piece`` to pieces of ``size`` elements, and return the result in the shape of ``x``.

    The default size is ``CHUNK``. The result has the type ``dtype``. ``out`` may be ``x`` itself.
    It is used only if its blocks can be viewed without a copy.
    """
    if scale is None:
        raise ValueError(f"{scheme.fmt.name} needs a scale, but none was given.")
    if x.numel() == 0:
        return torch.empty_like(x, dtype=dtype)
    wide = torch.float32 if scheme.fmt.bits <= 24 else torch.float64
    blocks = scheme.blocks(x.shape)
    scales = blocks.spread(scale.to(wide))
    zeros = None
    if zero_point is not None and not (scheme.symmetric and scheme.fmt.signed):
        zeros = blocks.spread(zero_point.to(wide))
    if out is None or not out.is_contiguous() or blocks.padded != blocks.shape:
        shape = x.shape if blocks.padded == blocks.shape else blocks.padded
        out = torch.empty(shape, dtype=dtype, device=x.device)
    views = blocks.split(x), out.view(blocks.view)
    buffer: torch.Tensor | None = None  # for all pieces: new memory would take time for each
    for src, dst, by in _pieces(*views, Factors(scales, scales.reciprocal(), zeros), size or CHUNK):
        # Work in place in the result if it is wide enough: one buffer less in the cache.
        if dst.dtype != wide and buffer is None:  # the first piece is the largest
            buffer = torch.empty(src.numel(), dtype=wide, device=src.device)
        work = dst if buffer is None else buffer[: src.numel()].view(src.shape)
        if work.data_ptr() != src.data_ptr():
            _load(src, work)
        done = piece(work, by, scheme)
        if done.data_ptr() != dst.data_ptr():
            _store(done, dst)
    # Not a view of ``out`` where it has the shape already: autograd lets no one change a view.
    return out if out.shape == x.shape else blocks.join(out).reshape(x.shape)


def _load(src: torch.Tensor, work: torch.Tensor) -> None:
    """Copy values or codes to the float32 buffer ``work``."""
    if src.dtype == torch.float8_e4m3fn and src.device.type == "cpu":
        # Torch converts this type one value at a time; a table lookup is five times faster.
        codes = src.view(torch.uint8).flatten().to(torch.int32)
        torch.index_select(E4M3_VALUES, 0, codes, out=work.view(-1))
    else:
        work.copy_(src)


def _store(done: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy a float32 result, or flags, to ``dst``."""
    if dst.dtype == torch.float16:
        done.clamp_(-FLOAT16_MAX, FLOAT16_MAX)  # rounding up may exceed the range
    elif dst.dtype == torch.uint8 and done.is_floating_point():
        done = done.to(torch.int32)  # torch converts float32 to uint8 directly one value at a time
    dst.copy_(done)


def _pieces(
    src: torch.Tensor, dst: torch.Tensor, by: Factors, elements: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Factors]]:
    """Split along the first axis into pieces of about ``elements`` elements (one on a GPU)."""
    rows = max(1, elements * src.shape[0] // max(1, src.numel()))
    if src.device.type != "cpu" or rows >= src.shape[0]:
        yield src, dst, by
        return
    for start in range(0, src.shape[0], rows):
        rows_of_piece = slice(start, start + rows)
        yield src[rows_of_piece], dst[rows_of_piece], by.slice_rows(rows_of_piece)
