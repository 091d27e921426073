"""Hadamard matrices of every order that is reached, and rotations by them."""

import math

import pytest
import torch

from quark.torch.numerics.hadamard import cores, hadamard, largest_order, random_hadamard, rotate

# Orders up to 512 that these constructions do not reach (the first is that of Baumert 1962).
UNREACHED = [92, 116, 156, 172, 184, 188, 232, 236, 260, 268, 292, 324, 356, 372, 376, 404, 412]
UNREACHED += [428, 436, 452, 472, 476, 508]
REACHED = [n for n in range(1, 513) if n < 3 or (n % 4 == 0 and n not in UNREACHED)]
# Widths of known models -> their cores above 2.
WIDTHS = {
    3072: {12},
    5120: {20},
    14336: {28},
    18432: {12},
    5632: {44},
    15360: {20, 12},
    17408: {68},
    4864: {76},
    21504: {28, 12},
    8960: {28, 20},
    11008: {344},
    10944: {76, 12},
    53248: {52},
}


def dense(rotation):
    return rotation.double() / math.sqrt(len(rotation))


@pytest.mark.parametrize("n", REACHED)
def test_rows_are_orthogonal(n):
    matrix = hadamard(n).int()
    assert matrix.abs().eq(1).all()
    assert torch.equal(matrix @ matrix.T, n * torch.eye(n, dtype=torch.int32))


@pytest.mark.parametrize("n", [2**m for m in range(1, 11)])
def test_powers_of_two_are_those_of_sylvester(n):
    expected = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    assert hadamard(n).tolist() == expected


def test_orders_that_are_not_reached():
    assert [n for n in range(1, 513) if cores(n) is None and n % 4 == 0] == UNREACHED
    assert all(cores(n) is None for n in (-4, 0, 3, 6, 514))


@pytest.mark.parametrize("n", WIDTHS)
def test_widths_of_models(n):
    orders = cores(n)
    assert math.prod(orders) == n
    assert set(orders) - {2} == WIDTHS[n]


@pytest.mark.parametrize(("n", "order"), [(11008, 11008), (172, 4), (92 * 64, 92 * 64), (7, 1)])
def test_largest_order_that_divides(n, order):
    assert largest_order(n) == order


def test_an_unreached_order_is_refused():
    with pytest.raises(ValueError, match="order 172 is known here: take blocks of 4"):
        hadamard(172)


# ---- products -----------------------------------------------------------------------------------

SIZES = [1, 2, 12, 128, 132, 144, 256, 344, 768, 896, 1536, 4096]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("n", SIZES)
def test_fast_product_is_the_dense_one(n, blocks):
    x = torch.randn(2, 3, blocks * n, dtype=torch.float64)
    expected = (x.view(2, 3, blocks, n) @ dense(hadamard(n))).view_as(x)
    torch.testing.assert_close(rotate(x, hadamard(n)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_random_signs_keep_the_fast_product(n):
    matrix = random_hadamard(n, torch.Generator().manual_seed(5))
    x = torch.randn(4, n, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, matrix), x @ dense(matrix), rtol=0, atol=1e-12)


def test_matrices_without_factors_and_learned_ones():
    x = torch.randn(4, 384, dtype=torch.float64)
    matrix = hadamard(384)[torch.randperm(384)]
    torch.testing.assert_close(rotate(x, matrix), x @ dense(matrix), rtol=0, atol=1e-12)
    learned = torch.linalg.qr(torch.randn(192, 192, dtype=torch.float64))[0]
    expected = torch.cat([x[:, :192] @ learned, x[:, 192:] @ learned], 1)
    torch.testing.assert_close(rotate(x, learned), expected, rtol=0, atol=1e-12)


def test_kronecker_factors_in_another_order():
    """As others store them: a core times a large Sylvester matrix."""
    matrix = torch.kron(hadamard(12), hadamard(64))
    x = torch.randn(4, 768, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, matrix), x @ dense(matrix), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [64, 144, 4096])
def test_rotating_there_and_back(n):
    matrix = random_hadamard(n, torch.Generator().manual_seed(5))
    x = torch.randn(5, n)
    y = rotate(x, matrix)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate(y, matrix.T.contiguous()), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_single(kind):
    x = torch.randn(3, 4096).to(kind)
    matrix = hadamard(4096)
    assert torch.equal(rotate(x, matrix), rotate(x.float(), matrix).to(kind))


def test_the_gradient_is_rotated_back():
    matrix = random_hadamard(256, torch.Generator().manual_seed(5))
    x = torch.randn(2, 256, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 256, dtype=torch.float64)
    rotate(x, matrix).backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ dense(matrix).T, rtol=0, atol=1e-12)


def test_a_matrix_that_changes_is_looked_at_again():
    matrix, x = hadamard(256), torch.randn(2, 256, dtype=torch.float64)
    rotate(x, matrix)
    matrix.copy_(matrix.flip(0))
    torch.testing.assert_close(rotate(x, matrix), x @ dense(matrix), rtol=0, atol=1e-12)


def test_inference_mode():
    with torch.inference_mode():
        matrix, x = hadamard(256), torch.randn(2, 256, dtype=torch.float64)
        torch.testing.assert_close(rotate(x, matrix), x @ dense(matrix), rtol=0, atol=1e-12)


def test_no_rows():
    assert rotate(torch.empty(0, 5, 256), hadamard(256)).shape == (0, 5, 256)


def test_a_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"size 12 does not divide the last axis .*\(2, 100\)"):
        rotate(torch.randn(2, 100), hadamard(12))


def test_signs_come_from_the_generator():
    def draw(seed):
        return random_hadamard(64, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    signs = draw(1) * hadamard(64)
    assert torch.equal(signs, signs[:, :1].expand(64, 64)) and signs.unique().tolist() == [-1, 1]


def test_a_matrix_of_sylvester_undoes_itself():
    x = torch.randn(5, 512)
    torch.testing.assert_close(rotate(rotate(x, hadamard(256)), hadamard(256)), x)
