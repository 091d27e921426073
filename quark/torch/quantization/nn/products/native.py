"""Products of packed weights by kernels that numba compiles; see ``native_kernels``.

Numba is optional; see ``numerics.native``. A few rows are multiplied by values that never leave the
first cache. For more rows, the values of several panels are written to one buffer, in the type that
this CPU multiplies fastest, and multiplied by one product of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quark.torch.numerics.formats import Format
from quark.torch.numerics.native.compilation import array, can_run, has_feature, run_rows
from quark.torch.numerics.native.vectors import FEATURE, LANES
from quark.torch.quantization.nn.products import native_kernels, native_vectors
from quark.torch.quantization.nn.products.arrangement import PLANES, Parts, plane_widths
from quark.torch.quantization.nn.products.fast_type import multiplied_type
from quark.torch.quantization.nn.products.panels import BUFFERS, HALF_BITS, HALF_EXPONENT, Panels

logger = logging.getLogger(__name__)

FEW_ROWS = 4  # rows up to which it is faster to multiply values in the first cache
TOLERANCE = 1e-5  # of the largest output: what another order of sums gives
_CHUNK = 1 << 20  # elements of the panels that are decoded together
_MOST_PLANES = len(PLANES) - 1  # a plane of 8 bits is alone


def multiply(panels: Panels, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    """Return the product of ``x`` (rows, inputs) and a weight, (rows, padded outputs).

    Args:
        panels: Order and format of the codes.
        parts: Tensors of the weight.
        x: Inputs; a product of more rows than ``FEW_ROWS`` is in ``multiplied_type`` of their type.
    """
    if 0 < len(x) <= FEW_ROWS:
        return _multiply_few(panels, parts, x)
    dtype, to = multiplied_type(x.dtype), panels.arrangement
    x = x.to(dtype)
    y = torch.empty(len(x), to.panels * to.rows, dtype=dtype, device="cpu")
    for chunk, values in decode(panels, parts, dtype):
        outputs = slice(chunk.start * to.rows, chunk.stop * to.rows)
        torch.mm(x, values.flatten(0, 1).T, out=y[:, outputs])
    return y


def _multiply_few(panels: Panels, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    to, count = panels.arrangement, len(x)
    has_vectors = _has_vectors(panels)
    if has_vectors and count > 1:
        x = F.pad(x, (0, 0, 0, FEW_ROWS - count))
    y = torch.empty(to.panels, to.rows, len(x), dtype=torch.float32, device="cpu")
    inputs = x.to(torch.float32).contiguous()
    tensors, constants = [*_tensors(panels, parts), y], _constants(panels, parts)
    if has_vectors:
        narrowest = min(plane_widths(panels.fmt))
        run_rows(native_vectors.multiply_rows, tensors, array(inputs), *constants, narrowest)
    else:
        run_rows(native_kernels.multiply_rows, tensors, array(inputs), *constants)
    return y[..., :count].flatten(0, 1).T


def _has_vectors(panels: Panels) -> bool:
    """Whether scales are shared by whole vectors, which this machine has."""
    is_whole = panels.arrangement.group % LANES == 0
    return is_whole and has_feature(FEATURE)


def decode(
    panels: Panels, parts: Parts, dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Iterate over the values of several panels at a time; the next ones overwrite them.

    Args:
        panels: Order and format of the codes.
        parts: Tensors of the weight.
        dtype: float32, or bfloat16 to which values are rounded.

    Yields:
        Which panels, and their values, (panels, rows, inputs).
    """
    to = panels.arrangement
    constants = _constants(panels, parts)
    kernels = native_vectors if _has_vectors(panels) else native_kernels
    step = max(1, _CHUNK // to.size)
    kept = BUFFERS.take(f"native {dtype}", min(step, to.panels) * to.size, dtype)
    for start in range(0, to.panels, step):
        chunk = slice(start, min(start + step, to.panels))
        count = chunk.stop - chunk.start
        values = kept[: count * to.size].view(count, to.rows, to.inputs)
        tensors = [None if t is None else t[chunk] for t in _tensors(panels, parts)]
        run_rows(kernels.decode_rows, [*tensors, values], *constants)
        yield chunk, values


def _tensors(panels: Panels, parts: Parts) -> list[torch.Tensor | None]:
    """Return the planes, scales and zero points of a weight as kernels take them."""
    to = panels.arrangement
    planes = [parts[f"plane_{w}"].view(to.panels, -1, to.inputs) for w in plane_widths(panels.fmt)]
    absent = [None] * (_MOST_PLANES - len(planes))
    factors = [parts["scale"], parts.get("zero_point")]
    return [
        *planes,
        *absent,
        *(None if f is None else f.view(to.panels, to.rows, -1) for f in factors),
    ]


def _constants(panels: Panels, parts: Parts) -> tuple[Any, Any]:
    """Return the constants of a format that kernels take, and numbers that its scales share."""
    fmt = panels.fmt
    flip = 128 if fmt.signed and fmt.bits == 8 and not fmt.is_float else 0
    unit = float(parts["tensor_scale"]) if "tensor_scale" in parts else 1.0
    stored = parts.get("zero_point")
    zero = panels.zero_point if stored is None else panels.offset * (stored.dtype != torch.int8)
    numbers = np.array([unit, zero + flip], dtype=np.float32)
    top = HALF_BITS - fmt.bits - (not fmt.signed)  # places by which the sign moves to the top
    down = HALF_EXPONENT - fmt.exponent_bits
    if not _has_vectors(panels):
        form = np.array([flip, *((top, down) if fmt.is_float else (0, 0))], dtype=np.int64)
        return form, numbers
    constant = 0 if fmt.is_float or stored is not None else zero + flip
    if fmt.bits <= 4:
        return _value_table(panels.fmt, top, down) - np.float32(constant), numbers
    if fmt.is_float:
        return np.array([top, down, (0x7FFF >> down) - 0x8000], dtype=np.int16), numbers
    return np.array([flip, constant, 0], dtype=np.int32), numbers


def _value_table(fmt: Format, top: int, down: int) -> Any:
    """Return what scales multiply for each of 16 stored codes, float32."""
    codes = np.arange(LANES) % (1 << fmt.bits)
    if not fmt.is_float:
        return codes.astype(np.float32)
    halves = ((codes << top).astype(np.int16) >> down) & np.int16((0x7FFF >> down) - 0x8000)
    return halves.view(np.float16).astype(np.float32)


def serves(panels: Panels, parts: Parts) -> bool:
    """Whether kernels take a weight on this machine: its rows are whole, and it is large enough."""
    return not panels.arrangement.half and can_run(parts[f"plane_{plane_widths(panels.fmt)[0]}"])


def is_right(panels: Panels, parts: Parts, values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels give the values of a weight bit for bit, and its products with few rows.

    A refusal is logged once for each format.

    Args:
        panels: Order and format of the codes.
        parts: Tensors of the weight.
        values: Its values, float32 (outputs, inputs) in the order of the codes.
        dtype: Type of the inputs of the layer.
    """
    problem = ""
    try:
        for kind in {torch.float32, multiplied_type(dtype)}:
            decoded = torch.cat([v.flatten(0, 1).clone() for _, v in decode(panels, parts, kind)])
            if not torch.equal(decoded[: len(values)], values.to(kind)):
                problem = f"its values in {kind} differ from those of torch"
        random = torch.Generator().manual_seed(0)
        x = torch.randn(FEW_ROWS, values.shape[1], generator=random)
        for rows in (1, FEW_ROWS):
            y = _multiply_few(panels, parts, x[:rows])[:, : len(values)]
            expected = x[:rows] @ values.T
            if not (y - expected).abs().max() <= TOLERANCE * expected.abs().max():
                problem = f"its product with {rows} rows differs from that of torch"
    except Exception as error:  # numba and LLVM have no common error; torch serves instead
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    if problem:
        _log_refusal(panels.fmt.name, problem)
    return not problem


@cache
def _log_refusal(name: str, problem: str) -> None:
    logger.warning("Products of %s are not computed by kernels of numba: %s.", name, problem)
