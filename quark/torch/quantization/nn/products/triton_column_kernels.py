"""A Triton kernel that rounds a panel of columns of a weight in one launch.

A program holds the panel for some rows of the weight. It rounds one column after another, and
changes those that follow by the error of each, as ``gptq_solver`` does. The kernel is launched
without the contraction of products and sums into one operation, so it has the bits of separate
operations. ``CASE`` is a ``triton_inputs.Case``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.torch.quantization.nn.products.triton_functions import triton_function
from quark.torch.quantization.nn.products.triton_input_kernels import (
    bits_of,
    float_of,
    round_to_codes,
)

if TYPE_CHECKING:
    import triton.language as tl


@triton_function
def round_panel(
    remaining,
    current,
    rounded,
    errors,
    factor,
    order,
    scales,
    zeros,
    pruned,
    start,
    steps,
    rows,
    below,
    beside,
    CASE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Round ``steps`` columns from ``start`` on. The grid is (tiles of rows,).

    Tensors are (inputs, rows): ``remaining`` has the values in the order of rounding, ``current``
    those from which errors count (or is None), ``rounded`` and ``errors`` get the results.
    ``order`` (inputs,) has the index of each column in the weight, to which ``scales``, ``zeros``
    (or None) and ``pruned`` (which weights stay zero, or None) belong. The elements of a column of
    ``factor``, upper triangular, are ``below`` apart, and the elements of a row ``beside``. A tile
    is WIDTH >= ``steps`` columns of BLOCK_M rows.
    """
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = row < rows
    step = tl.arange(0, WIDTH)
    offset = (start + step)[:, None].to(tl.int64) * rows + row[None, :]
    mask = (step < steps)[:, None] & is_row[None, :]
    values = tl.load(remaining + offset, mask=mask, other=0.0)
    for i in range(steps):
        # The sum of the bits of one column and of zeros are the bits of the column.
        column = float_of(tl.sum(tl.where((step == i)[:, None], bits_of(values), 0), 0))
        place = tl.load(order + start + i).to(tl.int64) * rows + row
        scale = tl.load(scales + place, mask=is_row, other=1.0)
        zero = None if zeros is None else tl.load(zeros + place, mask=is_row, other=0.0)
        result = round_to_codes(column, scale, zero, CASE) * scale
        if pruned is not None:
            result = tl.where(tl.load(pruned + place, mask=is_row, other=0) != 0, 0.0, result)
        diagonal = factor + (start + i).to(tl.int64) * (below + beside)
        done = (start + i).to(tl.int64) * rows + row
        given = column if current is None else tl.load(current + done, mask=is_row, other=0.0)
        error = tl.div_rn(given - result, tl.load(diagonal))
        tl.store(rounded + done, result, mask=is_row)
        tl.store(errors + done, error, mask=is_row)
        behind = (step > i) & (step < steps)
        weights = tl.load(diagonal + (step - i).to(tl.int64) * beside, mask=behind, other=0.0)
        values -= weights[:, None] * error[None, :]
