"""Products on an accelerator: one Triton kernel for all formats, for few rows and for many.

Triton comes with torch for GPUs of NVIDIA and AMD. Kernels are compiled when they are first used.
They are proved with every weight: its values bit for bit, and products in every type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from quark.torch.numerics.formats import Format
from quark.torch.quantization.nn.products import triton_kernels
from quark.torch.quantization.nn.products.arrangement import (
    Arrangement,
    Parts,
    count_runs,
    plane_widths,
)
from quark.torch.quantization.nn.products.method import Method, Use
from quark.torch.quantization.nn.products.panels import Panels
from quark.torch.quantization.nn.products.triton_functions import (
    launches_on,
    load_functions,
    log_once,
)
from quark.torch.quantization.nn.quantizer import QuantizedTensor

# Most rows -> tile of rows, outputs and columns of a run. One row is a sum of products.
_TILES = {1: (1, 32, 128), 16: (16, 64, 64), 32: (32, 64, 64), 1 << 62: (64, 64, 64)}
_DECODED = (32, 128)  # tile of outputs and columns that is decoded at once
_PROGRAMS = 4  # programs per processor below which sums over columns are divided
_PROVED_ROWS = (1, 3, 17, 33)  # each takes another tile
_PROVED_OUTPUTS = 256
# Type of inputs -> largest error of a product, in units of its largest output.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


class Codes(NamedTuple):
    """What kernels know of codes when they are compiled.

    Attributes:
        widths: Widths of the planes, lowest bits first.
        below: Number of bits below each plane.
        runs: Runs of columns in a row.
        bits: Width of a code.
        signed: Whether there are negative codes.
        exponent_bits: Exponent width of a float, 0 for integers.
        mantissa_bits: Mantissa width of a float.
        shares_groups: Whether the columns of each tile belong to one group.
    """

    widths: tuple[int, ...]
    below: tuple[int, ...]
    runs: int
    bits: int
    signed: bool
    exponent_bits: int
    mantissa_bits: int
    shares_groups: bool

    @classmethod
    def of(cls, fmt: Format, to: Arrangement, columns: int) -> Codes:
        """Return the constants of a weight, for tiles of ``columns`` columns of a run."""
        widths, runs = plane_widths(fmt), count_runs(fmt)
        below = tuple(sum(widths[:index]) for index in range(len(widths)))
        length = to.inputs // runs
        shares_groups = length % columns == 0 and to.group % columns == 0
        numbers = fmt.bits, fmt.signed, fmt.exponent_bits, fmt.mantissa_bits
        return cls(tuple(widths), below, runs, *numbers, shares_groups)


class Weight(NamedTuple):
    """Tensors and numbers of a weight, as kernels take them.

    Attributes:
        planes: Bytes of the codes, each (outputs, bytes of a row).
        scale: Scales (outputs, groups), for floats as ``panels`` has them.
        zeros: Zero points in the shape of ``scale``, or None.
        tensor_scale: Tensor scale [] of two-level scales, or None.
        zero: Zero point of all groups, or what is added to ``zeros``.
        outputs: Rows.
        length: Columns of a run.
        group: Columns that share a scale.
        groups: Groups of a row.
    """

    planes: tuple[torch.Tensor, ...]
    scale: torch.Tensor
    zeros: torch.Tensor | None
    tensor_scale: torch.Tensor | None
    zero: int
    outputs: int
    length: int
    group: int
    groups: int

    @classmethod
    def of(cls, panels: Panels, parts: Parts) -> Weight:
        """Return the tensors and numbers of a weight whose panels are rows."""
        to, fmt = panels.arrangement, panels.fmt
        planes = tuple(parts[f"plane_{width}"] for width in plane_widths(fmt))
        zeros, zero = parts.get("zero_point"), panels.zero_point
        if zeros is not None:
            zero = 0 if zeros.dtype == torch.int8 else panels.offset
        tensors = planes, parts["scale"], zeros, parts.get("tensor_scale")
        length = to.inputs // count_runs(fmt)
        return cls(*tensors, zero, to.outputs, length, to.group, to.inputs // to.group)


@dataclass(frozen=True)
class TritonMethod(Method):
    """A kernel that decodes codes in registers and multiplies them.

    Attributes:
        panels: Order and format of the codes.
        dtype: Type of inputs for which the kernel is proved; others multiply decoded values.
    """

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Name of the product; see ``describe_runtime``."""
        return "triton"

    def multiply_rows(self, parts: Parts, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (rows, inputs) and the codes, (rows, outputs)."""
        to, rows = self.panels.arrangement, len(x)
        if not rows or x.dtype != self.dtype:
            return x @ self.decode(parts).to(x.dtype).T
        m, n, k = next(tile for most, tile in _TILES.items() if rows <= most)
        weight, codes = Weight.of(self.panels, parts), Codes.of(self.panels.fmt, to, k)
        grid, tiles = (_ceil(to.outputs, n), _ceil(rows, m)), _ceil(weight.length, k)
        divisions = max(1, _PROGRAMS * _processors(x.device) // (grid[0] * grid[1]))
        steps = _ceil(tiles, min(tiles, divisions))
        divisions = _ceil(tiles, steps)
        # Products in bfloat16 are wrong in Triton's interpreter, which is what runs on a CPU.
        dtype = torch.float32 if x.device.type == "cpu" else x.dtype
        stored = dtype if divisions == 1 and "unit" not in parts else torch.float32
        y = torch.empty(divisions, rows, to.outputs, dtype=stored, device=x.device)
        multiplied = getattr(vars(triton_kernels)["tl"], str(dtype).removeprefix("torch."))
        constants = {"CODES": codes, "MULTIPLIED": multiplied}
        tile = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
        with launches_on(x.device):
            launch = triton_kernels.multiply[(*grid, divisions)]
            launch(x.contiguous(), y, rows, steps, weight, **constants, **tile)
        return y[0] if divisions == 1 else y.sum(0)

    def decode(self, parts: Parts) -> torch.Tensor:
        """Return the values of the codes in float32, (outputs, inputs), in their order."""
        to, (n, k) = self.panels.arrangement, _DECODED
        weight, codes = Weight.of(self.panels, parts), Codes.of(self.panels.fmt, to, k)
        device = weight.scale.device
        values = torch.empty(to.outputs, to.inputs, dtype=torch.float32, device=device)
        with launches_on(device):
            grid = (_ceil(to.outputs, n), _ceil(weight.length, k), codes.runs)
            triton_kernels.dequantize[grid](values, weight, CODES=codes, BLOCK_N=n, BLOCK_K=k)
        return values

    def codes(self, parts: Parts) -> torch.Tensor:
        """Return the codes of the weight, (outputs, inputs), in their order."""
        return self.panels.codes(parts)


def triton_methods(
    state: QuantizedTensor, group: int, use: Use
) -> Iterator[tuple[TritonMethod, Parts]]:
    """Iterate over the Triton method for a weight and its tensors, if it computes right.

    Args:
        state: Codes (outputs, inputs) and scales.
        group: Number of inputs that share a scale.
        use: How the layer uses its product.
    """
    fmt, codes, dtype = state.scheme.fmt, state.codes, use.dtype
    assert codes is not None
    outputs, inputs = codes.shape
    if (
        not fmt.has_rule
        or not load_functions(triton_kernels)
        or inputs % count_runs(fmt)
        or dtype not in _TOLERANCES
    ):
        return
    panels, parts = Panels.pack(state, Arrangement.of_single_rows(outputs, inputs, group))
    method = TritonMethod(panels, dtype)
    try:
        problem = _problem(method, parts)
    except Exception as error:  # compilers and drivers fail in many ways
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    if problem:
        log_once(f"Products of {fmt.name} are not computed by Triton: {problem}.")
    else:
        yield method, parts


def _problem(method: TritonMethod, parts: Parts) -> str:
    """Return what is wrong with products of a weight, "" if nothing is."""
    values, dtype = method.decode(parts), method.dtype
    columns = slice(None, None, max(1, len(values) // _PROVED_OUTPUTS))
    random = torch.Generator().manual_seed(0)
    x = torch.randn(
        max(_PROVED_ROWS), values.shape[1], generator=random, dtype=torch.float32, device="cpu"
    )
    x = x.to(values.device, dtype)
    expected = x.double() @ values[columns].to(dtype).double().T
    largest = expected.abs().max().clamp(min=torch.finfo(dtype).tiny)
    for rows in _PROVED_ROWS:
        y = method.multiply_rows(parts, x[:rows])[:, columns].double()
        error = ((y - expected[:rows]).abs().max() / largest).item()
        if not error <= _TOLERANCES[dtype]:
            return f"the error of a product of {rows} rows is {error:.2g}"
    return ""


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    """Return the number of processors of a device."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _ceil(count: int, size: int) -> int:
    """Return how many pieces of a size cover a count."""
    return -(-count // size)
