"""The loop over the blocks of a model from the last to the first, for gradients of a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from quark.torch.graph.eval_mode import at_inference
from quark.torch.pipeline.activation_store import LIMIT, ActivationStore
from quark.torch.pipeline.batches import parts, progress, run_batch
from quark.torch.pipeline.capture import Calls, capture, standing_in, taken_apart
from quark.torch.pipeline.runner import Block, Stream

Loss = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def run_blocks_back(
    model: nn.Module,
    names: Iterable[str],
    batches: Iterable[Any],
    what: str,
    loss: Loss,
    limit: int = LIMIT,
) -> Iterator[tuple[Block, Callable[[int], torch.Tensor]]]:
    """Iterate over blocks from the last to the first, each with what takes a batch back through it.

    The caller takes every batch back, and is given the gradient by what the block returned for it;
    hooks on tensors within see theirs. Blocks run once
    forwards, and again one by one for their gradients, so that memory holds the graph of one. What
    reaches blocks waits in memory up to a limit, then on disk. Parameters get no gradients.

    Args:
        model: The model.
        names: Its blocks in the order of execution.
        batches: Data for the model.
        what: What is done, for the display of progress.
        loss: Given the logits of each batch in turn and which of its tokens are not padding,
            returns a loss.
        limit: Bytes of hidden states to hold in memory.

    Raises:
        ValueError: The model returns no logits.
    """
    names = list(names)
    with ExitStack() as stack:
        stack.enter_context(at_inference(model))
        stack.enter_context(_constant(model))
        share = limit // (len(names) + 3)
        stores = [stack.enter_context(ActivationStore(share)) for _ in range(len(names) + 3)]
        gradients, others = stores.pop(), stores.pop()
        calls = capture(model, names, batches, stores[0], others)
        blocks = [
            Block(name, model.get_submodule(name), Stream(*ends), None, calls)
            for name, ends in zip(names, pairwise(stores), strict=True)
        ]
        for block in progress(blocks, f"{what}, forwards"):
            block.run()
        for index, batch in enumerate(parts(batches)):
            last = blocks[-1].outputs(index)
            gradients[index] = _from_the_end(model, names, batch, last, calls, index, loss)
        for block in progress(blocks[::-1], f"{what}, backwards"):

            def back(index: int, block: Block = block) -> torch.Tensor:
                behind = gradients[index].clone()
                gradients[index] = block.back(index, behind)
                return behind

            yield block, back


def _from_the_end(
    model: nn.Module,
    names: list[str],
    batch: Any,
    last: torch.Tensor,
    calls: Calls,
    index: int,
    loss: Loss,
) -> torch.Tensor:
    """Return the gradient of the loss by what the last block returns for a batch."""
    last = last.detach().requires_grad_()
    found: list[Any] = []

    def skip(name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return calls.like(name, taken_apart(args, kwargs)[0] if name != names[-1] else last)

        return forward

    handle = model.register_forward_hook(lambda module, args, output: found.append(output))
    try:
        with standing_in(model, {name: skip(name) for name in names}), torch.enable_grad():
            run_batch(model, batch)
            value = loss(_logits(found.pop()), calls.masks[index])
            return torch.autograd.grad(value, last)[0]
    finally:
        handle.remove()


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"Gradients need a model that returns logits, got {type(output).__name__} without any."
        )
    return logits


@contextmanager
def _constant(model: nn.Module) -> Iterator[None]:
    """Ask for no gradients of parameters for a while."""
    asked = [p for p in model.parameters() if p.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)
