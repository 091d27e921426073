"""What each batch calls each block of a model with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.batches import padding_mask, parts, run_batch

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a block is called with besides hidden states


class _Place(NamedTuple):
    """A tensor that waits in a store."""

    number: int


class Enough(Exception):
    """Ends a forward pass whose rest is not needed."""


@dataclass
class Calls:
    """What batches call blocks with besides hidden states.

    Attributes:
        store: Where tensors among them wait.
        of_batch: For each batch, calls by name of the block, with places in the store for tensors.
        masks: For each batch, (sequences, tokens) bool: which tokens are not padding; or None.
        returned: What each block returned for some batch, but for the hidden states.
    """

    store: ActivationStore
    of_batch: list[dict[str, Call]] = field(default_factory=list)
    masks: list[torch.Tensor | None] = field(default_factory=list)
    returned: dict[str, Any] = field(default_factory=dict)

    def of(self, index: int, name: str) -> Call:
        """Return what a batch calls a block with."""
        args, kwargs = self.of_batch[index][name]
        return self._filled(args), {key: self._filled(value) for key, value in kwargs.items()}

    def _filled(self, value: Any) -> Any:
        if isinstance(value, _Place):
            return self.store[value.number]
        return tuple(map(self._filled, value)) if type(value) is tuple else value

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.of_batch)

    def like(self, name: str, x: torch.Tensor) -> Any:
        """Return hidden states in the form in which a block returns them."""
        form = self.returned[name]
        return x if isinstance(form, torch.Tensor) else type(form)((x, *form[1:]))


@torch.no_grad()
def capture(
    model: nn.Module,
    names: list[str],
    batches: Iterable[Any],
    inputs: ActivationStore,
    others: ActivationStore,
) -> Calls:
    """Record what each batch calls each block with, and the hidden states of the first.

    The model is run with blocks that only look.

    Args:
        model: The model.
        names: Its blocks in the order of execution.
        batches: Data for the model.
        inputs: Takes in the hidden states that enter the first block, by batch.
        others: Takes in other tensors, such as masks: one where batches have the same.
    """
    calls, sharing = Calls(others), _Sharing(others)
    for batch in parts(batches):
        if not calls:
            with _watching(model, names, calls.returned):
                run_batch(model, batch)
        seen: dict[str, Call] = {}
        with _looking(model, names, calls, seen, inputs), suppress(Enough):
            run_batch(model, batch)
        calls.of_batch.append({name: sharing.call(name, call) for name, call in seen.items()})
        calls.masks.append(padding_mask(batch))
    return calls


@contextmanager
def standing_in(model: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Give modules another forward for a while.

    Args:
        model: The model.
        forwards: By name of the module.
    """
    modules = {name: model.get_submodule(name) for name in forwards}
    own = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = forwards[name]
    try:
        yield
    finally:
        for name, module in modules.items():
            del module.forward
            before = own[name]
            if before is not None:
                module.forward = before


def taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Call]:
    """Return the hidden states among the arguments of a block, and the others."""
    if args:
        return args[0], (args[1:], kwargs)
    others = dict(kwargs)
    return others.pop("hidden_states"), ((), others)


@contextmanager
def _watching(model: nn.Module, names: list[str], returned: dict[str, Any]) -> Iterator[None]:
    """Record what blocks return."""

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name in returned:
                raise ValueError(f"{name} runs more than once in a forward pass.")
            returned[name] = _without_states(output)

        return hook

    handles = [model.get_submodule(n).register_forward_hook(watch(n)) for n in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_states(output: Any) -> Any:
    """Return what a block returned with nothing for its hidden states, which would add up."""
    if isinstance(output, torch.Tensor):
        return output.new_empty(0)
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        return type(output)((output[0].new_empty(0), *output[1:]))
    return output


def _looking(
    model: nn.Module,
    names: list[str],
    calls: Calls,
    seen: dict[str, Call],
    inputs: ActivationStore,
) -> AbstractContextManager[None]:
    """Make blocks record their arguments and pass hidden states on as they are."""

    def look(name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            x, seen[name] = taken_apart(args, kwargs)
            if name == names[0]:
                inputs[len(calls)] = x
            if name == names[-1]:
                raise Enough
            return calls.like(name, x)

        return forward

    return standing_in(model, {name: look(name) for name in names})


class _Sharing:
    """Puts tensors into a store, one for all that equal those of the batch before.

    Masks and rotary embeddings are the same for most batches and blocks, and would add up.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._before: dict[Any, tuple[torch.Tensor, _Place]] = {}

    def call(self, name: str, call: Call) -> Call:
        """Return what a block is called with, with places for tensors."""
        args, kwargs = call
        return self._value(args, name), {k: self._value(v, (name, k)) for k, v in kwargs.items()}

    def _value(self, value: Any, what: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._place(value, what)
        if type(value) is tuple:
            return tuple(self._value(v, (what, i)) for i, v in enumerate(value))
        return value  # lists and mappings as they are: blocks may share state through them

    def _place(self, x: torch.Tensor, what: Any) -> _Place:
        found = self._before.get(what)
        if found is None or not (found[0] is x or _alike(found[0], x)):
            found = next((pair for pair in self._before.values() if pair[0] is x), None)
            found = found or self._kept(x)
            self._before[what] = found
        return found[1]

    def _kept(self, x: torch.Tensor) -> tuple[torch.Tensor, _Place]:
        place = _Place(len(self._store))
        self._store[place.number] = x
        return x, place


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
