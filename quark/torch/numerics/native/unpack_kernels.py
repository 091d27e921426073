"""Kernels that read codes from words: the inverse of each kernel of ``pack_kernels``.

A code is brought to the lowest bits of its byte. Codes with a sign are extended to the byte:
``sign`` is their highest bit, 0 for codes without one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import native_function

Array = Any
_EVERY_BYTE = 0x0101010101010101


@native_function
def unpack_pairs(codes: Array, words: Array, shifts: Array, mask: int, sign: int) -> None:
    """Read two codes of 4 bits from each byte; see ``pack_pairs``.

    Args:
        codes: uint16 (rows, words), overwritten.
        words: uint8 (rows, words).
        shifts: Place of each code in its word, uint64 (2,).
        mask: Bits of a code.
        sign: Highest bit of a code with a sign, else 0.
    """
    first, second = np.uint16(shifts[0]), np.uint16(shifts[1])
    bits, signs = np.uint16(mask), np.uint16(sign * 0x0101)
    # A code c with its sign is (c ^ sign) - sign: here 128 - sign is added, and the highest bit
    # inverted, so that no byte borrows from the next.
    added = np.uint16(((128 - sign) * 0x0101) if sign else 0)
    highest = np.uint16(0x8080 if sign else 0)
    for row in range(words.shape[0]):
        for i in range(words.shape[1]):
            word = np.uint16(words[row, i])
            pair = np.uint16(np.uint16(word >> first) & bits)
            pair |= np.uint16(np.uint16(np.uint16(word >> second) & bits) << np.uint16(8))
            codes[row, i] = np.uint16(np.uint16(np.uint16(pair ^ signs) + added) ^ highest)


@native_function
def unpack_eights(codes: Array, words: Array, shifts: Array, mask: int, sign: int) -> None:
    """Read eight codes from each word of 32 bits; see ``pack_eights``.

    Args:
        codes: uint64 (rows, words), overwritten.
        words: uint32 (rows, words).
        shifts: Place of each code in its word, uint64 (8,).
        mask: Bits of a code.
        sign: Highest bit of a code with a sign, else 0.
    """
    bits, signs = np.uint64(mask), np.uint64(sign * _EVERY_BYTE)
    added = np.uint64(((128 - sign) * _EVERY_BYTE) if sign else 0)  # see ``unpack_pairs``
    highest = np.uint64(128 if sign else 0) * np.uint64(_EVERY_BYTE)
    s0, s1, s2, s3 = shifts[0], shifts[1], shifts[2], shifts[3]
    s4, s5, s6, s7 = shifts[4], shifts[5], shifts[6], shifts[7]
    for row in range(words.shape[0]):
        for i in range(words.shape[1]):
            word = np.uint64(words[row, i])
            code = word >> s0 & bits | (word >> s1 & bits) << np.uint64(8)
            code |= (word >> s2 & bits) << np.uint64(16) | (word >> s3 & bits) << np.uint64(24)
            code |= (word >> s4 & bits) << np.uint64(32) | (word >> s5 & bits) << np.uint64(40)
            code |= (word >> s6 & bits) << np.uint64(48) | (word >> s7 & bits) << np.uint64(56)
            codes[row, i] = ((code ^ signs) + added) ^ highest


@native_function
def unpack_rows(codes: Array, words: Array, shifts: Array, mask: int, sign: int) -> None:
    """Read eight neighboring rows of codes from each row of words of 32 bits; see ``pack_rows``.

    Args:
        codes: uint8 (rows of words, 8, columns), overwritten.
        words: uint32 (rows of words, columns).
        shifts: Place of each code in its word, uint64 (8,).
        mask: Bits of a code.
        sign: Highest bit of a code with a sign, else 0.
    """
    bits, highest = np.uint32(mask), np.uint8(sign)
    for row in range(words.shape[0]):
        for j in range(8):
            shift = np.uint32(shifts[j])
            for i in range(words.shape[1]):
                code = np.uint8(np.uint32(words[row, i] >> shift) & bits)
                codes[row, j, i] = np.uint8(np.uint8(code ^ highest) - highest)


@native_function
def unpack_rows_of_bytes(codes: Array, words: Array, shifts: Array, mask: int, sign: int) -> None:
    """Read neighboring rows of codes from words of whole bytes; see ``pack_rows_into_bytes``.

    Args:
        codes: uint8 (rows of words, codes of a word, columns), overwritten.
        words: Bytes of words, lowest first, uint8 (rows of words, bytes, columns).
        shifts: Place of each code in its word, uint64.
        mask: Bits of a code.
        sign: Highest bit of a code with a sign, else 0.
    """
    highest = np.uint8(sign)
    for row in range(words.shape[0]):
        for j in range(codes.shape[1]):
            byte, bit = np.int64(shifts[j]) >> 3, np.uint16(np.int64(shifts[j]) & 7)
            after = min(byte + 1, words.shape[1] - 1)  # the code may go on in the next byte
            for i in range(words.shape[2]):
                pair = np.uint16(words[row, byte, i]) | np.uint16(words[row, after, i]) << 8
                code = np.uint8((np.uint16(pair) >> bit) & mask)
                codes[row, j, i] = np.uint8(np.uint8(code ^ highest) - highest)


@native_function
def unpack_bytes(codes: Array, words: Array, shifts: Array, mask: int, sign: int) -> None:
    """Read the codes of rows from words of whole bytes, at most seven; see ``pack_into_bytes``.

    Args:
        codes: uint8 (words, codes of a word), overwritten.
        words: Bytes of words, lowest first, uint8 (words, bytes).
        shifts: Place of each code in its word, uint64.
        mask: Bits of a code.
        sign: Highest bit of a code with a sign, else 0.
    """
    bits, highest = np.uint64(mask), np.uint8(sign)
    for row in range(words.shape[0]):
        word = np.uint64(0)
        for k in range(words.shape[1]):
            word |= np.uint64(words[row, k]) << np.uint64(8 * k)
        for j in range(codes.shape[1]):
            code = np.uint8(word >> shifts[j] & bits)
            codes[row, j] = np.uint8(np.uint8(code ^ highest) - highest)
