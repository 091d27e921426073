"""Codes to words and back. Packing moves bits and nothing else.

A word holds ``fmt.word_codes`` adjacent codes along one axis. A word wider than the storage type
takes several elements, lowest bits first. Examples::

    int4, codes 0 … 7, "order"     0x76543210   code 0 in the lowest four bits
    int4, codes 0 … 7, "reorder"   0x75316420   even codes below, odd codes above (AWQ)
    uint2, codes 1 2 3 0           0b01101100   the first code in the highest bits
    fp6, codes 1 2 3 4             0x103081     24 bits in the bytes 0x81 0x30 0x10
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import reduce

import torch
import torch.nn.functional as F

from quark.torch.numerics.formats import Format
from quark.torch.numerics.native.words import find_codes, find_words
from quark.torch.numerics.pieces import join_rows, row_pieces

PIECE = 1 << 20  # codes that are packed at a time

# Position j of a 32-bit word, from the lowest bits up, holds the code ORDERS[...][j].
ORDERS = {"order": (0, 1, 2, 3, 4, 5, 6, 7), "reorder": (0, 2, 4, 6, 1, 3, 5, 7)}


def packed_size(count: int, fmt: Format) -> int:
    """Return the number of storage elements that ``count`` codes take along their axis."""
    return -(-count // fmt.word_codes) * _elements(fmt)


def pack(
    codes: torch.Tensor, fmt: Format, pack_method: str = "reorder", axis: int = -1
) -> torch.Tensor:
    """Pack codes along an axis, padding it with zeros to whole words.

    Args:
        codes: (…, n, …), type ``fmt.code_dtype``.
        fmt: Format of the codes.
        pack_method: Order of 4-bit codes in a 32-bit word, "reorder" or "order".
        axis: Axis of the n codes.

    Returns:
        (…, packed_size(n, fmt), …), type ``fmt.storage_dtype``.

    Raises:
        ValueError: ``pack_method`` is unknown.
    """
    shifts = _shifts(fmt, pack_method)
    if fmt.word_codes == 1:
        return codes.contiguous()
    axis %= codes.dim()
    by_kernel = find_words(codes, fmt, shifts, axis)
    if by_kernel is not None:
        return by_kernel
    pieces = _pieces(codes, 1 if axis else fmt.word_codes)
    return join_rows([_packed(piece, fmt, shifts, axis) for piece in pieces])


def _pieces(codes: torch.Tensor, multiple: int) -> list[torch.Tensor]:
    """Split codes along the first axis into pieces of a multiple of rows, which fit a CPU cache."""
    if codes.device.type != "cpu" or codes.numel() <= PIECE:
        return [codes]
    rows = PIECE * codes.shape[0] // codes.numel()
    return list(torch.split(codes, max(multiple, rows - rows % multiple)))


def _packed(codes: torch.Tensor, fmt: Format, shifts: list[int], axis: int) -> torch.Tensor:
    ragged = -codes.shape[axis] % fmt.word_codes
    if ragged:
        codes = F.pad(codes, [*(0, 0) * (codes.dim() - 1 - axis), 0, ragged])
    codes = torch.unflatten(codes, axis, (-1, fmt.word_codes))  # (…, words, codes of a word, …)
    mask = (1 << fmt.bits) - 1
    is_byte = fmt.word_codes * fmt.bits == 8 and fmt.storage_dtype == torch.uint8
    if is_byte and fmt.word_codes == 2 and codes.stride(axis + 1) == 1 and _is_even(codes):
        return _packed_pairs(codes.view(torch.int16).squeeze(-1) & (mask << 8 | mask), shifts)
    dtype = torch.uint8 if is_byte else _word_dtype(fmt)
    parts = [(shift, codes.select(axis + 1, i)) for i, shift in enumerate(shifts)]
    is_on_cpu = codes.device.type == "cpu"
    if is_on_cpu and dtype.itemsize > 1 and codes.element_size() == 1 and 8 % fmt.bits == 0:
        # Passes over bytes take a quarter; on a GPU, the launches count.
        word = _joined(_bytes(parts, mask), dtype)
    else:
        word = _joined(((at, part.to(dtype).bitwise_and(mask)) for at, part in parts), dtype)
    if fmt.storage_dtype == dtype:
        return word.contiguous()
    elements = [(word >> (8 * i) & 0xFF).to(fmt.storage_dtype) for i in range(_elements(fmt))]
    return torch.stack(elements, axis + 1).flatten(axis, axis + 1)


def _joined(parts: Iterable[tuple[int, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """Return words of unsigned bits, each with its place in the word; they may be overwritten."""
    wide = ((at, part.to(dtype)) for at, part in parts)
    placed = (part.bitwise_left_shift_(at) if at else part for at, part in wide)
    return reduce(torch.Tensor.bitwise_or_, placed)


def _bytes(
    parts: Iterable[tuple[int, torch.Tensor]], mask: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Iterate over the bytes of words, with their places, given codes that divide a byte.

    Example: codes that begin at the bits 0, 4, 8 and 12 become bytes that begin at 0 and 8.
    """
    by_byte: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for at, part in parts:
        by_byte[at - at % 8].append((at % 8, part.view(torch.uint8)))
    for start, inside in by_byte.items():
        yield start, _joined(((at, part.bitwise_and(mask)) for at, part in inside), torch.uint8)


