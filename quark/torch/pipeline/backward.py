"""The loop over the blocks of a model from the last to the first, for gradients of a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.pipeline.activation_store import LIMIT, ActivationStore
from quark.torch.pipeline.batches import flatten_batches, run_batch, show_progress
from quark.torch.pipeline.capture import (
    BlockArguments,
    capture,
    replace_forwards,
    split_hidden_states,
)
from quark.torch.pipeline.runner import Block, HiddenStates

Loss = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def run_blocks_backward(
    model: nn.Module,
    names: Iterable[str],
    batches: Iterable[Any],
    what: str,
    loss: Loss,
    limit: int = LIMIT,
) -> Iterator[tuple[Block, Callable[[int], torch.Tensor]]]:
    """Iterate over blocks from the last to the first, each with a function that runs it backward.

    The function takes the number of a batch, runs the block on it, and backward. It returns the
    gradient of the outputs of the block; hooks on tensors inside receive theirs. The caller calls
    it once for every batch.

    All blocks run forward once. Each runs forward again for its gradients, so that memory holds the
    graph of one block. Hidden states are held in memory up to a limit, then on disk. Parameters get
    no gradients.

    Args:
        model: The model.
        names: Its blocks in the order of execution.
        batches: Data for the model.
        what: Title of the progress bar.
        loss: Takes the logits of a batch and the mask of tokens that are not padding (None for
            all), and returns a loss.
        limit: Bytes of hidden states to hold in memory.

    Raises:
        ValueError: The model returns no logits.
    """
    names = list(names)
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.enter_context(_constant(model))
        share = limit // (len(names) + 3)
        stores = [stack.enter_context(ActivationStore(share)) for _ in range(len(names) + 3)]
        gradients, others = stores.pop(), stores.pop()
        arguments = capture(model, names, batches, stores[0], others)
        blocks = [
            Block(name, model.get_submodule(name), HiddenStates(*ends), None, arguments)
            for name, ends in zip(names, pairwise(stores), strict=True)
        ]
        for block in show_progress(blocks, f"{what}, forwards"):
            block.run()
        for index, batch in enumerate(flatten_batches(batches)):
            last = blocks[-1].outputs(index)
            gradients[index] = _gradient_of_last_block(
                model, names, batch, last, arguments, index, loss
            )
        for block in show_progress(blocks[::-1], f"{what}, backwards"):

            def back(index: int, block: Block = block) -> torch.Tensor:
                output_gradient = gradients[index].clone()
                gradients[index] = block.backward(index, output_gradient)
                return output_gradient

            yield block, back


def _gradient_of_last_block(
    model: nn.Module,
    names: list[str],
    batch: Any,
    last: torch.Tensor,
    arguments: BlockArguments,
    index: int,
    loss: Loss,
) -> torch.Tensor:
    """Return the gradient of the loss with respect to the outputs of the last block."""
    last = last.detach().requires_grad_()
    outputs: list[Any] = []

    def skip(name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return arguments.wrap(
                name, split_hidden_states(args, kwargs)[0] if name != names[-1] else last
            )

        return forward

    handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with replace_forwards(model, {name: skip(name) for name in names}), torch.enable_grad():
            run_batch(model, batch)
            value = loss(_logits(outputs.pop()), arguments.masks[index])
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
    """Switch off gradients of parameters while the context is open."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
