"""Triton kernels for packed weights: codes become values in registers, for every format.

A row of a weight is a row of bytes in each plane. Planes and runs are those of ``arrangement``,
with a row as a panel: run r of the columns lies in slot r // blocks of block r % blocks, where a
plane of w bits has runs * w / 8 blocks. Example of a plane of 4 bits, one block and two slots::

    columns  a b c d e f g h      bytes  ea fb gc hd      (run 0 is a b c d, run 1 is e f g h)

So the slots of a byte are columns that lie a run apart, and a tile of bytes meets one tile of
inputs for each run. ``weight`` is a ``triton_method.Weight``, ``CODES`` a ``triton_method.Codes``:
Triton compiles a kernel once for each kind of codes, for all shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.torch.quantization.nn.products.triton_functions import triton_function

if TYPE_CHECKING:
    import triton.language as tl


@triton_function
def read_slot(plane, row, column, mask, length, run, RUNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return what a plane holds of the codes of a run, int32."""
    blocks: tl.constexpr = RUNS * WIDTH // 8
    offset = (row * blocks + run % blocks) * length + column
    byte = tl.load(plane + offset, mask=mask, other=0).to(tl.int32)
    return (byte >> (WIDTH * (run // blocks))) & ((1 << WIDTH) - 1)


@triton_function
def read_bits(weight, row, column, mask, run, CODES: tl.constexpr):
    """Return the bits of codes in a run, int32: rows (N, 1), columns of the run (1, K)."""
    runs: tl.constexpr = CODES.runs
    bits = read_slot(weight.planes[0], row, column, mask, weight.length, run, runs, CODES.widths[0])
    for index in tl.static_range(1, len(CODES.widths)):
        slot = read_slot(
            weight.planes[index], row, column, mask, weight.length, run, runs, CODES.widths[index]
        )
        bits |= slot << CODES.below[index]
    return bits


@triton_function
def decode(bits, CODES: tl.constexpr):
    """Return what codes are worth, float32: floats as float16 numbers, with the bias of float16.

    Example of fp4 (1 sign, 2 exponent, 1 mantissa), as in ``panels``, whose scales go with it::

        code 1 01 1 = -1.5     float16 1 00001 1000000000 = -1.5 * 2^-14
    """
    if CODES.exponent_bits > 0:
        magnitude = bits & ((1 << (CODES.exponent_bits + CODES.mantissa_bits)) - 1)
        half = magnitude << (10 - CODES.mantissa_bits)
        if CODES.signed:
            half |= (bits >> (CODES.bits - 1)) << 15
        values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif CODES.signed and CODES.bits == 8:  # narrower integers are stored with an offset
        values = ((bits ^ 0x80) - 0x80).to(tl.float32)
    else:
        values = bits.to(tl.float32)
    return values


@triton_function
def read_values(weight, row, start, run, CODES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the values of BLOCK_K columns from ``start`` of a run, float32 (rows, columns).

    They have the bits of ``numerics.qdq.dequantize``, and are zero outside of the weight.
    """
    row = row[:, None].to(tl.int64)
    column = (start + tl.arange(0, BLOCK_K))[None, :]
    mask = (row < weight.outputs) & (column < weight.length)
    values = decode(read_bits(weight, row, column, mask, run, CODES), CODES)
    if CODES.shares_groups:  # the columns of the tile have one group: one scale per row is read
        block = row * weight.groups + (run * weight.length + start) // weight.group
        mask = row < weight.outputs
    else:
        block = row * weight.groups + (run * weight.length + column) // weight.group
    values -= weight.zero
    if weight.zeros is not None:
        values -= tl.load(weight.zeros + block, mask=mask, other=0).to(tl.float32)
    scale = tl.load(weight.scale + block, mask=mask, other=0).to(tl.float32)
    if weight.tensor_scale is not None:
        scale *= tl.load(weight.tensor_scale)
    return values * scale


@triton_function
def multiply(
    x,
    y,
    rows,
    steps,
    weight,
    CODES: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply x (rows, columns) by the values of ``steps`` tiles of each run.

    The grid is (tiles of outputs, tiles of rows, parts); y (parts, rows, outputs) gets the sums.
    """
    part = tl.program_id(2)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(tl.int64)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(part * steps * CODES.runs, (part + 1) * steps * CODES.runs):
        run, start = step % CODES.runs, step // CODES.runs * BLOCK_K
        column = (start + tl.arange(0, BLOCK_K))[None, :]
        values = read_values(weight, n, start, run, CODES, BLOCK_K).to(MULTIPLIED)
        offset = (m * CODES.runs + run) * weight.length + column
        mask = (m < rows) & (column < weight.length)
        inputs = tl.load(x + offset, mask=mask, other=0).to(MULTIPLIED)
        if BLOCK_M == 1:
            products = inputs.to(tl.float32) * values.to(tl.float32)
            sums += tl.sum(products, 1)[None, :]
        else:
            sums = tl.dot(inputs, tl.trans(values), sums, input_precision="ieee")
    mask = (m < rows) & (n[None, :] < weight.outputs)
    offset = (part * rows + m) * weight.outputs + n[None, :]
    tl.store(y + offset, sums.to(y.dtype.element_ty), mask=mask)


@triton_function
def dequantize(y, weight, CODES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Write the values of a weight to y (outputs, columns).

    The grid is (tiles of outputs, tiles of columns of a run, runs).
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, run = tl.program_id(1) * BLOCK_K, tl.program_id(2)
    values = read_values(weight, n, start, run, CODES, BLOCK_K)
    row = n[:, None].to(tl.int64)
    column = (start + tl.arange(0, BLOCK_K))[None, :]
    mask = (row < weight.outputs) & (column < weight.length)
    tl.store(y + (row * CODES.runs + run) * weight.length + column, values, mask=mask)
