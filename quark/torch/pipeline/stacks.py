"""Stacks of a model: blocks of which each receives the hidden states that the last one returned.

An encoder, a decoder and a vision tower are stacks, found by running the model. Whatever comes
between two blocks, such as a projection, ends a stack: the next one begins with other inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.trace import iter_tensors
from quark.torch.pipeline.batches import flatten_batches, run_batch
from quark.torch.pipeline.capture import split_hidden_states

_OUTSIDE = ""  # maker of tensors that come from outside of the stack


class Stack(NamedTuple):
    """Blocks that run one after the other.

    Attributes:
        names: The blocks in the order of execution.
        shares: Whether the first block returns other tensors that later ones receive, such as the
            relative positions of T5.
    """

    names: list[str]
    shares: bool


@torch.no_grad()
def find_stacks(model: nn.Module, names: list[str], batches: Iterable[Any]) -> list[Stack]:
    """Divide blocks into stacks, by running the first batch.

    Args:
        model: The model.
        names: Blocks in the order of execution.
        batches: Data for the model; without any, all blocks are one stack.

    Raises:
        ValueError: A block runs more than once in a forward pass.
    """
    batch = next(flatten_batches(batches), None)
    if batch is None or not names:
        return [Stack(names, False)] if names else []
    watcher = _Watcher()
    with _watch(model, names, watcher):
        run_batch(model, batch)
    order = [name for stack in watcher.stacks for name in stack.names]
    missing = [name for name in names if name not in order]
    return [*watcher.stacks, *(Stack([name], False) for name in missing)]


class _Watcher:
    """Divides the blocks that run into stacks.

    Attributes:
        stacks: The stacks so far.
    """

    def __init__(self) -> None:
        self.stacks: list[Stack] = []
        self._last: tuple[torch.Tensor, int] | None = None  # hidden states and their version
        # Tensor -> the block of this stack that made it. The tensors are held so that no other
        # gets their id.
        self._makers: dict[int, tuple[str, torch.Tensor]] = {}

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that a block begins."""
        if any(name in stack.names for stack in self.stacks):
            raise ValueError(f"{name} runs more than once in a forward pass.")
        x, others = split_hidden_states(args, kwargs)
        makers = {self._makers[id(t)][0] for t in iter_tensors(others) if id(t) in self._makers}
        makers.discard(_OUTSIDE)
        is_same = self._last is not None and x is self._last[0] and _version(x) == self._last[1]
        if is_same and makers <= {self.stacks[-1].names[0]}:
            stack = self.stacks.pop()
            self.stacks.append(Stack([*stack.names, name], stack.shares or bool(makers)))
        else:
            self.stacks.append(Stack([name], False))
            self._makers.clear()
        for tensor in iter_tensors(others):
            self._makers.setdefault(id(tensor), (_OUTSIDE, tensor))

    def leave(self, name: str, output: Any) -> None:
        """Record what a block returns."""
        tensors = list(iter_tensors(output))
        self._last = (tensors[0], _version(tensors[0])) if tensors else None
        for tensor in tensors[1:]:
            self._makers.setdefault(id(tensor), (name, tensor))


def _version(x: torch.Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return 0 if x.is_inference() else x._version


@contextmanager
def _watch(model: nn.Module, names: list[str], watcher: _Watcher) -> Iterator[None]:
    handles = []
    for name in names:
        module = model.get_submodule(name)
        enter = lambda _, args, kwargs, name=name: watcher.enter(name, args, kwargs)  # noqa: E731
        leave = lambda _, args, output, name=name: watcher.leave(name, output)  # noqa: E731
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
