"""Sums over chunks: the same bits for any number of processes, in a fixed order."""

import pytest
import torch

from quark.torch.pipeline.accumulators import ChannelRange, Gram, InputSample, Sum
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.reducer import LEAVES, Leaves, Reducer
from tests.unit.pipeline.threads import run

CHUNKS = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(19)]


def totals(new, feed, chunks=CHUNKS):
    """Totals of the chunks of all processes, for two names of which one sees every other chunk."""
    leaves, reducer = Leaves(len(chunks)), Reducer(["all", "even", "none"], new)
    for numbers in reducer.run(
        leaves, lambda leaf: [n for n in range(len(chunks)) if leaves.leaf_of(n) == leaf]
    ):
        for number in numbers:
            assert leaves.is_own(number)
            feed(reducer.parts["all"], chunks[number])
            if number % 2 == 0:
                feed(reducer.parts["even"], chunks[number])
    return reducer.totals


def product(total, x):
    total.add_product(x, x)


def observe(total, x):
    total(x)


KINDS = {
    "sum": (lambda leaf: Sum(), product),
    "gram": (lambda leaf: Gram(), observe),
    "range": (lambda leaf: ChannelRange(), observe),
    "sample": (lambda leaf: InputSample(7, leaf << 24), observe),
}


@pytest.mark.parametrize("count", [2, 3, 8, 11])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [1, 3, 19])
def test_processes_give_the_bits_of_one(kind, count, chunks):
    new, feed = KINDS[kind]
    expected = totals(new, feed, CHUNKS[:chunks])
    for found in run(count, lambda: totals(new, feed, CHUNKS[:chunks])):
        assert list(found) == ["all", "even", "none"] and found["none"].is_empty
        for name in ("all", "even"):
            pairs = zip(found[name].tensors(), expected[name].tensors(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_leaves_are_added_in_order():
    found = totals(*KINDS["sum"])["all"].total
    parts = [torch.zeros(4, 4) for _ in range(LEAVES)]
    for number, x in enumerate(CHUNKS):
        parts[number * LEAVES // len(CHUNKS)].addmm_(x.T, x)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert torch.equal(found, expected)
    exact = sum(x.T.double() @ x.double() for x in CHUNKS)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("chunks", [0, 1, 5, 8, 100])
def test_each_chunk_has_one_process(count, chunks):
    def own():
        leaves = Leaves(chunks)
        assert leaves.rounds == -(-min(chunks, LEAVES) // count)
        numbers = [n for n in range(chunks) if leaves.is_own(n)]
        rounds = [leaves.own_leaf(r) for r in range(leaves.rounds)]
        assert {leaves.leaf_of(n) for n in numbers} <= set(rounds)
        return numbers

    parts = run(count, own)
    assert sorted(n for part in parts for n in part) == list(range(chunks))
    sizes = [len(part) for part in parts[: min(count, LEAVES)]]
    assert max(sizes) <= -(-chunks // min(LEAVES, max(chunks, 1))) * max(1, -(-LEAVES // count))


def test_what_each_process_has_is_combined():
    def combined():
        own = ChannelRange()
        own(CHUNKS[processes().rank])
        return Reducer(["x"], lambda leaf: ChannelRange()).combine({"x": own})["x"]

    whole = ChannelRange()
    whole(torch.cat(CHUNKS[:3]))
    for found in run(3, combined):
        assert torch.equal(found.lo, whole.lo) and torch.equal(found.hi, whole.hi)


def test_values_of_items_keep_their_order():
    for count in (1, 2, 3, 8):
        found = run(
            count, lambda: processes().measure([3.0, 0.1, -2.0, 1e-300, 5.0], lambda y: y / 3)
        )
        assert found == [[x / 3 for x in (3.0, 0.1, -2.0, 1e-300, 5.0)]] * count
