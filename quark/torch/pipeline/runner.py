"""The loop over the blocks of a model: every algorithm that needs data goes through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from quark.torch.graph.eval_mode import at_inference
from quark.torch.pipeline.activation_store import LIMIT, ActivationStore
from quark.torch.pipeline.batches import progress
from quark.torch.pipeline.capture import Calls, Enough, capture
from quark.torch.quantization.nn.experts import counting


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
        calls: Calls,
    ) -> None:
        self.name, self.module = name, module
        self._stream, self._reference = stream, reference
        self._calls = calls
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

    def masks(self, index: int) -> torch.Tensor | None:
        """Return which tokens of a batch are no padding, (sequences, tokens) bool; None for all."""
        return self._calls.masks[index]

    def outputs(self, index: int) -> torch.Tensor:
        """Return what the last run returned for a batch."""
        return self._stream.outputs[index]

    def target(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what ``refer`` found for a batch, and which of its tokens are not padding."""
        assert self._reference is not None
        return self._reference.outputs[index], self._calls.masks[index]

    def call(
        self, index: int, parameters: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return what the block returns for a batch now, gradients included.

        Args:
            index: Number of the batch.
            parameters: What to take in place of parameters of the block, by their names in it.
        """
        return self._pass(index, self._stream.inputs[index], parameters)

    def back(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient by what enters the block for a batch, given that by what leaves it.

        Hooks on tensors within see theirs.
        """
        with torch.enable_grad():
            x = self._stream.inputs[index].detach().requires_grad_()
            y = self._pass(index, x)
        return torch.autograd.grad(y, x, gradient)[0]

    def _pass(
        self, index: int, x: torch.Tensor, parameters: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        args, kwargs = self._calls.of(index, self.name)
        self.mask = self._calls.masks[index]
        try:
            with counting(self.module, index):
                y = functional_call(self.module, dict(parameters or {}), (x, *args), kwargs)
            return _hidden(y)
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
        batches: Data for the model. Without any, blocks come without data.
        what: What is done, for the display of progress.
        limit: Bytes of hidden states to hold in memory.
        compare: Whether to keep the second stream, of the model as it was.
    """
    names = list(names)
    with ExitStack() as stack:
        share = limit // (5 if compare else 3)
        stores = [stack.enter_context(ActivationStore(share)) for _ in range(5)]
        stream, reference = Stream(*stores[:2]), Stream(*stores[2:4]) if compare else None
        stack.enter_context(at_inference(model))
        calls = capture(model, names, batches, stream.inputs, stores[4])
        if reference is not None:
            for index in range(len(calls)):
                reference.inputs[index] = stream.inputs[index]
        for name in progress(names, what):
            block = Block(name, model.get_submodule(name), stream, reference, calls)
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
