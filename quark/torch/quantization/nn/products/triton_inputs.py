"""Quantization of inputs in one Triton kernel, where it has the bits of the plain path.

The plain path launches 9 to 49 operations for an input. The kernel is proved on the device with
the samples of ``compiled_inputs`` before a scheme uses it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from quark.torch.numerics import qdq
from quark.torch.numerics.formats import Format
from quark.torch.numerics.scales import (
    EPS,
    largest_exponent,
    largest_scale,
    largest_value,
)
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.products import triton_input_kernels
from quark.torch.quantization.nn.products.compiled_inputs import (
    Numbers,
    block_rows,
    equal_bits,
    plain_values,
    sample_inputs,
    sample_numbers,
    scheme_of_rows,
)
from quark.torch.quantization.nn.products.triton_functions import (
    launches_on,
    load_functions,
    log_once,
)

_TILE = 1024  # elements of a tile
_LONGEST = 1 << 16  # elements of a block whose scale one program computes


class Float(NamedTuple):
    """A float format, as the kernel knows it.

    Attributes:
        lowest: Smallest value.
        largest: Largest value.
        smallest_normal: Smallest positive value with a full mantissa.
        step_of_one: Distance of the values from 1 on.
    """

    lowest: float
    largest: float
    smallest_normal: float
    step_of_one: float

    @classmethod
    def of(cls, fmt: Format | None) -> Float | None:
        """Return the numbers of a format, None if there is none or it is an integer."""
        if fmt is None or not fmt.is_float:
            return None
        lowest = -fmt.max_value if fmt.signed else 0.0
        return cls(lowest, fmt.max_value, 2.0**fmt.min_exponent, 2.0**-fmt.mantissa_bits)


class Case(NamedTuple):
    """A scheme and a type of inputs, as the kernel knows them; see ``numerics.scales``.

    Attributes:
        mode: Rounding mode of values.
        divides: Whether values are divided by scales.
        adds_first: Whether the zero point is added before values are rounded.
        is_symmetric: Whether dynamic ranges are centred on zero.
        is_float: Whether codes are floats.
        element: The float format of the codes, or None.
        qmin: Smallest integer code.
        qmax: Largest integer code.
        saturates: Whether results are limited to those of float16.
        scale: ``shared`` exponents, ``power`` of two, ``float`` format, or ``plain`` float32.
        scale_float: Float format of scales, or None.
        scale_mode: Rounding mode of shared exponents.
        half_unit: What rounds the largest magnitude half up, in bits.
        element_exponent: Exponent of the largest code.
        fraction_bits: Bits of a code after the binary point.
        largest_exponent: Largest shared exponent.
        reach: Codes from zero to the largest one.
        epsilon: Scale of zeros.
        smallest_scale: Smallest scale.
        largest_scale: Largest scale.
        largest: Largest magnitude that a code may stand for.
        largest_float32: Largest float32.
    """

    mode: str
    divides: bool
    adds_first: bool
    is_symmetric: bool
    is_float: bool
    element: Float | None
    qmin: float
    qmax: float
    saturates: bool
    scale: str
    scale_float: Float | None
    scale_mode: str
    half_unit: int
    element_exponent: int
    fraction_bits: int
    largest_exponent: int
    reach: float
    epsilon: float
    smallest_scale: float
    largest_scale: float
    largest: float
    largest_float32: float

    @classmethod
    def of(cls, scheme: Scheme, dtype: torch.dtype) -> Case:
        """Return the case of a scheme and a type of inputs."""
        fmt, to, largest = scheme.fmt, scheme.scale, largest_value(dtype)
        scale = "power" if to.power_of_two else "plain" if to.fmt is None else "float"
        smallest = torch.finfo(torch.float32).smallest_normal
        if to.fmt is not None:
            smallest = 2.0 ** (to.fmt.min_exponent - to.fmt.mantissa_bits)
        kept_bits = fmt.mantissa_bits if fmt.is_float else fmt.bits
        reach = fmt.middle - fmt.qmin if scheme.signed_scales else (fmt.qmax - fmt.qmin) / 2
        return cls(
            mode=scheme.rounding.name,
            divides=scheme.divides,
            adds_first=scheme.float_zero_point,
            is_symmetric=scheme.symmetric or fmt.is_float,
            is_float=fmt.is_float,
            element=Float.of(fmt),
            qmin=float(fmt.qmin),
            qmax=float(fmt.qmax),
            saturates=dtype == torch.float16,
            scale="shared" if scheme.shares_exponents else scale,
            scale_float=Float.of(to.fmt),
            scale_mode=scheme.scale_mode,
            half_unit=1 << max(0, 22 - kept_bits),
            element_exponent=fmt.max_exponent,
            fraction_bits=fmt.fraction_bits,
            largest_exponent=largest_exponent(fmt, largest),
            reach=fmt.max_value if fmt.is_float else reach,
            epsilon=EPS,
            smallest_scale=smallest,
            largest_scale=largest_scale(scheme, largest),
            largest=largest,
            largest_float32=torch.finfo(torch.float32).max,
        )


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return ``x`` fake-quantized by a kernel; None if there is none for it.

    Args:
        x: Values, any shape.
        scale: Scale of the whole tensor; None computes scales from the ranges of the blocks.
        zero_point: Like ``scale``, or None.
        scheme: How the tensor is quantized.
        tensor_scale: Tensor scale of two-level scales, or None.
    """
    if scheme.symmetric and scheme.fmt.signed:
        zero_point = None
    given = (scale, zero_point, tensor_scale)
    shape = _kernel_shape(x, given, scheme)
    has = tuple(t is not None for t in given)
    if shape is None or not _is_right(scheme, x.dtype, x.device, has):
        return None
    return _launch(x.reshape(shape), given, scheme)[0].view(x.shape)


