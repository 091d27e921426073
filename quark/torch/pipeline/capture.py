"""What each batch calls each block of a model with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quark.torch.pipeline.inference import padding_mask, parts, run_batch
from quark.torch.pipeline.store import ActivationStore

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a block is called with besides hidden states


class Enough(Exception):
    """Ends a forward pass whose rest is not needed."""


@dataclass
class Calls:
    """What batches call blocks with besides hidden states.

    Attributes:
        of_batch: For each batch, calls by name of the block.
        masks: For each batch, (sequences, tokens) bool: which tokens are not padding; or None.
        returned: What each block returned for some batch, but for the hidden states.
    """

    of_batch: list[dict[str, Call]] = field(default_factory=list)
    masks: list[torch.Tensor | None] = field(default_factory=list)
    returned: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, index: int) -> dict[str, Call]:
        """Return the calls of a batch."""
        return self.of_batch[index]

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.of_batch)

    def like(self, name: str, x: torch.Tensor) -> Any:
        """Return hidden states in the form in which a block returns them."""
        form = self.returned[name]
        return x if isinstance(form, torch.Tensor) else type(form)((x, *form[1:]))


@torch.no_grad()
def capture(
    model: nn.Module, names: list[str], batches: Iterable[Any], inputs: ActivationStore
) -> Calls:
    """Record what each batch calls each block with, and the hidden states of the first.

    The model is run with blocks that only look.

    Args:
        model: The model.
        names: Its blocks in the order of execution.
        batches: Data for the model.
        inputs: Takes in the hidden states that enter the first block, by batch.
    """
    calls = Calls()
    kept: dict[Any, Any] = {}
    for batch in parts(batches):
        if not calls:
            with _watching(model, names, calls.returned):
                run_batch(model, batch)
        seen: dict[str, Call] = {}
        with _looking(model, names, calls, seen, inputs), suppress(Enough):
            run_batch(model, batch)
        calls.of_batch.append({name: _shared(call, kept, name) for name, call in seen.items()})
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


def _shared(call: Call, kept: dict[Any, Any], name: str) -> Call:
    args, kwargs = call
    return _share(args, kept, name), {k: _share(v, kept, (name, k)) for k, v in kwargs.items()}


def _share(value: Any, kept: dict[Any, Any], place: Any) -> Any:
    """Return ``value`` with tensors that equal those of the batch before replaced by them.

    Masks and rotary embeddings are the same for most batches, and would add up.
    """
    if isinstance(value, torch.Tensor):
        before = kept.get(place)
        if (
            before is not None
            and before.shape == value.shape
            and before.dtype == value.dtype
            and torch.equal(before, value)
        ):
            return before
        kept[place] = value
        return value
    if type(value) is tuple:
        return tuple(_share(v, kept, (place, i)) for i, v in enumerate(value))
    return value  # lists and mappings as they are: blocks may share state through them
