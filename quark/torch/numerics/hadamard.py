"""Hadamard matrices, and fast products with them.

Orders: 1, 2, q + 1 for prime powers q = 3 mod 4 and 2 (q + 1) for q = 1 mod 4 (Paley 1933), and
their products (Sylvester 1867: Kronecker products of Hadamard matrices are Hadamard matrices).
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from functools import cache
from itertools import product

import torch
from torch.utils.weak import WeakIdKeyDictionary

FACTOR = 128  # largest side of a dense factor, if a matrix has Kronecker factors


@cache
def cores(n: int) -> tuple[int, ...] | None:
    """Return orders with the product ``n``, the largest order as small as possible.

    Return None if no construction reaches ``n``. Example: 40 = 20 * 2 (Paley 19 + 1, Sylvester 2),
    14336 = 28 * 2^9.
    """
    if n in (1, 2):
        return (n,)
    if n < 1 or n % 4:
        return None
    found: list[tuple[int, ...]] = [(n,)] if _paley_field(n) else []
    for a in range(2, math.isqrt(n) + 1):
        left, right = (cores(a), cores(n // a)) if n % a == 0 else (None, None)
        if left and right:
            found.append(tuple(sorted(left + right, reverse=True)))
    return min(found, default=None)


def largest_order(n: int) -> int:
    """Return the largest divisor of ``n`` that is the order of a Hadamard matrix."""
    return max(d for d in range(1, n + 1) if n % d == 0 and cores(d))


def hadamard(n: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a Hadamard matrix: (n, n) int8 of +-1 with H Hᵀ = n I, of Sylvester for powers of 2.

    Raises:
        ValueError: No construction reaches ``n``.
    """
    orders = cores(n)
    if orders is None:
        raise ValueError(
            f"No Hadamard matrix of order {n} is known here: take blocks of {largest_order(n)}."
        )
    # Gather the cores in few factors of similar size, because products with these are fast.
    # Example, n = 2560: cores 20 and seven times 2 go to two factors, of orders 40 and 64.
    bins = [1] * max(1, math.ceil(math.log(n, FACTOR) - 1e-9))
    gathered = [torch.ones(1, 1, dtype=torch.int8, device="cpu") for _ in bins]
    for order in orders:
        least = min(range(len(bins)), key=lambda i: bins[i])
        bins[least] *= order
        gathered[least] = torch.kron(gathered[least], _core(order))
    matrix = gathered[0]
    for factor in gathered[1:]:
        matrix = torch.kron(matrix, factor)
    return matrix.to(device)