def quantize(
    x: torch.Tensor, scale: torch.Tensor | None, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return codes of a float type of torch and their scales; None if there is no kernel for it.

    Args:
        x: Values (rows, columns).
        scale: Scale of the whole tensor; None computes scales from the ranges of the blocks.
        scheme: How the tensor is quantized.
    """
    shape = _kernel_shape(x, (scale, None, None), scheme)
    is_simple = scheme.fmt.native is not None and not scheme.scale.two_level
    if shape is None or not is_simple:
        return None
    if not _is_right(scheme, x.dtype, x.device, (scale is not None, False, False), True):
        return None
    codes, scales = _launch(x.reshape(shape), (scale, None, None), scheme, True)
    return codes.view(x.shape), scales


def _kernel_shape(x: torch.Tensor, given: Numbers, scheme: Scheme) -> tuple[int, int] | None:
    """Return numbers of blocks and of their elements; None if the kernel does not take them."""
    scale, _, tensor_scale = given
    shape = block_rows(x, scheme, scale)
    if shape is None or not scheme.fmt.has_rule or scheme.scale.held_dtype != torch.float32:
        return None
    if scheme.symmetric or scheme.fmt.is_float:
        has_range = (scheme.fmt.signed or scheme.fmt.is_float) and not scheme.signed_scales
    else:
        has_range = not scheme.scales_by_powers  # the zero point of NaN differs between devices
    is_known = tensor_scale is not None or not scheme.scale.two_level
    is_dynamic = has_range and shape[1] <= _LONGEST and is_known
    return shape if scale is not None or is_dynamic else None


def _launch(
    x: torch.Tensor, given: Numbers, scheme: Scheme, gives_codes: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values or codes of ``x`` (blocks, elements), and the scales of codes."""
    rows, columns = x.shape
    k = min(_TILE, 1 << (columns - 1).bit_length())
    m, tiles = _TILE // k, -(-columns // k)
    parts, steps = (1, tiles) if given[0] is None else (tiles, 1)
    dtype = scheme.fmt.code_dtype if gives_codes else x.dtype
    # The interpreter, which runs on a CPU, does not round to the nearest narrow number.
    stored = torch.float32 if x.device.type == "cpu" else dtype
    y = torch.empty(x.shape, dtype=stored, device=x.device)
    scales = torch.empty(rows, device=x.device, dtype=torch.float32) if gives_codes else None
    options = {"CASE": Case.of(scheme, x.dtype), "BLOCK_M": m, "BLOCK_K": k}
    with launches_on(x.device):
        launch = triton_input_kernels.quantize[(-(-rows // m), parts)]
        numbers = [None if t is None else t.reshape(-1) for t in given]
        sizes = rows, steps, columns
        launch(x.contiguous(), y, scales, *sizes, *numbers, **options, enable_fp_fusion=False)
    used = given[0] if given[0] is not None else scales
    return y.to(dtype), y if used is None else used


@lru_cache(maxsize=256)
def _is_right(
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
    has: tuple[bool, ...],
    gives_codes: bool = False,
) -> bool:
    """Whether the kernel has the bits of the plain path for samples; a refusal is logged.

    The first answer is kept for this process.

    Args:
        scheme: How inputs are quantized.
        dtype: Type of the inputs.
        device: Their device.
        has: Whether scale, zero point and tensor scale are given.
        gives_codes: Whether codes and scales are compared, in place of values.
    """
    if not load_functions(triton_input_kernels):
        return False
    given = sample_numbers(scheme, has)
    scale, zero, other = (None if x is None else x.to(device) for x in given)
    numbers: Numbers = (scale, zero, other)
    problem = "its values for a sample differ from those of the plain path"
    try:
        samples = [x.to(device) for x in sample_inputs(dtype, is_one_block=has[0])]
        if all(_has_bits(x, numbers, scheme, gives_codes) for x in samples):
            return True
    except Exception as error:  # compilers and drivers fail in many ways
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    log_once(f"Inputs in {scheme.fmt.name} are not quantized by Triton: {problem}.")
    return False


def _has_bits(x: torch.Tensor, given: Numbers, scheme: Scheme, gives_codes: bool) -> bool:
    """Whether the kernel has the bits of the plain path for rows that are the blocks."""
    y, scales = _launch(x, given, scheme, gives_codes)
    if not gives_codes:
        return equal_bits(y, plain_values(x, scheme, *given))
    rows, scale = scheme_of_rows(scheme, given[0]), given[0]
    if scale is None:
        scale, _ = qdq.dynamic_qparams(x, rows)
    codes = qdq.quantize(x, scale, None, rows)
    return equal_bits(y.float(), codes.float()) and equal_bits(scales, scale.flatten())
