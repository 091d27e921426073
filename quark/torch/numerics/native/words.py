"""Words of packed codes, by kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from quark.torch.numerics.formats import Format
from quark.torch.numerics.native import pack_kernels, unpack_kernels
from quark.torch.numerics.native.compilation import can_run, run_rows


class _Kernels(NamedTuple):
    """Kernels for words of one kind, with their codes and words in the shapes that they take."""

    pack: Callable[..., None]
    unpack: Callable[..., None]
    codes: torch.Tensor
    words: torch.Tensor


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
    is_whole = codes.itemsize == 1 and codes.shape[axis] % fmt.word_codes == 0
    if not is_whole or not _is_served(codes, axis) or not can_run(codes):
        return None
    shape = list(codes.shape)
    shape[axis] = shape[axis] // fmt.word_codes * _elements(fmt)
    words = torch.empty(shape, dtype=fmt.storage_dtype, device="cpu")
    kernels = _kernels(codes, words, fmt, axis)
    run_rows(kernels.pack, [kernels.codes, kernels.words], *_places(shifts, fmt))
    return words


def find_codes(
    words: torch.Tensor, fmt: Format, count: int, shifts: Sequence[int], axis: int
) -> torch.Tensor | None:
    """Return the codes of words as ``packing.unpack`` does, or None if no kernel serves.

    Args:
        words: Words.
        fmt: Format of the codes, with several in a word.
        count: Codes along the axis.
        shifts: Place of each code in its word.
        axis: Axis of the codes, from 0 on.
    """
    is_whole = words.shape[axis] * fmt.word_codes == count * _elements(fmt)
    if not is_whole or not _is_served(words, axis) or words.dtype != fmt.storage_dtype:
        return None
    codes = words.new_empty(
        [*words.shape[:axis], count, *words.shape[axis + 1 :]], dtype=fmt.code_dtype
    )
    if codes.itemsize != 1 or not can_run(codes, words):
        return None
    kernels = _kernels(codes, words, fmt, axis)
    sign = 1 << (fmt.bits - 1) if fmt.code_dtype.is_signed else 0
    run_rows(kernels.unpack, [kernels.codes, kernels.words], *_places(shifts, fmt), sign)
    return codes


def _is_served(x: torch.Tensor, axis: int) -> bool:
    """Whether kernels read or write a tensor with codes along an axis; some read eight codes."""
    is_aligned = x.storage_offset() * x.itemsize % 8 == 0
    return x.is_contiguous() and is_aligned and axis in (0, x.dim() - 1)


def _elements(fmt: Format) -> int:
    return fmt.word_codes * fmt.bits // (8 * fmt.storage_dtype.itemsize)


def _places(shifts: Sequence[int], fmt: Format) -> tuple[object, int]:
    return torch.tensor(shifts, dtype=torch.uint64, device="cpu").numpy(), (1 << fmt.bits) - 1


def _kernels(codes: torch.Tensor, words: torch.Tensor, fmt: Format, axis: int) -> _Kernels:
    count, elements = fmt.word_codes, _elements(fmt)
    codes, is_wide = codes.view(torch.uint8), words.itemsize == 4
    if axis != codes.dim() - 1:
        by_rows = codes.view(words.shape[0] // elements, count, -1)
        if is_wide:
            own = words.view(torch.uint32).view(len(by_rows), -1)
            return _Kernels(pack_kernels.pack_rows, unpack_kernels.unpack_rows, by_rows, own)
        own = words.view(len(by_rows), elements, -1)
        pack, unpack = pack_kernels.pack_rows_into_bytes, unpack_kernels.unpack_rows_of_bytes
        return _Kernels(pack, unpack, by_rows, own)
    if is_wide or (count, elements) == (2, 1):
        whole = codes.view(torch.uint64 if is_wide else torch.uint16)
        whole = whole.view(-1, whole.shape[-1])
        own = words.view(torch.uint32 if is_wide else torch.uint8).view(whole.shape)
        if is_wide:
            return _Kernels(pack_kernels.pack_eights, unpack_kernels.unpack_eights, whole, own)
        return _Kernels(pack_kernels.pack_pairs, unpack_kernels.unpack_pairs, whole, own)
    pack, unpack = pack_kernels.pack_into_bytes, unpack_kernels.unpack_bytes
    return _Kernels(pack, unpack, codes.view(-1, count), words.view(-1, elements))
