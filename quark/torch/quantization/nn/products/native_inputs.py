"""Quantization of inputs by a kernel of numba, where it has the bits of the plain path.

The plain path takes 9 to 49 operations for an input, most of them for the scale: for a few rows,
longer than the product. The kernel reads an input once. It is proved with the samples of
``compiled_inputs`` before a scheme uses it, and serves every runtime of packed layers.
"""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.native.compilation import LEAST_ELEMENTS, array, can_run, run_rows
from quark.torch.numerics.native.vectors import HALF, LANES
from quark.torch.numerics.scales import largest_exponent, largest_value
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.products.compiled_inputs import (
    Numbers,
    block_rows,
    equal_bits,
    plain_values,
    sample_inputs,
    sample_numbers,
)
from quark.torch.quantization.nn.products.native_exponent_kernels import (
    fake_quantize_float_rows,
    fake_quantize_micro_rows,
)
from quark.torch.quantization.nn.products.native_input_kernels import (
    FLOAT,
    PLAIN,
    POWER,
    SHARED,
    fake_quantize_rows,
)
from quark.torch.quantization.nn.products.triton_inputs import Case

logger = logging.getLogger(__name__)

_TYPES = (torch.float32, torch.bfloat16)
_KINDS = {"shared": SHARED, "power": POWER, "float": FLOAT, "plain": PLAIN}
_LARGEST_ZERO = 1 << 20  # zero point, with which sums of codes stay exact


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return ``x`` fake-quantized by a kernel; None if none serves.

    Args:
        x: Values, any shape.
        scale: Scale of the whole tensor; None computes scales from the ranges of the blocks.
        zero_point: Like ``scale``, or None.
        scheme: How the tensor is quantized.
        tensor_scale: Tensor scale of two-level scales, or None.
    """
    # Once numba is in memory, a call costs microseconds; before, its import costs a second.
    least = 2 if "numba" in sys.modules else LEAST_ELEMENTS
    if x.dtype not in _TYPES or not can_run(x, scale, zero_point, tensor_scale, least=least):
        return None
    if scheme.symmetric and scheme.fmt.signed:
        zero_point = None
    given = (scale, zero_point, tensor_scale)
    has = tuple(t is not None for t in given)
    shape = _rows(x, scheme, scale)
    if shape is None or not _is_served(scheme, has) or not _is_right(scheme, x.dtype, has):
        return None
    if zero_point is not None and not zero_point.abs().item() <= _LARGEST_ZERO:
        return None
    return _run(x.reshape(shape), given, scheme).view(x.shape)


def _rows(x: torch.Tensor, scheme: Scheme, scale: torch.Tensor | None) -> tuple[int, int] | None:
    """Return the shape in which the kernel takes an input, None if no kernel does."""
    if _exponent_kernel(scheme) is not None:
        is_last = scheme.axis % max(1, x.dim()) == x.dim() - 1
        is_whole = scale is None and is_last and x.shape[-1] % scheme.fmt.block == 0
        return (x.numel() // x.shape[-1], x.shape[-1]) if is_whole and x.numel() else None
    shape = block_rows(x, scheme, scale)
    if shape is not None and scale is not None:  # rows of any length share the scale
        shape = (x.numel() // x.shape[-1], x.shape[-1])
    return None if shape is None or shape[1] % LANES else shape


def _exponent_kernel(scheme: Scheme) -> Callable[..., None] | None:
    """Return the kernel for blocks that share exponents and fill a vector or half of one."""
    fmt = scheme.fmt
    if scheme.qscheme is not QSchemeType.per_group:
        return None
    if fmt.block == LANES and fmt.sub_block == 2:
        return fake_quantize_micro_rows
    return fake_quantize_float_rows if fmt.block == HALF and not fmt.sub_block else None


def _is_served(scheme: Scheme, has: tuple[bool, ...]) -> bool:
    """Whether the kernel knows a scheme.

    Args:
        scheme: The scheme.
        has: Whether scale, zero point and tensor scale are given.
    """
    fmt, to = scheme.fmt, scheme.scale
    is_known = fmt.signed and fmt.has_rule if fmt.is_float else fmt.bits <= 16
    has_scale = to.held_dtype == torch.float32 and not to.span
    has_range = fmt.is_float or (scheme.symmetric and fmt.signed)
    is_dynamic = has_range and (has[2] or not to.two_level)
    is_even = scheme.rounding is RoundType.half_even
    if _exponent_kernel(scheme) is not None:
        return is_even and not any(has)
    return is_known and has_scale and is_even and (has[0] or is_dynamic)


def _run(x: torch.Tensor, given: Numbers, scheme: Scheme) -> torch.Tensor:
    """Return values of ``x``, whose rows are the blocks or share the given scale."""
    scale, zero_point, tensor_scale = given
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device="cpu")
    kernel = _exponent_kernel(scheme)
    if kernel is not None:
        run_rows(kernel, [x, y], *_exponent_constants(scheme, x.dtype))
        return y
    zero = 0.0 if zero_point is None else float(zero_point)
    scales = torch.empty(0, dtype=torch.float32, device="cpu")
    if scale is not None:
        scales = scale.detach().float().reshape(1)
    unit = np.float32(1.0 if tensor_scale is None else float(tensor_scale))
    grid, (whole, numbers, scale_grid) = _grid(scheme.fmt), _constants(scheme, x.dtype)
    if grid is None:
        before, after = (zero, 0.0) if scheme.float_zero_point else (0.0, zero)
        codes = [before, scheme.fmt.qmin - after, scheme.fmt.qmax - after]
        grid = np.array(codes, dtype=np.float32)
    multiplies, signs = None if scheme.divides else grid, grid if scheme.signed_scales else None
    constants = array(scales), unit, whole, numbers, scale_grid, grid, multiplies, signs
    run_rows(fake_quantize_rows, [x, y], *constants)
    return y


@lru_cache(maxsize=256)
def _constants(scheme: Scheme, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the constants of a scheme that the kernel takes; see ``fake_quantize_rows``."""
    case = Case.of(scheme, dtype)
    half = case.half_unit if case.scale_mode == "even" else 0
    rounds_up = case.scale_mode == "ceil"
    whole = [_KINDS[case.scale], rounds_up, half, case.element_exponent, case.fraction_bits]
    whole += [case.largest_exponent, case.is_float]
    numbers = [case.reach, case.epsilon, case.smallest_scale, case.largest_scale]
    numbers += [case.largest_float32]
    grid = _grid(scheme.scale.fmt)
    grid = np.zeros(3, dtype=np.int32) if grid is None else grid
    return np.array(whole, dtype=np.int64), np.array(numbers, dtype=np.float32), grid


