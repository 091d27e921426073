"""Passes that take turns: the order of turns, contexts, and what happens when one of them fails."""

from contextlib import contextmanager

import pytest
from torch import nn

from quark.torch.pipeline.interleaved_passes import Pass, complete, deliver, run_in_turn, within


def steps(name, blocks, batches, log, every=100):
    """A pass that writes what it does to a log, and pauses after every so many batches."""
    for block in range(blocks):
        log.append((name, "block", block))
        yield False
    done = []

    @contextmanager
    def context():
        log.append((name, "open"))
        yield
        log.append((name, "close"))

    def run(batch):
        done.append(batch)
        log.append((name, "batch", batch))

    yield from deliver(range(batches), context, run, lambda: len(done) % every == 0)
    return name, len(done)


def passes(*each):
    return [Pass(nn.Linear(1, 1), one) for one in each]


def test_blocks_come_side_by_side_and_outputs_in_rounds():
    log, rounds = [], []
    outcomes = run_in_turn(
        passes(steps("a", 2, 3, log, every=2), steps("b", 3, 3, log, every=2)),
        lambda: rounds.append(len(log)),
    )
    assert [outcome.result for outcome in outcomes] == [("a", 3), ("b", 3)]
    shown = [" ".join(map(str, entry)) for entry in log]
    assert shown[:5] == ["a block 0", "b block 0", "a block 1", "b block 1", "b block 2"]
    first = ["open", "batch 0", "batch 1", "close"]
    second = ["open", "batch 2", "close"]
    expected = [f"{n} {what}" for part in (first, second) for n in "ab" for what in part]
    assert shown[5:] == expected
    assert rounds == [5, 13]


def test_a_context_is_left_at_each_pause():
    depth = []

    @contextmanager
    def context():
        depth.append(1)
        yield
        depth.pop()

    def one():
        for _ in range(3):
            assert depth == [1]
            yield False
        assert depth == [1]
        return "end"

    turns = within(context, one())
    assert next(turns) is False
    assert depth == []
    assert complete(turns) == "end"
    assert depth == []


def test_a_pass_that_fails_ends_the_others():
    closed = []

    def fails():
        yield False
        raise FloatingPointError("a window")

    def waits():
        try:
            while True:
                yield False
        finally:
            closed.append(True)

    with pytest.raises(FloatingPointError, match="a window"):
        run_in_turn(passes(fails(), waits()))
    assert closed == [True]
