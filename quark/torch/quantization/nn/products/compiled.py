"""Products that Inductor compiles for a format: codes are decoded in registers.

A plain decoding of panels makes fifteen passes over the elements. Here one expression says what a
code is worth, and Inductor makes two functions of it: one multiplies a row of inputs, one writes
the values of panels. It compiles each once for a format, for all shapes, and keeps the results on
disk. This needs a C++ compiler; a function that is missing or computes a sample wrong is not used.

All operations on codes are on int32, which Inductor turns into vector instructions. Example of a
float, fp4 (1 sign, 2 exponent, 1 mantissa), in units of the smallest value, 0.5::

    code 1 10 1 = -3.0     magnitude 101, exponent - 1 = 1, (1 . 1) << 1 = 6     -6 units
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

from quark.torch.numerics.formats import Format
from quark.torch.quantization.nn.products.arrangement import (
    Arrangement,
    Parts,
    count_runs,
    pack_planes,
    plane_widths,
)
from quark.torch.quantization.nn.products.panels import BUFFERS, Panels

logger = logging.getLogger(__name__)

FEW_ROWS = 2  # rows up to which it is faster to decode the codes for each row
TOLERANCE = 1e-5  # of the largest output: what another order of sums gives
_CHUNK = 1 << 21  # elements of the panels that are decoded together
_SHIFTS = 16  # exponents that a shift of an int32 covers

Runs = list[torch.Tensor]


class Operands(NamedTuple):
    """Tensors of a weight as the compiled functions take them.

    A panel has as many runs of rows as the narrowest plane has slots.

    Attributes:
        planes: Planes, lowest bits first, (panels, runs of a slot, rows, groups, group).
        scale: Factors of the decoded codes, (panels, runs, rows, groups, 1).
        zero: Zero points in the shape of ``scale`` or [], None if there are none.
    """

    planes: list[torch.Tensor]
    scale: torch.Tensor
    zero: torch.Tensor | None

    @classmethod
    def of(cls, panels: Panels, parts: Parts) -> Operands:
        """Return the tensors of a weight in panels of rows."""
        to, fmt = panels.arrangement, panels.fmt
        runs = count_runs(fmt)
        shape = (to.rows // runs, to.inputs // to.group)
        planes = []
        for width in plane_widths(fmt):
            plane = parts[f"plane_{width}"].view(to.panels, -1, *shape, to.group)
            planes.append(plane.view(torch.int8) if fmt.signed and fmt.bits == 8 else plane)
        zero: torch.Tensor | None = None
        if "zero_point" in parts or panels.zero_point:
            zero = torch.as_tensor(panels.zero_points(parts), dtype=torch.float32)
            zero = zero.view(to.panels, runs, *shape, 1) if zero.dim() else zero
        # Scales of panels are those of float16 numbers, see ``panels``; here codes are in units.
        unit = 2.0 ** (-14 - fmt.mantissa_bits) if fmt.is_float else 1.0
        scale = panels.scale(parts) * unit
        return cls(planes, scale.view(to.panels, runs, *shape, 1), zero)

    def slice(self, panels: slice) -> Operands:
        """Return the tensors of some panels."""
        zero = self.zero[panels] if self.zero is not None and self.zero.dim() else self.zero
        return Operands([p[panels] for p in self.planes], self.scale[panels], zero)


class Compiled(NamedTuple):
    """The compiled functions of a format.

    Attributes:
        row: (operands, x (groups, group)) to the outputs, (panels, runs, rows).
        panels: Writes the values of each run to a tensor, (panels, rows, groups, group).
    """

    row: Callable[..., torch.Tensor]
    panels: Callable[..., torch.Tensor]

    def multiply(self, panels: Panels, parts: Parts, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (rows, inputs) and a weight, float32 (rows, outputs)."""
        to = panels.arrangement
        with one_state():
            operands = Operands.of(panels, parts)
            rows = x.to(torch.float32, copy=True).view(len(x), -1, to.group)
            return torch.stack([self.row(operands, row).flatten() for row in rows])

    def decode(self, panels: Panels, parts: Parts) -> Iterator[tuple[slice, torch.Tensor]]:
        """Iterate over the values of several panels at a time; the next ones overwrite them.

        Yields:
            Which panels, and their values, float32 (runs, panels, rows, inputs).
        """
        to, runs = panels.arrangement, count_runs(panels.fmt)
        with one_state():
            operands = Operands.of(panels, parts)
        shape = operands.scale.shape[2:-1]
        for chunk in _chunks(to):
            count = chunk.stop - chunk.start
            with one_state():
                values = BUFFERS.take("values", count * to.size, torch.float32)
                self.panels(operands.slice(chunk), list(values.view(runs, count, *shape, to.group)))
            yield chunk, values.view(runs, count, -1, to.inputs)

    def values(self, panels: Panels, parts: Parts) -> torch.Tensor:
        """Return the values of a weight, float32 (outputs, inputs)."""
        to = panels.arrangement
        values = torch.empty(to.panels, to.size, dtype=torch.float32, device="cpu")
        for chunk, decoded in self.decode(panels, parts):
            values[chunk] = decoded.transpose(0, 1).flatten(1)
        return to.restore(values)