def random_hadamard(n: int, generator: torch.Generator) -> torch.Tensor:
    """Return a Hadamard matrix (n, n) int8 whose rows are multiplied by random signs."""
    signs = torch.randint(0, 2, (n, 1), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
    return signs * hadamard(n)


@cache
def largest_hadamard(n: int) -> torch.Tensor:
    """Return a Hadamard matrix of order ``n``, or of the largest divisor of ``n`` that has one."""
    return hadamard(largest_order(n))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Multiply the last axis of ``x``, block by block, by an orthogonal matrix.

    Args:
        x: (..., blocks * n), floating point. Half precision is computed in single.
        rotation: (n, n), orthogonal; or int8 +-1, which is divided by the root of n. Such a matrix
            is applied by its Kronecker factors (QuaRot, Ashkboos et al. 2024, section 3).

    Returns:
        The product, in shape and type of ``x``.

    Raises:
        ValueError: n does not divide the last axis.
    """
    n = len(rotation)
    if x.shape[-1] % n:
        raise ValueError(
            f"A rotation of size {n} does not divide the last axis of shape {tuple(x.shape)}."
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    signs, factors = _factored(rotation)
    y = x.to(wide).reshape(-1, n)
    if signs is not None:
        y = y * signs.to(y)
    scale = 1.0 if rotation.is_floating_point() else n**-0.5
    # (A kron B) x for x seen as a matrix (side of A, side of B): multiply by A over the first axis,
    # then by B over the second: n * (a + b) products instead of n * a * b.
    for factor in factors:
        side, n = len(factor), n // len(factor)
        by = factor.to(y) * scale
        y = by.T @ y.reshape(-1, side, n) if n > 1 else y.reshape(-1, side) @ by
        scale = 1.0
    return y.reshape(x.shape).to(x.dtype)


def _paley_field(n: int) -> tuple[int, int] | None:
    """Return (p, k) such that the field of p^k elements gives a Hadamard matrix of order ``n``."""
    first, second = _prime_power(n - 1), _prime_power(n // 2 - 1)
    if first and (n - 1) % 4 == 3:
        return first
    return second if second and (n // 2 - 1) % 4 == 1 else None


def _prime_power(q: int) -> tuple[int, int] | None:
    p = next((d for d in range(2, math.isqrt(q) + 1) if q % d == 0), q) if q > 1 else 0
    k = round(math.log(q, p)) if p else 0
    return (p, k) if p and p**k == q else None


def _core(n: int) -> torch.Tensor:
    """Return the Hadamard matrix of order ``n`` from the construction of Sylvester or Paley."""
    if n <= 2:
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")[:n, :n]
    field = _paley_field(n)
    assert field is not None
    residues = _residues(*field)
    q = len(residues)
    bordered = torch.ones(q + 1, q + 1, dtype=torch.int8, device="cpu")
    bordered[1:, 1:] = residues
    bordered[0, 0] = 0
    one = torch.eye(q + 1, dtype=torch.int8, device="cpu")
    if q % 4 == 3:
        bordered[1:, 0] = -1
        return bordered + one
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
    minus = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8, device="cpu")
    return torch.kron(bordered, plus) + torch.kron(one, minus)


def _residues(p: int, k: int) -> torch.Tensor:
    """Return (q, q) int8: 1 if the difference of two field elements is a square, 0 if 0, else -1.

    Elements are polynomials over the integers modulo p; the polynomial a + b x has the number
    a + b p. The even powers of a primitive element are the squares. Example, p = 7, k = 1: the
    squares are 1, 2 and 4.
    """
    powers = next(
        found for rule in product(range(p), repeat=k) if len(found := _powers(rule, p)) == p**k - 1
    )
    base = torch.tensor([p**i for i in range(k)], device="cpu")
    character = torch.zeros(p**k, dtype=torch.int8, device="cpu")
    numbers = (torch.tensor(powers, device="cpu") * base).sum(-1)
    character[numbers[0::2]], character[numbers[1::2]] = 1, -1
    digits = torch.arange(p**k, device="cpu")[:, None] // base % p  # (q, k)
    return character[((digits[:, None] - digits) % p * base).sum(-1)]


def _powers(rule: tuple[int, ...], p: int) -> list[tuple[int, ...]]:
    """Return the powers of x up to the first that repeats, if x^k equals the polynomial ``rule``.

    Multiplying by x shifts the coefficients up by one; the coefficient of x^k is replaced by that
    multiple of ``rule``.
    """
    one = (1, *(0 for _ in rule[1:]))
    powers, element = [one], one
    while len(powers) < p ** len(rule):
        top = element[-1]
        shifted = (0, *element[:-1])
        element = tuple((s + top * r) % p for s, r in zip(shifted, rule, strict=True))
        if element == one or not any(element):
            break
        powers.append(element)
    return powers


_Factored = tuple[torch.Tensor | None, list[torch.Tensor]]
_KNOWN: MutableMapping[torch.Tensor, tuple[int, _Factored]] = WeakIdKeyDictionary()


def _factored(rotation: torch.Tensor) -> _Factored:
    """Return row signs and Kronecker factors of a rotation, cached as long as it exists."""
    if rotation.is_floating_point():
        return None, [rotation]
    version = 0 if rotation.is_inference() else rotation._version
    known = _KNOWN.get(rotation)
    if known is None or known[0] != version:
        signs = rotation[:, 0].clone()
        known = version, (signs, _factors(rotation * signs[:, None]))
        _KNOWN[rotation] = known
    return known[1]


def _factors(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Return matrices whose Kronecker product is ``matrix``.

    The first column of ``matrix`` is 1. The matrix is a product of left (n/b, n/b) and right (b, b)
    if each of its blocks of (b, b) is the right factor times the sign of the left one.
    """
    n = len(matrix)
    if n <= FACTOR:
        return [matrix]
    sides = [d for d in range(2, n) if n % d == 0]
    for b in sorted(sides, key=lambda d: abs(math.log(d * d / n))):
        blocks = matrix.view(n // b, b, n // b, b)
        left, right = blocks[:, 0, :, 0], blocks[0, :, 0, :]
        if all(
            torch.equal(rows, right[:, None] * signs[:, None])
            for rows, signs in zip(blocks, left, strict=True)
        ):
            return _factors(left) + _factors(right)
    return [matrix]
