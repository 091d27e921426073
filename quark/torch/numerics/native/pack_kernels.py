"""Kernels that pack codes into words.

Codes are bytes. A word takes several elements if it is wider than them, lowest bits first. Loops
have no branches, so that the compiler makes vector instructions of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import native_function

Array = Any


@native_function
def pack_pairs(codes: Array, words: Array, shifts: Array, mask: int) -> None:
    """Pack rows of two codes of 4 bits into a byte each.

    Args:
        codes: Two codes of one byte, the first in the low byte, uint16 (rows, words).
        words: uint8 (rows, words), overwritten.
        shifts: Place of each code in its word, uint64 (2,).
        mask: Bits of a code.
    """
    first, second = np.uint16(shifts[0]), np.uint16(shifts[1])
    for row in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            pair = np.uint16(codes[row, i])
            low = np.uint16(np.uint16(pair & mask) << first)
            words[row, i] = np.uint8(
                low | np.uint16(np.uint16(np.uint16(pair >> 8) & mask) << second)
            )


@native_function
def pack_eights(codes: Array, words: Array, shifts: Array, mask: int) -> None:
    """Pack rows of eight codes into a word of 32 bits each.

    Args:
        codes: Eight codes of one byte, the first in the lowest byte, uint64 (rows, words).
        words: uint32 (rows, words), overwritten.
        shifts: Place of each code in its word, uint64 (8,).
        mask: Bits of a code.
    """
    bits = np.uint64(mask)
    s0, s1, s2, s3 = shifts[0], shifts[1], shifts[2], shifts[3]
    s4, s5, s6, s7 = shifts[4], shifts[5], shifts[6], shifts[7]
    for row in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            code = codes[row, i]
            low = (code & bits) << s0 | (code >> np.uint64(8) & bits) << s1
            low |= (code >> np.uint64(16) & bits) << s2 | (code >> np.uint64(24) & bits) << s3
            high = (code >> np.uint64(32) & bits) << s4 | (code >> np.uint64(40) & bits) << s5
            high |= (code >> np.uint64(48) & bits) << s6 | (code >> np.uint64(56) & bits) << s7
            words[row, i] = np.uint32(low | high)


@native_function
def pack_rows(codes: Array, words: Array, shifts: Array, mask: int) -> None:
    """Pack codes of eight neighboring rows into words of 32 bits.

    Args:
        codes: uint8 (rows of words, 8, columns).
        words: uint32 (rows of words, columns), overwritten.
        shifts: Place of each code in its word, uint64 (8,).
        mask: Bits of a code.
    """
    bits = np.uint32(mask)
    for row in range(codes.shape[0]):
        for i in range(codes.shape[2]):
            word = np.uint32(0)
            for j in range(8):
                placed = np.uint32(codes[row, j, i] & bits) << np.uint32(shifts[j])
                word = np.uint32(word | np.uint32(placed))
            words[row, i] = word


@native_function
def pack_rows_into_bytes(codes: Array, words: Array, shifts: Array, mask: int) -> None:
    """Pack codes of neighboring rows into words of whole bytes, at most seven.

    Args:
        codes: uint8 (rows of words, codes of a word, columns).
        words: Bytes of words, lowest first, uint8 (rows of words, bytes, columns), overwritten.
        shifts: Place of each code in its word, uint64.
        mask: Bits of a code.
    """
    for row in range(codes.shape[0]):
        for k in range(words.shape[1]):
            words[row, k, :] = 0
        for j in range(codes.shape[1]):
            byte, bit = np.int64(shifts[j]) >> 3, np.int32(np.int64(shifts[j]) & 7)
            for i in range(codes.shape[2]):
                placed = np.int32(np.int32(codes[row, j, i] & mask) << bit)
                words[row, byte, i] = np.uint8(words[row, byte, i] | placed)
            if byte + 1 < words.shape[1]:  # the code may go on in the next byte
                for i in range(codes.shape[2]):
                    placed = np.int32(np.int32(codes[row, j, i] & mask) << bit)
                    words[row, byte + 1, i] = np.uint8(words[row, byte + 1, i] | (placed >> 8))


@native_function
def pack_into_bytes(codes: Array, words: Array, shifts: Array, mask: int) -> None:
    """Pack codes of rows into words of whole bytes, at most seven.

    Args:
        codes: uint8 (words, codes of a word).
        words: Bytes of words, lowest first, uint8 (words, bytes), overwritten.
        shifts: Place of each code in its word, uint64.
        mask: Bits of a code.
    """
    bits = np.uint64(mask)
    for row in range(codes.shape[0]):
        word = np.uint64(0)
        for j in range(codes.shape[1]):
            word |= (np.uint64(codes[row, j]) & bits) << shifts[j]
        for k in range(words.shape[1]):
            words[row, k] = np.uint8(word >> np.uint64(8 * k))
