"""Passes of data over several models that take turns: block by block, then batch by batch.

Models that are read in parts so read each block once, side by side, and outputs for a batch can be
compared as soon as all models have them. A pass is a generator. It yields False while its outputs
have not begun, and True before the next of them::

    original    block 0           block 1           …   batches 0, 1, 2             batches 3, 4 …
    quantized            block 0           block 1 …                  the same three
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import nn

from quark.torch.graph.residency import release, residency_of

T = TypeVar("T")
Steps = Generator[bool, None, T]
Pauses = Callable[[], bool]


def never() -> bool:
    """Return False: the pass does not pause."""
    return False


def complete(steps: Steps[T]) -> T:
    """Run a pass to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def within(context: Callable[[], AbstractContextManager[Any]], steps: Steps[T]) -> Steps[T]:
    """Return a pass that runs inside of a context, which it leaves whenever it yields.

    A context that changes the state of the whole process must not stay open while another pass has
    its turn.
    """
    with closing(steps):
        while True:
            with context():
                try:
                    is_output = next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
            yield is_output


def deliver(
    batches: Iterable[T],
    context: Callable[[], AbstractContextManager[Any]],
    run: Callable[[T], None],
    pauses: Pauses,
) -> Steps[None]:
    """Run batches through a model.

    Args:
        batches: The batches; each is taken once.
        context: Opened while batches run, and left at a pause.
        run: Runs a batch.
        pauses: Whether to pause after the batch that has run.
    """
    items = iter(batches)
    goes_on = True
    while goes_on:
        yield True
        goes_on = False
        with context():
            for item in items:
                run(item)
                if pauses():
                    goes_on = True
                    break


class Pass(NamedTuple):
    """A pass over a model.

    Attributes:
        model: The model.
        steps: The pass.
    """

    model: nn.Module
    steps: Steps[Any]


class Outcome(NamedTuple):
    """Result of a pass, and the seconds of its turns."""

    result: Any
    seconds: float


def run_in_turn(passes: Sequence[Pass], begin_round: Callable[[], object] = never) -> list[Outcome]:
    """Run passes over several models in turn, and return their outcomes.

    No pass begins with its outputs before all others are ready to. Then each has its turn in every
    round, in the given order, up to where it pauses. Before a turn the parameters of the other
    models are released, as far as they can be read again.

    Args:
        passes: The passes.
        begin_round: Called before each round of outputs.
    """
    turns = [_Turn(i, passes) for i in range(len(passes))]
    with ExitStack() as stack:
        for each in passes:
            stack.enter_context(closing(each.steps))
        stack.enter_context(_shared_memory([each.model for each in passes]))
        waiting = turns
        while waiting:
            waiting = [turn for turn in waiting if not turn.take()]
        while any(not turn.is_done for turn in turns):
            begin_round()
            for turn in turns:
                turn.take()
    return [Outcome(turn.result, turn.seconds) for turn in turns]


class _Turn:
    """One of several passes.

    Args:
        index: Its number.
        passes: All passes.
    """

    def __init__(self, index: int, passes: Sequence[Pass]) -> None:
        self._steps = passes[index].steps
        self._others = [each.model for i, each in enumerate(passes) if i != index]
        self.is_done, self.seconds, self.result = False, 0.0, None

    def take(self) -> bool:
        """Go on up to the next pause; return whether outputs are next, or all is done."""
        if self.is_done:
            return True
        for model in self._others:
            release(model)
        start = time.monotonic()
        try:
            return next(self._steps)
        except StopIteration as end:
            self.is_done, self.result = True, end.value
            return True
        finally:
            self.seconds += time.monotonic() - start


@contextmanager
def _shared_memory(models: Sequence[nn.Module]) -> Iterator[None]:
    """Divide the bound of activations among models that are read in parts.

    Nothing is read ahead: only the model whose turn it is has parameters in memory.
    """
    streamed = [x for x in map(residency_of, models) if x is not None]
    limits = [x.activation_limit for x in streamed]
    for residency in streamed:
        residency.activation_limit //= len(streamed)
        residency.reads_ahead = False
    try:
        yield
    finally:
        for residency, limit in zip(streamed, limits, strict=True):
            residency.activation_limit = limit
            residency.reads_ahead = True
