"""Stacks of a model: blocks of which each receives the hidden states that the last one returned.

An encoder, a decoder and a vision tower are stacks, found by running the model. Whatever comes
between two blocks, such as a projection, ends a stack: the next one begins with other inputs. So
does a block whose outputs have another shape: it cannot be left out of a pass through the model.
A block begins a stack too if it receives a tensor that the model computes of the outputs of blocks
before it, such as ``skip = 0.5 * x`` between two blocks, or of what they return beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn

from quark.torch.graph.replay import replace_forwards
from quark.torch.graph.trace import iter_tensors
from quark.torch.pipeline.batches import flatten_batches, run_batch, take_excerpt
from quark.torch.pipeline.hidden_states import OutputForm, OutputForms, split_hidden_states

# Makers that are no names of blocks: of tensors from outside of the stack, and of hidden states.
_OUTSIDE, _STREAM = "", "*"


class StopForward(Exception):
    """Ends a forward pass of which the rest is not needed."""


class Stack(NamedTuple):
    """Blocks that run one after the other.

    Attributes:
        names: The blocks in the order of execution.
        shares: Whether the first block makes other tensors that all later ones receive, such as the
            relative positions of T5.
        forms: Name of a block -> form of its output; blocks that did not run have none.
    """

    names: list[str]
    shares: bool = False
    forms: Mapping[str, OutputForm] = MappingProxyType({})


@torch.no_grad()
def find_stacks(model: nn.Module, names: list[str], batches: Iterable[Any]) -> list[Stack]:
    """Divide blocks into stacks, by running the first tokens of the data.

    Args:
        model: The model.
        names: Blocks in the order of execution.
        batches: Data for the model; without any, all blocks are one stack.

    Raises:
        ValueError: A block runs more than once in a forward pass.
    """
    batch = next(flatten_batches(batches), None)
    if batch is None or not names:
        return [Stack(names)] if names else []
    watcher, excerpt = _Watcher(), take_excerpt(batch)
    with _watch(model, names, watcher):
        run_batch(model, excerpt)
    watcher.stacks = [
        part for stack in watcher.stacks for part in _divide(model, stack, excerpt, watcher.others)
    ]
    order = [name for stack in watcher.stacks for name in stack.names]
    missing = [name for name in names if name not in order]
    return [*watcher.stacks, *(Stack([name]) for name in missing)]


class _Watcher:
    """Divides the blocks that run into stacks.

    Attributes:
        stacks: The stacks so far.
        others: Name of a block -> tensors that it received beside the hidden states.
    """

    def __init__(self) -> None:
        self.stacks: list[Stack] = []
        self.others: dict[str, list[torch.Tensor]] = {}
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}  # by id: with version
        self._forms = OutputForms()
        self._last: list[tuple[torch.Tensor, int]] = []  # tensors returned, and their versions
        self._shape = torch.Size()  # of the hidden states that the block received
        self._received: set[int | str] = set()  # arguments of the first block that are tensors
        # Id of a tensor -> the block of this stack that made it. The reference is to tell a later
        # tensor that got the same id; held tensors would fill the memory.
        self._makers: dict[int, tuple[str, ReferenceType[torch.Tensor]]] = {}

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that a block begins."""
        if any(name in stack.names for stack in self.stacks):
            raise ValueError(f"{name} runs more than once in a forward pass.")
        x, (more, named) = split_hidden_states(args, kwargs)
        keeps_shape, self._shape = x.shape == self._shape, x.shape
        self._forms.receive(x)
        others: dict[Any, Any] = {**dict[Any, Any](enumerate(more)), **named}
        self.others[name] = [self._copy(t) for t in iter_tensors(list(others.values()))]
        # Example: image and text both pass all blocks of Flux. The text is a tensor for the first
        # block, and the block before made it for the others: blocks that change two streams are
        # stacks of one. The first block of T5 makes positions where it received None. A block that
        # receives the outputs of an earlier one again, such as a skip connection, begins a stack.
        if self._makers_of(x):
            self._makers[id(x)] = _STREAM, ref(x)
        made = {key for key, value in others.items() if self._makers_of(value)}
        makers = {maker for value in others.values() for maker in self._makers_of(value)}
        is_same = keeps_shape and any(x is y and _version(x) == v for y, v in self._last)
        is_shared = not made & self._received and makers <= {s.names[0] for s in self.stacks[-1:]}
        if is_same and is_shared:
            stack = self.stacks.pop()
            shares = stack.shares or bool(makers)
            self.stacks.append(stack._replace(names=[*stack.names, name], shares=shares))
        else:
            self.stacks.append(Stack([name], False, self._forms.by_name))
            self._makers.clear()
            self._received = {key for key, value in others.items() if [*iter_tensors([value])]}
        for tensor in iter_tensors(list(others.values())):
            self._remember(_OUTSIDE, tensor)

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor, which blocks may change: one for all that receive it."""
        known = self._copies.get(id(x))
        if known is None or known[1] != _version(x):
            known = self._copies[id(x)] = x, _version(x), x.clone()
        return known[2]

    def _makers_of(self, value: Any) -> set[str]:
        """Return the blocks of this stack that made tensors of an argument."""
        known = [(t, self._makers.get(id(t))) for t in iter_tensors([value])]
        return {pair[0] for t, pair in known if pair is not None and pair[1]() is t} - {_OUTSIDE}

    def leave(self, name: str, output: Any) -> None:
        """Record what a block returns."""
        self._forms.leave(name, output, self._shape)
        tensors = list(iter_tensors(output))
        self._last = [(tensor, _version(tensor)) for tensor in tensors]
        for tensor in tensors:
            self._remember(name, tensor)

    def _remember(self, maker: str, tensor: torch.Tensor) -> None:
        """Record the maker of a tensor, unless it is known."""
        known = self._makers.get(id(tensor))
        if known is None or known[1]() is not tensor:
            self._makers[id(tensor)] = maker, ref(tensor)


def _divide(
    model: nn.Module, stack: Stack, batch: Any, expected: Mapping[str, list[torch.Tensor]]
) -> Iterator[Stack]:
    """Divide a stack where blocks receive other tensors if the blocks before them do nothing.

    Args:
        model: The model.
        stack: The stack.
        batch: An excerpt of the data.
        expected: Name of a block -> tensors that it received, beside hidden states, in the model.
    """
    while len(stack.names) > 1:
        found = _arguments_without_blocks(model, stack, batch)
        is_other = (not _are_equal(found.get(n), expected[n]) for n in stack.names[1:])
        place = next((i for i, other in enumerate(is_other, 1) if other), None)
        if place is None:
            break
        yield stack._replace(names=stack.names[:place])
        stack = stack._replace(names=stack.names[place:])
    yield stack


def _arguments_without_blocks(
    model: nn.Module, stack: Stack, batch: Any
) -> dict[str, list[torch.Tensor]]:
    """Return the tensors beside hidden states that blocks receive if none changes hidden states.

    Blocks run if the first one makes tensors that the others receive. Else nothing that a block
    returns beside hidden states may reach a later one, so tensors without values take its place.
    """
    others: dict[str, list[torch.Tensor]] = {}

    def record(name: str) -> Callable[..., Any]:
        own = model.get_submodule(name).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            x, (more, named) = split_hidden_states(args, kwargs)
            others[name] = list(iter_tensors([*more, *named.values()]))
            if name == stack.names[-1]:
                raise StopForward
            if not stack.shares:
                return stack.forms[name].without_values().wrap(x)
            output = own(*args, **kwargs)
            is_first = name == stack.names[0]
            return output if is_first else stack.forms[name]._replace(output=output).wrap(x)

        return forward

    with (
        replace_forwards(model, {name: record(name) for name in stack.names}),
        suppress(StopForward),
    ):
        run_batch(model, batch)
    return others


def _are_equal(first: list[torch.Tensor] | None, second: list[torch.Tensor]) -> bool:
    """Whether tensors have the same shapes, types and bits, NaN included."""
    return (
        first is not None
        and len(first) == len(second)
        and all(
            a.shape == b.shape
            and a.dtype == b.dtype
            and bool(((a == b) | ((a != a) & (b != b))).all())
            for a, b in zip(first, second, strict=True)
        )
    )


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