@contextmanager
def one_state() -> Iterator[None]:
    """Compute in the same modes whatever the caller's are: torch compiles anew for others."""
    is_off = torch.autocast("cpu", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), is_off:
        yield


def _chunks(to: Arrangement) -> Iterator[slice]:
    """Iterate over slices of the panels, of two or more: torch compiles anew for one."""
    step = max(2, _CHUNK // to.size)
    start = 0
    while start < to.panels:
        stop = start + step
        stop = to.panels if to.panels - stop < 2 else stop
        yield slice(start, stop)
        start = stop


def compiled(panels: Panels, parts: Parts) -> Compiled | None:
    """Return the functions for a weight in panels; None if there are none on this machine."""
    to = panels.arrangement
    if to.half or to.panels == 1 or not panels.fmt.has_rule:
        return None
    zeros = "one" if panels.zero_point else "none"
    zeros = "many" if "zero_point" in parts else zeros
    return _functions(panels.fmt, to.group == to.inputs, zeros)


def is_right(product: Compiled, panels: Panels, parts: Parts, values: torch.Tensor) -> bool:
    """Whether the functions give the values of a weight, and the product with a row.

    Args:
        product: The functions.
        panels: Order and format of the codes.
        parts: Tensors of the weight.
        values: Its values, float32 (outputs, inputs) in the order of the codes.
    """
    if not values.isfinite().all() or not torch.equal(product.values(panels, parts), values):
        return False
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, values.shape[1], generator=random, dtype=torch.float32, device="cpu")
    y, expected = product.multiply(panels, parts, x)[:, : len(values)], x @ values.T
    return bool((y - expected).abs().max() <= TOLERANCE * expected.abs().max())


@lru_cache(maxsize=64)
def _functions(fmt: Format, has_row_scales: bool, zeros: str) -> Compiled | None:
    """Compile the functions of a format and prove them with a sample.

    The first answer is kept for this process; a refusal is logged.

    Args:
        fmt: Format of the codes.
        has_row_scales: Whether a whole row shares a scale.
        zeros: ``none``, ``one`` zero point, or ``many``.

    Returns:
        The functions, or None if they cannot be compiled or compute the sample wrong.
    """
    problem = "the result of a sample is wrong"
    try:
        product = _make(fmt)
        panels, parts = _sample(fmt, has_row_scales, zeros)
        if is_right(product, panels, parts, _plain_values(panels, parts)):
            return product
    except Exception as error:  # compilers, caches and code generators fail in many ways
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    logger.warning("Products of %s are not compiled on this machine: %s.", fmt.name, problem)
    return None


