"""Granularity as a shape, against loops over single elements."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics.granularity import Blocks, QSchemeType, block_shape

quick = settings(deadline=None, derandomize=True, max_examples=200)


@st.composite
def tilings(draw):
    """A shape and a block of the same rank, which may not divide it or may be larger."""
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    block = [draw(st.integers(1, 9)) for _ in shape]
    return tuple(shape), tuple(block)


def numbered(shape):
    """A tensor in which every element differs."""
    return torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).reshape(shape)


def members(shape, block):
    """Block index -> indices of its elements, found element by element."""
    found = {}
    for index in itertools.product(*map(range, shape)):
        found.setdefault(tuple(i // b for i, b in zip(index, block, strict=True)), []).append(index)
    return found


@pytest.mark.parametrize(
    ("shape", "arguments", "expected"),
    [
        ((8, 64), (QSchemeType.per_tensor, 0, -1), (8, 64)),
        ((8, 64), (QSchemeType.per_tensor, 9, 5), (8, 64)),
        ((), (QSchemeType.per_tensor, 0, -1), ()),
        ((8, 64), (QSchemeType.per_channel, 0, -1), (1, 64)),
        ((8, 64), (QSchemeType.per_channel, 1, -1), (8, 1)),
        ((8, 64), (QSchemeType.per_channel, -1, -1), (8, 1)),
        ((4, 3, 5, 5), (QSchemeType.per_channel, 1, -1), (4, 1, 5, 5)),
        ((8, 64), (QSchemeType.per_group, -1, 32), (1, 32)),
        ((8, 64), (QSchemeType.per_group, 1, 32), (1, 32)),
        ((8, 64), (QSchemeType.per_group, 0, 4), (4, 1)),
        ((8, 64), (QSchemeType.per_group, -1, -1), (1, 64)),
        ((8, 50), (QSchemeType.per_group, -1, 32), (1, 32)),
        ((2, 3, 64), (QSchemeType.per_group, -1, 16), (1, 1, 16)),
        ((2, 3, 64), (QSchemeType.per_channel, 0, -1, True), (1, 1, 64)),
        ((64,), (QSchemeType.per_channel, 0, -1, True), (64,)),
        ((8, 64), (QSchemeType.per_block, 0, -1, False, (4, -1)), (4, 64)),
        ((8, 64), (QSchemeType.per_block, 0, -1, False, (1 << 31, 128)), (8, 64)),
    ],
    ids=str,
)
def test_block_shape(shape, arguments, expected):
    assert block_shape(shape, *arguments) == expected


@pytest.mark.parametrize("qscheme", [QSchemeType.per_channel, QSchemeType.per_group])
@pytest.mark.parametrize(("shape", "axis"), [((8, 64), 2), ((8, 64), -3), ((5,), 1), ((), 0)])
def test_axis_that_is_not_there(qscheme, shape, axis):
    with pytest.raises(ValueError, match=rf"ch_axis={axis} is not an axis .* {len(shape) - 1}\."):
        block_shape(shape, qscheme, axis, 32)


@quick
@given(tilings())
def test_split_and_join_are_inverse(tiling):
    shape, block = tiling
    blocks, x = Blocks.cover(shape, block), numbered(shape)
    assert torch.equal(blocks.join(blocks.split(x)), x)


@quick
@given(tilings(), st.randoms(use_true_random=False))
def test_split_and_join_of_a_permuted_tensor(tiling, random):
    shape, block = tiling
    order = random.sample(range(len(shape)), len(shape))
    x = numbered(shape).permute(order)
    blocks = Blocks.cover(tuple(x.shape), tuple(block[i] for i in order))
    assert torch.equal(blocks.join(blocks.split(x)), x)


@quick
@given(tilings())
def test_reductions_run_over_the_elements_of_a_block(tiling):
    """Sums tell every element apart, and padding adds nothing to them."""
    shape, block = tiling
    blocks, x = Blocks.cover(shape, block), numbered(shape)
    found = members(shape, block)
    sums = blocks.split(x).sum(blocks.reduced).reshape(blocks.grid)
    largest = blocks.split(x).amax(blocks.reduced).reshape(blocks.grid)
    assert math.prod(blocks.grid) == len(found)
    for place, elements in found.items():
        assert sums[place] == sum(x[e] for e in elements)
        assert largest[place] == max(x[e] for e in elements)


@quick
@given(tilings())
def test_spread_gives_each_element_the_number_of_its_block(tiling):
    shape, block = tiling
    blocks = Blocks.cover(shape, block)
    scale = numbered(blocks.grid)
    spread = blocks.join(blocks.spread(scale).expand(blocks.view).contiguous())
    for place, elements in members(shape, block).items():
        assert all(spread[e] == scale[place] for e in elements)


@quick
@given(tilings())
def test_spread_takes_any_shape_of_the_right_count(tiling):
    blocks = Blocks.cover(*tiling)
    scale = numbered(blocks.grid)
    assert torch.equal(blocks.spread(scale.flatten()), blocks.spread(scale))


@pytest.mark.parametrize(
    ("shape", "block", "view", "reduced"),
    [
        ((8, 64), (8, 64), (512,), (0,)),
        ((8, 64), (1, 64), (8, 64), (1,)),
        ((8, 64), (8, 1), (8, 64), (0,)),
        ((8, 64), (1, 32), (16, 32), (1,)),
        ((8, 50), (1, 32), (16, 32), (1,)),
        ((8, 64), (4, 32), (2, 4, 2, 32), (1, 3)),
        ((4, 3, 5, 5), (1, 3, 5, 5), (4, 75), (1,)),
        ((4, 3, 5, 5), (4, 1, 5, 5), (4, 3, 25), (0, 2)),
        ((8, 64), (1, 1), (512, 1), (1,)),
        ((), (), (1,), (0,)),
    ],
    ids=str,
)
def test_views_have_the_fewest_axes(shape, block, view, reduced):
    blocks = Blocks.cover(shape, block)
    assert (blocks.view, blocks.reduced) == (view, reduced)


def test_whole_blocks_are_not_copied():
    x = torch.randn(8, 64)
    blocks = Blocks.cover((8, 64), (1, 32))
    assert blocks.split(x).data_ptr() == x.data_ptr()
    assert blocks.join(blocks.split(x)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shape", [(0,), (0, 64), (8, 0)], ids=str)
@pytest.mark.parametrize("qscheme", QSchemeType, ids=lambda q: q.name)
def test_empty_tensors(shape, qscheme):
    if qscheme is QSchemeType.per_block:
        shape = (*shape, 3)  # blocks have two axes
    blocks = Blocks.cover(shape, block_shape(shape, qscheme, -1, -1, block=(2, 2)))
    assert blocks.join(blocks.split(torch.empty(shape))).shape == shape


@pytest.mark.parametrize("count", [0, 1, 15, 17])
def test_spread_of_a_wrong_count(count):
    blocks = Blocks.cover((8, 64), (1, 32))
    said = r"shape \(8, 64\) has 16 blocks \(a grid of \(8, 2\)\)"
    with pytest.raises(ValueError, match=rf"{said}.* of shape \({count},\) was given"):
        blocks.spread(torch.ones(count))
