"""Products of packed weights by kernels that numba compiles; see ``native_kernels``.

Numba is optional; see ``numerics.native``. A few rows are multiplied by values that never leave the
first cache: with AVX2 alone, by words of codes (``native_words``). With AVX2 alone, strips of more
rows are multiplied faster than torch multiplies float32. Elsewhere, the values of several panels
are written to one buffer, in the type that this CPU multiplies fastest, and multiplied by one
product of torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from quark.torch.numerics.formats import Format
from quark.torch.numerics.native.compilation import (
    array,
    can_run,
    has_feature,
    run_arrays,
    run_rows,
)
from quark.torch.numerics.native.vectors import FEATURE, WIDE
from quark.torch.quantization.nn.products import (
    native_columns,
    native_kernels,
    native_tiles,
    native_vectors,
    native_words,
)
from quark.torch.quantization.nn.products.arrangement import (
    PLANES,
    Arrangement,
    Parts,
    plane_widths,
)
from quark.torch.quantization.nn.products.fast_type import multiplied_type
from quark.torch.quantization.nn.products.native_constants import (
    constants_of,
    has_vectors,
    is_int8,
    word_constants,
    word_table,
)
from quark.torch.quantization.nn.products.native_tiles import TILE
from quark.torch.quantization.nn.products.panels import BUFFERS, Panels
from quark.torch.quantization.nn.products.row_instructions import STRIP
from quark.torch.quantization.nn.products.tiles import take_tiles

logger = logging.getLogger(__name__)

FEW_ROWS = 4  # rows up to which it is faster to multiply values in the first cache
WORD_ROWS = 12  # likewise for words, four rows at a time (AMD Zen 3)
MOST_TOKENS = 512  # that are multiplied together: their strips stay in a cache (AMD Zen 3)
TOLERANCE = 1e-5  # of the largest output: what another order of sums gives
# Type of the values -> elements of the panels that are decoded together. Torch multiplies fewer of
# them slower; values in float32 that fit a cache better are multiplied faster (AMD Zen 4, Zen 3).
_CHUNKS = {torch.bfloat16: 1 << 23, torch.float32: 1 << 20}
_MOST_PLANES = len(PLANES) - 1  # a plane of 8 bits is alone


class NativeProduct:
    """The product of a packed weight and inputs; what kernels take of the weight is made once.

    Args:
        panels: Order and format of the codes.
        parts: Tensors of the weight.
    """

    def __init__(self, panels: Panels, parts: Parts) -> None:
        self.panels, self.parts, to = panels, parts, panels.arrangement
        takes_few = not to.half
        is_by_words, self._has_vectors = takes_words(panels.fmt, to), has_vectors(panels)
        self._few_rows = WORD_ROWS if is_by_words else FEW_ROWS if takes_few else 0
        if takes_few:
            self._kernel, tensors, self._constants = _few_operands(panels, parts)
            self._arrays = [None if t is None else array(t) for t in tensors]
        self.takes_strips = takes_strips(panels)
        if self.takes_strips:
            numbers = torch.arange(to.panels, device="cpu")
            rows = [None if t is None else array(t) for t in (*_tensors(panels, parts), numbers)]
            self._rows, self._forms = rows, constants_of(panels, parts)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (rows, inputs) and the weight, (rows, padded outputs).

        That of more rows than ``WORD_ROWS`` or ``FEW_ROWS`` is in ``multiplied_type`` of their
        type, others are in float32.
        """
        if not 0 < len(x) <= self._few_rows:
            if self.takes_strips and multiplied_type(x.dtype) == torch.float32:
                return self.multiply_strips(x)
            return _multiply_many(self.panels, self.parts, x)
        x = x.to(torch.float32).contiguous()
        if len(x) <= FEW_ROWS:
            return self.multiply_four(x)
        return torch.cat([self.multiply_four(rows) for rows in torch.split(x, FEW_ROWS)])

    def multiply_four(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of up to ``FEW_ROWS`` rows, float32 (rows, padded outputs)."""
        to, count = self.panels.arrangement, len(x)
        if self._has_vectors and 1 < count < FEW_ROWS:
            x = F.pad(x, (0, 0, 0, FEW_ROWS - count))
        y = torch.empty(to.panels, to.rows, len(x), dtype=torch.float32, device="cpu")
        run_arrays(self._kernel, [*self._arrays, array(y)], array(x), *self._constants)
        return y.view(1, -1) if count == 1 else y[..., :count].flatten(0, 1).T

    def multiply_strips(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of any number of rows, float32 (rows, padded outputs)."""
        to = self.panels.arrangement
        y = torch.empty(len(x), to.panels * to.rows, dtype=torch.float32, device="cpu")
        x = x if x.dtype.itemsize == 2 else x.to(torch.float32)
        pieces = (torch.split(rows, MOST_TOKENS) for rows in (x, y))
        for tokens, out in zip(*pieces, strict=True):
            count = -(-len(tokens) // STRIP)
            kept = BUFFERS.take("strips", count * to.inputs * STRIP, torch.float32)
            strips, numbers = kept.view(count, to.inputs, STRIP), torch.arange(count, device="cpu")
            run_rows(native_vectors.write_strips, [strips, numbers], array(tokens.contiguous()))
            constants = (to.rows, array(strips), array(out), *self._forms)
            run_arrays(native_vectors.multiply_strips, self._rows, *constants)
        return y


def _few_operands(
    panels: Panels, parts: Parts
) -> tuple[Callable[..., None], list[torch.Tensor | None], tuple[Any, ...]]:
    """Return the kernel for a few rows of inputs, and the tensors and constants that it takes."""
    tensors = _tensors(panels, parts)
    if takes_words(panels.fmt, panels.arrangement):
        first = tensors[0]
        if first is not None and is_int8(panels.fmt):
            tensors[0] = first.view(torch.int8)
        return native_words.multiply_rows, tensors, word_constants(panels, parts)
    constants = constants_of(panels, parts)
    if has_vectors(panels):
        narrowest = min(plane_widths(panels.fmt))
        return native_vectors.multiply_rows, tensors, (*constants, narrowest)
    return native_kernels.multiply_rows, tensors, constants


def _multiply_many(panels: Panels, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    """Return the product of any number of rows and the values of panels."""
    dtype, to = multiplied_type(x.dtype), panels.arrangement
    x = x.to(dtype)
    if dtype == torch.bfloat16 and to.half:
        product = _multiply_tiles(panels, parts, x.contiguous())
        if product is not None:
            return product
    y = torch.empty(len(x), to.panels * to.rows, dtype=dtype, device="cpu")
    for chunk, values in decode(panels, parts, dtype):
        outputs = slice(chunk.start * to.rows, chunk.stop * to.rows)
        torch.mm(x, values.flatten(0, 1).T, out=y[:, outputs])
    return y


def _multiply_tiles(panels: Panels, parts: Parts, x: torch.Tensor) -> torch.Tensor | None:
    """Return the product of rows of bfloat16 by tiles, None where torch does not multiply them."""
    to, table = panels.arrangement, constants_of(panels, parts)[0]
    rows, whole = to.panels * to.rows, math.lcm(TILE, to.rows)
    count = -(-rows * to.inputs // _CHUNKS[torch.bfloat16])
    step = -(-rows // count // whole) * whole
    pieces = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    first, last = (take_tiles(pieces[i].stop - pieces[i].start, to.inputs) for i in (0, -1))
    if first is None or last is None:
        return None
    products = []
    for piece in pieces:
        tiles = last if piece is pieces[-1] else first
        chunk = slice(piece.start // to.rows, piece.stop // to.rows)
        run_rows(native_tiles.write_columns, _columns(panels, parts, chunk), table, tiles.pairs)
        products.append(tiles.multiply(x))
    return torch.cat(products, 1) if len(products) > 1 else products[0]


def takes_words(fmt: Format, to: Arrangement) -> bool:
    """Whether words of codes are multiplied on this machine, and those of a weight fit.

    With AVX-512, kernels of torch and of ``native_vectors`` multiply.
    """
    is_integer = not fmt.is_float and fmt.bits <= PLANES[0]
    is_known = is_integer or (fmt.bits <= 4 and word_table(fmt) is not None)
    is_whole = to.inputs % native_words.CHUNK == 0 and not to.half
    fits = to.group % native_words.CHUNK == 0 or to.group == native_words.HALF
    return is_known and is_whole and fits and has_feature(FEATURE) and not has_feature(WIDE)


def takes_strips(panels: Panels) -> bool:
    """Whether many rows of float32 are multiplied in strips on this machine.

    With AVX-512, torch multiplies.
    """
    return has_vectors(panels) and not panels.arrangement.half and not has_feature(WIDE)


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
    constants = constants_of(panels, parts)
    kernels = native_vectors if has_vectors(panels) else native_kernels
    step = max(1, _CHUNKS[dtype] // to.size)
    step = -(-to.panels // -(-to.panels // step))  # equal parts: the last is not short
    kept = BUFFERS.take(f"native {dtype}", min(step, to.panels) * to.size, dtype)
    for start in range(0, to.panels, step):
        chunk = slice(start, min(start + step, to.panels))
        count = chunk.stop - chunk.start
        if to.half:
            yield chunk, _decode_columns(panels, parts, chunk, kept[: count * to.size])
            continue
        values = kept[: count * to.size].view(count, to.rows, to.inputs)
        tensors = [None if t is None else t[chunk] for t in _tensors(panels, parts)]
        run_rows(kernels.decode_rows, [*tensors, values], *constants)
        yield chunk, values


def _decode_columns(panels: Panels, parts: Parts, chunk: slice, kept: torch.Tensor) -> torch.Tensor:
    """Return the values of several panels with halves of rows, (panels, rows, inputs).

    Args:
        panels: Order and format of the codes.
        parts: Tensors of the weight.
        chunk: Which panels.
        kept: Memory of the values.
    """
    to, count = panels.arrangement, chunk.stop - chunk.start
    values = kept.view(to.inputs, count * to.rows)
    table = constants_of(panels, parts)[0]
    tensors = _columns(panels, parts, chunk)
    run_rows(native_columns.decode_columns, tensors, table, array(values))
    return values.view(to.inputs, count, to.rows).permute(1, 2, 0)


def _columns(panels: Panels, parts: Parts, chunk: slice) -> list[torch.Tensor | None]:
    """Return panels with halves as kernels take them: plane, scales, zero points, numbers."""
    to, zeros = panels.arrangement, panels.zero_points(parts)
    shape = (-1, 2, to.inputs // to.group, to.half)
    return [
        parts["plane_4"].view(to.panels, to.inputs, to.half)[chunk],
        panels.scale(parts).view(shape)[chunk].contiguous(),
        zeros.view(shape)[chunk].contiguous() if isinstance(zeros, torch.Tensor) else None,
        torch.arange(chunk.stop - chunk.start, device="cpu"),
    ]


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


def serves(panels: Panels, parts: Parts) -> bool:
    """Whether kernels take a weight on this machine, and it is large enough."""
    fmt = panels.fmt
    needs_vectors = panels.arrangement.half or not fmt.has_rule or fmt.bits > PLANES[0]
    is_known = not needs_vectors or has_vectors(panels)
    return is_known and can_run(parts[f"plane_{plane_widths(panels.fmt)[0]}"])


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
            if not all(_has_values(panels, *part, values) for part in decode(panels, parts, kind)):
                problem = f"its values in {kind} differ from those of torch"
        random = torch.Generator().manual_seed(0)
        x = torch.randn(
            STRIP + 1, values.shape[1], generator=random, dtype=torch.float32, device="cpu"
        )
        product = NativeProduct(panels, parts)
        ways = (
            {} if panels.arrangement.half else dict.fromkeys((1, FEW_ROWS), product.multiply_four)
        )
        ways |= {len(x): product.multiply_strips} if product.takes_strips else {}
        products = x[: max(ways)] @ values.T if ways else x
        for rows, multiply in ways.items():
            y, expected = multiply(x[:rows])[:, : len(values)], products[:rows]
            if not (y - expected).abs().max() <= TOLERANCE * expected.abs().max():
                problem = f"its product with {rows} rows differs from that of torch"
    except Exception as error:  # numba and LLVM have no common error; torch serves instead
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    if problem:
        _log_refusal(panels.fmt.name, problem)
    return not problem


def _has_values(panels: Panels, chunk: slice, decoded: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether decoded panels are rows of a weight, see ``decode``; rows of padding may be any."""
    rows = panels.arrangement.rows
    own = values[chunk.start * rows : chunk.stop * rows]
    return torch.equal(decoded.flatten(0, 1)[: len(own)], own.to(decoded.dtype))


@cache
def _log_refusal(name: str, problem: str) -> None:
    logger.warning("Products of %s are not computed by kernels of numba: %s.", name, problem)