@lru_cache(maxsize=256)
def _exponent_constants(scheme: Scheme, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the constants that kernels of shared exponents take."""
    fmt = scheme.fmt
    below = 127 + fmt.bits - 2  # the bias of float32, and the bits below the leading one
    whole = [below, largest_exponent(fmt, largest_value(dtype))]
    return np.array(whole, dtype=np.int32), np.array([0, fmt.qmin, fmt.qmax], dtype=np.float32)


def _grid(fmt: Format | None) -> Any:
    """Return what rounds to a float format, or None; see ``_round_to_scale`` of the kernels."""
    if fmt is None or not fmt.is_float:
        return None
    largest, least = _bits(fmt.max_value), _bits(2.0**fmt.min_exponent)
    return np.array([largest, least, (23 - fmt.mantissa_bits) << 23], dtype=np.int32)


def _bits(x: float) -> int:
    """Return the bits of a float32."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


@lru_cache(maxsize=256)
def _is_right(scheme: Scheme, dtype: torch.dtype, has: tuple[bool, ...]) -> bool:
    """Whether the kernel has the bits of the plain path for samples; a refusal is logged.

    The first answer is kept for this process.

    Args:
        scheme: How inputs are quantized.
        dtype: Type of the inputs.
        has: Whether scale, zero point and tensor scale are given.
    """
    numbers = sample_numbers(scheme, has)
    problem = "its values for a sample differ from those of the plain path"
    try:
        samples = sample_inputs(dtype, is_one_block=has[0])
        if all(
            equal_bits(_run(x, numbers, scheme), plain_values(x, scheme, *numbers)) for x in samples
        ):
            return True
    except Exception as error:  # numba and LLVM have no common error; torch serves instead
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    name = scheme.fmt.name
    logger.warning("Inputs in %s are not quantized by kernels of numba: %s.", name, problem)
    return False
