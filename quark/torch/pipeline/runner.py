"""The loop over the blocks of a model: every algorithm that needs data goes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.inference import at_inference
from quark.torch.pipeline.inference import (
    padding_mask,
    parts,
    progress,
    run_batch,
)
from quark.torch.pipeline.store import LIMIT, ActivationStore

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a block is called with besides hidden states


class Enough(Exception):
    """Ends a forward pass whose rest is not needed."""


class Stream(NamedTuple):
    """Hidden states that enter a block, by batch, and what it returned for them."""

    inputs: ActivationStore
    outputs: ActivationStore

    def onward(self) -> Stream:
        """Return the stream as the next block sees it."""
        self.inputs.clear()
        return Stream(self.outputs, self.inputs)


class Block:
    """A block of the model and the data that reaches it.

    There may be a second stream beside that of the model as it becomes: what reaches the block in
    the model as it was, to compare with.

    Attributes:
        name: Full name of the module.
        module: The module.
        mask: While data runs, (batch, tokens) bool: which tokens are not padding; or None.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        stream: Stream,
        reference: Stream | None,
        calls: list[dict[str, Call]],
        masks: list[torch.Tensor | None],
    ) -> None:
        self.name, self.module = name, module
        self._stream, self._reference = stream, reference
        self._calls, self._masks = calls, masks
        self.mask: torch.Tensor | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Send all data through the block; the next block gets what the last run returned."""
        for index in range(len(self)):
            self._stream.outputs[index] = self.call(index)

    @torch.no_grad()
    def look(self, index: int) -> None:
        """Send a batch through the block for hooks to see, which may raise ``Enough``."""
        with suppress(Enough):
            self.call(index)

    @torch.no_grad()
    def refer(self, index: int) -> None:
        """Send a batch of the second stream through the block, whose weights must be as they were.

        Hooks may raise ``Enough``; the last time for each batch they must not.
        """
        assert self._reference is not None
        with suppress(Enough):
            x = self._reference.inputs[index]
            self._reference.outputs[index] = self._pass(index, x)

    def outputs(self, index: int) -> torch.Tensor:
        """Return what the last run returned for a batch."""
        return self._stream.outputs[index]

    def call(self, index: int) -> torch.Tensor:
        """Return what the block returns for a batch now, gradients included."""
        return self._pass(index, self._stream.inputs[index])

    def _pass(self, index: int, x: torch.Tensor) -> torch.Tensor:
        args, kwargs = self._calls[index][self.name]
        self.mask = self._masks[index]
        try:
            return _hidden(self.module(x, *args, **kwargs))
        finally:
            self.mask = None

    def finish(self) -> None:
        """Run what was not run."""
        if self._reference is not None:
            for index in range(len(self._reference.outputs), len(self)):
                self.refer(index)
        if len(self._stream.outputs) < len(self):
            self.run()

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._calls)


def run_blocks(
    model: nn.Module,
    names: Iterable[str],
    batches: Iterable[Any],
    what: str,
    limit: int = LIMIT,
    compare: bool = False,
) -> Iterator[Block]:
    """Iterate over blocks with the data that reaches each; the caller runs it.

    A block that was not run when the next one is asked for is run then. What a batch calls the
    blocks with is found by running the model with blocks that only look; hidden states between
    blocks are held in memory up to a limit, then on disk.

    Args:
        model: The model.
        names: Its blocks in the order of execution.
        batches: Data for the model.
        what: What is done, for the display of progress.
        limit: Bytes of hidden states to hold in memory.
        compare: Whether to keep the second stream, of the model as it was.

    Raises:
        ValueError: There are no batches.
    """
    names = list(names)
    with ExitStack() as stack:
        share = limit // (4 if compare else 2)
        stores = [stack.enter_context(ActivationStore(share)) for _ in range(4)]
        stream, reference = Stream(*stores[:2]), Stream(*stores[2:]) if compare else None
        stack.enter_context(at_inference(model))
        calls, masks = _capture(model, names, batches, stream.inputs)
        if reference is not None:
            for index in range(len(calls)):
                reference.inputs[index] = stream.inputs[index]
        for name in progress(names, what):
            block = Block(name, model.get_submodule(name), stream, reference, calls, masks)
            yield block
            block.finish()
            stream, reference = stream.onward(), reference and reference.onward()


def _hidden(output: Any) -> torch.Tensor:
    """Return the hidden states in what a block returns."""
    found = output if isinstance(output, torch.Tensor) else output[0]
    if not isinstance(found, torch.Tensor):
        raise ValueError(
            f"A block returned {type(output).__name__} without hidden states as its first item."
        )
    return found


@torch.no_grad()
def _capture(
    model: nn.Module, names: list[str], batches: Iterable[Any], inputs: ActivationStore
) -> tuple[list[dict[str, Call]], list[torch.Tensor | None]]:
    """Record what each batch calls each block with, and the hidden states of the first."""
    calls: list[dict[str, Call]] = []
    masks: list[torch.Tensor | None] = []
    kept: dict[Any, Any] = {}
    returned: dict[str, Any] = {}
    for batch in parts(batches):
        if not calls:
            with _watching(model, names, returned):
                run_batch(model, batch)
        seen: dict[str, Call] = {}
        with _looking(model, names, returned, seen, inputs, len(calls)), suppress(Enough):
            run_batch(model, batch)
        calls.append({name: _shared(call, kept, name) for name, call in seen.items()})
        masks.append(padding_mask(batch))
    if not calls:
        raise ValueError("There is no calibration data: give at least one batch.")
    return calls, masks


@contextmanager
def _watching(model: nn.Module, names: list[str], returned: dict[str, Any]) -> Iterator[None]:
    """Record what blocks return."""

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name in returned:
                raise ValueError(f"{name} runs more than once in a forward pass.")
            returned[name] = output

        return hook

    handles = [model.get_submodule(n).register_forward_hook(watch(n)) for n in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _looking(
    model: nn.Module,
    names: list[str],
    returned: dict[str, Any],
    seen: dict[str, Call],
    inputs: ActivationStore,
    index: int,
) -> Iterator[None]:
    """Make blocks record their arguments and pass hidden states on as they are."""

    def look(name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                x, args = args[0], args[1:]
            else:
                x = kwargs.pop("hidden_states")
            if name == names[0]:
                inputs[index] = x
            seen[name] = args, kwargs
            if name == names[-1]:
                raise Enough
            like = returned[name]
            return x if isinstance(like, torch.Tensor) else type(like)((x, *like[1:]))

        return forward

    modules = {name: model.get_submodule(name) for name in names}
    own = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = look(name)
    try:
        yield
    finally:
        for name, module in modules.items():
            del module.forward
            before = own[name]
            if before is not None:
                module.forward = before


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
