"""Codes to words and back. Packing moves bits and nothing else.

A word holds ``fmt.word_codes`` codes along the last axis. Where it is wider than the storage type
it is written in several elements, lowest bits first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quark.torch.numerics.formats import Format

# Position j of a 32-bit word holds the code ORDERS[...][j] (the second is AWQ's interleaving).
ORDERS = {"order": (0, 1, 2, 3, 4, 5, 6, 7), "reorder": (0, 2, 4, 6, 1, 3, 5, 7)}


def packed_size(count: int, fmt: Format) -> int:
    """Elements of storage that ``count`` codes take along the last axis."""
    return -(-count // fmt.word_codes) * _elements(fmt)


def pack(codes: torch.Tensor, fmt: Format, pack_method: str = "reorder") -> torch.Tensor:
    """Pack codes along the last axis, padding it with zeros to whole words.

    Args:
        codes: (..., n), type ``fmt.code_dtype``.
        fmt: Format of the codes.
        pack_method: "reorder" or "order": how 4-bit codes lie in a 32-bit word.

    Returns:
        (..., packed_size(n, fmt)), type ``fmt.storage_dtype``.

    Raises:
        ValueError: ``pack_method`` is unknown.
    """
    shifts = _shifts(fmt, pack_method)
    if fmt.word_codes == 1:
        return codes.contiguous()
    ragged = -codes.shape[-1] % fmt.word_codes
    if ragged:
        codes = F.pad(codes, (0, ragged))
    codes = codes.reshape(*codes.shape[:-1], -1, fmt.word_codes)  # (..., words, codes of a word)
    word = torch.zeros(codes.shape[:-1], dtype=_word_dtype(fmt), device=codes.device)
    for i, shift in enumerate(shifts):
        part = codes[..., i].to(word.dtype).bitwise_and_((1 << fmt.bits) - 1)
        word.bitwise_or_(part.bitwise_left_shift_(shift))
    if fmt.storage_dtype == torch.int32:
        return word
    parts = [(word >> (8 * i) & 0xFF).to(fmt.storage_dtype) for i in range(_elements(fmt))]
    return torch.stack(parts, -1).flatten(-2)


def unpack(
    words: torch.Tensor, fmt: Format, count: int, pack_method: str = "reorder"
) -> torch.Tensor:
    """Return the first ``count`` codes along the last axis: the inverse of ``pack``.

    Args:
        words: (..., packed_size(count, fmt)).
        fmt: Format of the codes.
        count: Codes along the last axis.
        pack_method: As it was packed.

    Returns:
        (..., count), type ``fmt.code_dtype``.
    """
    shifts = _shifts(fmt, pack_method)
    if fmt.word_codes == 1:
        return words
    word = words.to(_word_dtype(fmt))
    if _elements(fmt) > 1:
        parts = word.reshape(*word.shape[:-1], -1, _elements(fmt))
        word = parts[..., 0].clone()
        for i in range(1, _elements(fmt)):
            word |= parts[..., i] << (8 * i)
    shape = (*word.shape, fmt.word_codes)
    codes = torch.empty(shape, dtype=fmt.code_dtype, device=words.device)
    top = 8 * word.itemsize - fmt.bits
    extends = codes.dtype.is_signed
    for i, shift in enumerate(shifts):
        # Up to the top of the word, then down with or without the sign.
        part = (word << (top - shift)) >> top
        codes[..., i] = part if extends else part & ((1 << fmt.bits) - 1)
    return codes.flatten(-2)[..., :count].contiguous()


def _elements(fmt: Format) -> int:
    """Elements of storage in one word."""
    if fmt.word_codes == 1:
        return 1
    return fmt.word_codes * fmt.bits // (8 * fmt.storage_dtype.itemsize)


def _word_dtype(fmt: Format) -> torch.dtype:
    """Integer type in which a word is put together."""
    return torch.int32 if fmt.word_codes * fmt.bits <= 32 else torch.int64


def _shifts(fmt: Format, pack_method: str) -> list[int]:
    """Bit position of each code of a word."""
    if pack_method not in ORDERS:
        raise ValueError(f"pack_method={pack_method!r} is unknown: give one of {list(ORDERS)}.")
    places = list(range(fmt.word_codes))
    if fmt.first_high:
        places.reverse()
    elif fmt.storage_dtype == torch.int32:
        places = [ORDERS[pack_method].index(i) for i in places]
    return [fmt.bits * place for place in places]