def _make(fmt: Format) -> Compiled:
    """Return the functions of a format, not yet compiled."""
    widths, runs = plane_widths(fmt), count_runs(fmt)

    def codes(of: Operands, run: int) -> torch.Tensor:
        """Return a run of decoded codes less zero points, (panels, rows, groups, group)."""
        bits, below = None, 0
        for index, width in enumerate(widths):
            blocks = runs * width // 8  # runs of a slot
            part = of.planes[index][:, run % blocks].to(torch.int32)
            if width < 8:
                part = (part >> (width * (run // blocks))) & ((1 << width) - 1)
            bits = part if bits is None else bits | (part << below)
            below += width
        assert bits is not None
        decoded = _float_units(bits, fmt) if fmt.is_float else bits.float()
        if of.zero is None:
            return decoded
        return decoded - (of.zero[:, run] if of.zero.dim() else of.zero)

    def row(of: Operands, x: torch.Tensor) -> torch.Tensor:
        results = []
        for run in range(runs):
            scale = of.scale[:, run]
            if of.scale.shape[3] == 1:  # one scale per output
                results.append((codes(of, run) * x).sum((-1, -2)) * scale[..., 0, 0])
            else:
                results.append((codes(of, run) * scale * x).sum((-1, -2)))
        return torch.stack(results, 1)

    def all_panels(of: Operands, out: Runs) -> None:
        for run, values in enumerate(out):
            values.copy_(codes(of, run) * of.scale[:, run])

    return Compiled(compile_function(row), compile_function(all_panels))


def _float_units(bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the floats of codes, int32, in units of the smallest positive value, float32."""
    mantissa = fmt.mantissa_bits
    magnitude = bits & ((1 << (fmt.exponent_bits + mantissa)) - 1)
    shift = torch.clamp_min((magnitude - (1 << mantissa)) >> mantissa, 0)  # exponent - 1
    units = magnitude - (shift << mantissa)  # mantissa, with the bit that normal numbers imply
    if fmt.signed:
        sign = (bits << (32 - fmt.bits)) >> 31  # 0 or -1
    if fmt.exponent_bits <= 4:
        units = units << shift
        return ((units ^ sign) - sign).float() if fmt.signed else units.float()
    high = (shift // _SHIFTS) * ((1 << _SHIFTS) - 1) + 1  # 1 or 2^16
    units = units << (shift % _SHIFTS)
    return ((units ^ sign) - sign if fmt.signed else units).float() * high.float()


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for all shapes.

    Torch compiles again for other settings of the process, such as its number of threads, and
    refuses after eight of them. From then on Python computes the same, slowly.

    Args:
        function: A function of tensors. It gets a copy of its code: torch counts by code.
    """
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace()
    compiled = torch.compile(function, dynamic=True, fullgraph=True)
    results = 0

    def call(*args: Any) -> Any:
        nonlocal results
        try:
            result = compiled(*args)
        except Exception as error:
            if not results:
                raise
            _log_refusal(str(error).strip().split("\n")[0])
            return function(*args)
        results = 1
        return result

    return call


@lru_cache(maxsize=16)
def _log_refusal(reason: str) -> None:
    logger.warning("A compiled product is computed by Python now, which is slow: %s", reason)


def _sample(fmt: Format, has_row_scales: bool, zeros: str) -> tuple[Panels, Parts]:
    """Return a weight with all finite codes of a format.

    No two of its axes have the same length: torch would take them for equal in all weights.
    """
    group, groups = (176, 1) if has_row_scales else (48, 13)
    to = Arrangement(3 * 88, group * groups, group, 88)
    random = torch.Generator().manual_seed(0)
    count = to.outputs * to.inputs
    bits = torch.arange(count, dtype=torch.int32, device="cpu").remainder(1 << fmt.bits)
    bits = (
        bits[torch.randperm(count, generator=random, device="cpu")]
        .view(to.outputs, to.inputs)
        .byte()
    )
    factors = (
        torch.rand(to.outputs, groups, generator=random, dtype=torch.float32, device="cpu") + 0.5
    )
    panels = Panels(fmt, to, 0, 5 if zeros == "one" else 0)
    parts = {"scale": to.arrange_factors(factors.bfloat16())}
    if zeros == "many":
        points = torch.randint(0, 8, (to.outputs, groups), generator=random, device="cpu")
        dtype = torch.int8 if fmt.bits < 8 else torch.bfloat16
        parts["zero_point"] = to.arrange_factors(points.to(dtype))
    plain = _plain_values(panels, parts | pack_planes(to.arrange(bits), fmt))
    parts |= pack_planes(to.arrange(torch.where(plain.isfinite(), bits, 0)), fmt)
    return panels, parts


def _plain_values(panels: Panels, parts: Parts) -> torch.Tensor:
    values = torch.stack([panel.clone() for panel in panels.decode(parts)])
    return panels.arrangement.restore(values)