def _is_even(codes: torch.Tensor) -> bool:
    """Whether pairs of bytes along the last axis are at even places of the memory."""
    return codes.shape[-1] == 2 and not any(
        n % 2 for n in (codes.storage_offset(), *codes.stride()[:-1])
    )


def _packed_pairs(pairs: torch.Tensor, shifts: list[int]) -> torch.Tensor:
    """Return two codes of four bits in a byte, from int16 with the first code in the low byte.

    Example: of the codes 0x1 and 0x2, the pair is 0x0201, and 0x0201 | 0x0020 ends in 0x21.
    """
    if shifts[0] == 0:
        return pairs.bitwise_or_(pairs >> 4).to(torch.uint8)
    return (pairs >> 8).bitwise_or_(pairs.bitwise_left_shift_(4)).to(torch.uint8)


def unpack(
    words: torch.Tensor, fmt: Format, count: int, pack_method: str = "reorder", axis: int = -1
) -> torch.Tensor:
    """Return the first ``count`` codes along an axis: the inverse of ``pack``.

    Args:
        words: (…, packed_size(count, fmt), …).
        fmt: Format of the codes.
        count: Codes along the axis.
        pack_method: Order of the codes, as in ``pack``.
        axis: Axis of the words.

    Returns:
        (…, count, …), type ``fmt.code_dtype``.
    """
    shifts = _shifts(fmt, pack_method)
    if fmt.word_codes == 1:
        return words
    axis %= words.dim()
    by_kernel = find_codes(words, fmt, count, shifts, axis)
    if by_kernel is not None:
        return by_kernel
    pieces = row_pieces(words, packed_size(PIECE, fmt)) if axis else [words]
    codes = join_rows([_unpacked(piece, fmt, shifts, axis) for piece in pieces])
    return codes.narrow(axis, 0, count).contiguous()


def _unpacked(words: torch.Tensor, fmt: Format, shifts: list[int], axis: int) -> torch.Tensor:
    word = words.to(_word_dtype(fmt))
    if _elements(fmt) > 1:
        elements = torch.unflatten(word, axis, (-1, _elements(fmt))).unbind(axis + 1)
        word = reduce(torch.bitwise_or, (part << (8 * i) for i, part in enumerate(elements)))
    shape = (*word.shape[: axis + 1], fmt.word_codes, *word.shape[axis + 1 :])
    codes = torch.empty(shape, dtype=fmt.code_dtype, device=words.device)
    top = 8 * word.itemsize - fmt.bits
    extends = codes.dtype.is_signed
    for i, shift in enumerate(shifts):
        # Shift the code to the top of the word, then down with its sign: of the 32-bit word
        # 0x000000F0, the code at bit 4 goes up by 24 to 0xF0000000 and down by 28 to -1.
        part = (word << (top - shift)).bitwise_right_shift_(top)
        codes.select(axis + 1, i).copy_(part if extends else part.bitwise_and_((1 << fmt.bits) - 1))
    return codes.flatten(axis, axis + 1)


def _elements(fmt: Format) -> int:
    """Return the number of storage elements of a word."""
    if fmt.word_codes == 1:
        return 1
    return fmt.word_codes * fmt.bits // (8 * fmt.storage_dtype.itemsize)


def _word_dtype(fmt: Format) -> torch.dtype:
    """Return an integer type that holds a word."""
    return torch.int32 if fmt.word_codes * fmt.bits <= 32 else torch.int64


def _shifts(fmt: Format, pack_method: str) -> list[int]:
    """Return the position of the lowest bit of each code in a word."""
    if pack_method not in ORDERS:
        raise ValueError(f"pack_method={pack_method!r} is unknown: give one of {list(ORDERS)}.")
    places = list(range(fmt.word_codes))
    if fmt.first_high:
        places.reverse()
    elif fmt.has_word_orders:
        places = [ORDERS[pack_method].index(i) for i in places]
    return [fmt.bits * place for place in places]
