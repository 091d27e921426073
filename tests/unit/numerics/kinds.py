"""Kinds of number formats, by the fields of ``Format``, and casts by another implementation.

Tests take their names here, so that they run a new format as well.
"""

import ml_dtypes
import numpy as np

from quark.torch.numerics.formats import Dtype

# The same floats in ml_dtypes. Others are rounded by definition, see ``cast``.
_TYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4": ml_dtypes.float4_e2m1fn,
}


def shares_exponents(fmt):
    """Whether codes of a block share an exponent."""
    return bool(fmt.block or fmt.fraction_bits)


def _names(belongs):
    return [dtype.name for dtype in Dtype if belongs(dtype.value)]


CASTS = _names(lambda fmt: not fmt.scaled)
SHARED = _names(shares_exponents)
TABLES = _names(lambda fmt: not fmt.has_rule)
FLOATS = _names(lambda fmt: fmt.exponent_bits and fmt.scaled and fmt.signed)
UNSIGNED_FLOATS = _names(lambda fmt: fmt.exponent_bits and not fmt.signed)
NATIVE = [name for name in FLOATS if Dtype[name].value.native is not None]
ENCODED = [name for name in FLOATS if name not in NATIVE]
ALL_INTEGERS = _names(lambda fmt: not fmt.is_float and not shares_exponents(fmt))
INTEGERS = [name for name in ALL_INTEGERS if Dtype[name].value.bits <= 16]
PACKED = _names(lambda fmt: fmt.word_codes > 1)


def values_of(name):
    """Return the value of each code of an encoded float: float32 [2^bits].

    Without a type in ml_dtypes: sign, exponent with the bias 2^(bits - 1) - 1, mantissa, and
    neither infinities nor NaN, as the microscaling specification (OCP MX 1.0, 5.3) defines them.
    """
    fmt = Dtype[name].value
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    if name in _TYPES:
        return codes.view(_TYPES[name]).astype(np.float32)
    mantissa = codes % (1 << fmt.mantissa_bits) / 2.0**fmt.mantissa_bits
    field = (codes >> fmt.mantissa_bits) % (1 << fmt.exponent_bits)
    exponent = np.maximum(field, 1) - (2.0 ** (fmt.exponent_bits - 1) - 1)
    magnitude = (np.minimum(field, 1) + mantissa) * 2.0**exponent
    return np.where(codes >> (fmt.bits - 1), -magnitude, magnitude).astype(np.float32)


def largest(name):
    """Return the largest finite value of a float."""
    return float(ml_dtypes.finfo(_TYPES[name]).max) if name in _TYPES else values_of(name).max()


def mantissa_bits(name):
    """Return the width of the mantissa of a float, by ml_dtypes or by its name."""
    return ml_dtypes.finfo(_TYPES[name]).nmant if name in _TYPES else int(name.rpartition("m")[2])


def encode(x, name):
    """Return the codes of values within range: the nearest ones, ties to even."""
    if name in _TYPES:
        return np.asarray(x).astype(_TYPES[name]).view(np.uint8)
    values = values_of(name)[: 1 << (Dtype[name].value.bits - 1)].astype(np.float64)  # from 0 on
    distances = np.abs(np.abs(np.asarray(x, np.float64))[..., None] - values)
    codes = distances.argmin(-1)  # the lower of two that are as near
    following = np.minimum(codes + 1, len(values) - 1)
    tied = np.take_along_axis(distances, following[..., None], -1)[..., 0] == distances.min(-1)
    codes = np.where(tied & (codes % 2 == 1), following, codes)
    return (codes + np.signbit(x) * len(values)).astype(np.uint8)


def cast(x, name):
    """Return the nearest values of a float to values within range, in the type of ``x``."""
    if name in _TYPES:
        return np.asarray(x).astype(_TYPES[name]).astype(x.dtype)
    return values_of(name)[encode(x, name)].astype(x.dtype)
