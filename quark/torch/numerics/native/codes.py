"""Codes of tensors, by kernels."""

from __future__ import annotations

import struct

import torch

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Format
from quark.torch.numerics.native.code_kernels import round_to_floats, round_to_integers
from quark.torch.numerics.native.compilation import can_run, run_rows
from quark.torch.numerics.native.runs import count_outer_axes, split_runs, spread_over_runs
from quark.torch.numerics.scheme import Scheme

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_ZERO = 1 << 20  # zero point that integer kernels take
_NAN = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}  # codes as torch rounds NaN


def find_codes(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor | None:
    """Return the codes of a tensor as ``qdq.quantize`` does, or None if no kernel serves.

    Args:
        x: Values.
        scale: One per block, any shape.
        zero_point: Like ``scale``, or None.
        scheme: How the tensor is quantized.
    """
    if not _is_served(scheme) or x.dtype not in _TYPES or not x.is_contiguous():
        return None
    blocks, fmt = scheme.blocks(x.shape), scheme.fmt
    outer = count_outer_axes(blocks.view, blocks.reduced)
    if outer is None or not can_run(x, scale, zero_point):
        return None
    has_zeros = zero_point is not None and not (scheme.symmetric and fmt.signed)
    zeros = torch.zeros((), dtype=torch.float32, device="cpu")
    if zero_point is not None and has_zeros:
        zeros = zero_point.float()
    if not bool(zeros.abs().amax() <= _LARGEST_ZERO):  # NaN is not, either
        return None
    runs = split_runs(blocks.split(x.detach()), outer)
    out = torch.empty(blocks.padded, dtype=fmt.code_dtype, device="cpu")
    factor, divides = _factor(scale, scheme)
    factor = spread_over_runs(factor, blocks, outer, len(runs))
    if fmt.is_float:
        codes = out.view(torch.uint8).view(runs.shape)
        nan = 0 if fmt.native is None else _NAN[fmt.native]
        constants = fmt.bits, *float_constants(fmt), nan
        run_rows(round_to_floats, [runs, codes, factor], *constants, divides)
    else:
        none = torch.zeros(len(runs), dtype=torch.float32, device="cpu")
        after = spread_over_runs(zeros, blocks, outer, len(runs)) if has_zeros else none
        before, after = (after, none) if scheme.float_zero_point else (none, after)
        tensors = [runs, out.view(runs.shape), factor, before, after]
        run_rows(round_to_integers, tensors, fmt.qmin, fmt.qmax, divides)
    return blocks.join(out).reshape(x.shape)


def _is_served(scheme: Scheme) -> bool:
    fmt = scheme.fmt
    is_known = fmt.signed and fmt.bits <= 8 if fmt.is_float else fmt.bits <= 16
    return fmt.scaled and is_known and fmt.has_rule and scheme.rounding is RoundType.half_even


def _factor(scale: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, bool]:
    """Return factors of values, or divisors, and whether they are divisors."""
    scale = scale.float()
    divides = scheme.divides and not (scheme.scales_by_powers and _have_exact_inverses(scale))
    return (scale if divides else scale.reciprocal()), divides


def _have_exact_inverses(scale: torch.Tensor) -> bool:
    """Whether products with reciprocals give quotients: scales from 2^-126 to 2^126, powers of two.

    Only the exponent has bits in them, and their reciprocals are normal numbers too.
    """
    bits = scale.contiguous().view(torch.int32)
    least, most = bits.aminmax()
    is_normal = int(least) >= 1 << 23 and int(most) <= (127 + 126) << 23
    return is_normal and int((bits & 0x7FFFFF).amax()) == 0


def float_constants(fmt: Format) -> tuple[int, int, int]:
    """Return the constants of a float format that kernels take.

    Returns:
        Its bits of mantissa; the bits of its smallest normal number and of its largest value, both
        as float32.
    """
    return fmt.mantissa_bits, _bits(2.0**fmt.min_exponent), _bits(fmt.max_value)


def _bits(x: float) -> int:
    """Return the bits of a float32."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])
