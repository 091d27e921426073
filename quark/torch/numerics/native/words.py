"""Words of packed codes, by kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quark.torch.numerics.formats import Format
from quark.torch.numerics.native.compilation import can_run, run_rows
from quark.torch.numerics.native.pack_kernels import (
    pack_eights,
    pack_into_bytes,
    pack_pairs,
    pack_rows,
    pack_rows_into_bytes,
)


def find_words(
    codes: torch.Tensor, fmt: Format, shifts: Sequence[int], axis: int
) -> torch.Tensor | None:
    """Return codes packed into words as ``packing.pack`` does, or None if no kernel serves.

    Args:
        codes: Codes.
        fmt: Their format, with several codes in a word.
        shifts: Place of each code in its word.
        axis: Axis of the codes, from 0 on.
    """
    count, size = fmt.word_codes, fmt.storage_dtype.itemsize
    elements = count * fmt.bits // (8 * size)
    is_first, is_last = axis == 0, axis == codes.dim() - 1
    is_served = codes.itemsize == 1 and codes.is_contiguous() and codes.shape[axis] % count == 0
    is_aligned = codes.storage_offset() % 8 == 0  # kernels read up to eight codes as a number
    if not (is_served and is_aligned and (is_first or is_last)) or not can_run(codes):
        return None
    shape = list(codes.shape)
    shape[axis] = shape[axis] // count * elements
    words = torch.empty(shape, dtype=fmt.storage_dtype)
    codes = codes.view(torch.uint8)
    places = torch.tensor(shifts, dtype=torch.uint64)
    mask = (1 << fmt.bits) - 1
    source, target = codes, words
    if is_first and not is_last:
        source = codes.view(shape[0] // elements, count, -1)
        if size == 4:
            kernel, target = pack_rows, words.view(torch.uint32).view(len(source), -1)
        else:
            kernel, target = pack_rows_into_bytes, words.view(len(source), elements, -1)
    elif size == 4 or (count, elements) == (2, 1):
        kernel, wide = (pack_eights, torch.uint64) if size == 4 else (pack_pairs, torch.uint16)
        source = codes.view(wide)
        source = source.view(-1, source.shape[-1])
        target = words.view(torch.uint32 if size == 4 else torch.uint8).view(source.shape)
    else:
        kernel, source, target = pack_into_bytes, codes.view(-1, count), words.view(-1, elements)
    run_rows(kernel, [source, target], places.numpy(), mask)
    return words
