"""The loop over the blocks of a model from the last to the first, for gradients of a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.checkpointing import checkpointed
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.float_products import float_products
from quark.torch.graph.replay import replace_forwards
from quark.torch.graph.residency import around, resident
from quark.torch.graph.trace import iter_tensors
from quark.torch.pipeline.activation_store import ActivationStore, current_limit
from quark.torch.pipeline.batches import (
    batch_values,
    flatten_batches,
    run_batch,
    show_progress,
    take_excerpt,
)
from quark.torch.pipeline.block import Block, HiddenStates, constant
from quark.torch.pipeline.capture import BlockArguments, capture
from quark.torch.pipeline.stacks import Stack, find_stacks

Loss = Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]


def run_blocks_backward(
    model: nn.Module,
    names: Iterable[str],
    batches: Iterable[Any],
    what: str,
    loss: Loss,
    limit: int | None = None,
) -> Iterator[tuple[Block, Callable[[int], torch.Tensor]]]:
    """Iterate over blocks from the last to the first, each with a function that runs it backward.

    The function takes the number of a batch, runs the block on it, and backward. It returns the
    gradient of the outputs of the block; hooks on tensors inside receive theirs. The caller calls
    it once for every batch.

    All blocks run forward once. Each runs forward again for its gradients, so that memory holds the
    graph of one block. The gradient of an earlier stack, such as an encoder, comes through the
    later ones, whose blocks run once more for it. Hidden states are held in memory up to a limit,
    then on disk. Parameters get no gradients.

    Args:
        model: The model.
        names: Its blocks in the order of execution.
        batches: Data for the model.
        what: Title of the progress bar.
        loss: Takes the logits of a batch, the mask of tokens that are not padding (None for all),
            and the number of its first sequence in the data; returns a loss.
        limit: Bytes of hidden states to hold in memory; None for ``current_limit``.

    Raises:
        ValueError: The model returns no logits.
    """
    names = list(names)
    with eval_mode(model), constant(model):
        stacks = find_stacks(model, names, batches)
        masks: dict[int, torch.Tensor | None] = {}  # of the last stack, whose tokens have logits
        for number in reversed(range(len(stacks))):
            part, later = stacks[number], stacks[number + 1 :]
            with ExitStack() as own:
                whole = current_limit() if limit is None else limit
                count = len(part.names) + 4
                stores = [own.enter_context(ActivationStore(whole // count)) for _ in range(count)]
                direct, gradients, others = _Direct(stores.pop()), stores.pop(), stores.pop()
                arguments = capture(model, part, batches, stores[0], others, number > 0)
                arguments.keep_outputs()
                if not later:
                    masks = dict(zip(arguments.numbers, arguments.masks, strict=True))
                blocks = [
                    Block(name, model.get_submodule(name), HiddenStates(*ends), None, arguments)
                    for name, ends in zip(part.names, pairwise(stores), strict=True)
                ]
                for block in _resident(model, blocks, f"{what}, forwards"):
                    _run_forward(block, part)
                ending = _Ending(model, part, later, arguments, masks, loss)
                for index, reaching in enumerate(_reaching(batches, arguments)):
                    found = ending.gradients(*reaching, blocks, index)
                    gradients[index] = found.pop(part.names[-1])
                    direct.add(index, found)
                for block in _resident(model, blocks[::-1], f"{what}, backwards"):
                    yield block, partial(_back, block, gradients, direct)


def _resident(model: nn.Module, blocks: Iterable[Block], what: str) -> Iterator[Block]:
    """Iterate over blocks with a progress bar, each in memory while it is at hand."""
    for block in show_progress(blocks, what):
        with resident(model, block.name):
            yield block


def _reaching(batches: Iterable[Any], arguments: BlockArguments) -> Iterator[tuple[Any, int]]:
    """Iterate over the batches that reach a stack, each with the number of its first sequence."""
    numbers, first = set(arguments.numbers), 0
    for number, batch in enumerate(flatten_batches(batches)):
        if number in numbers:
            yield batch, first
        first += next(
            (len(x) for x in batch_values(batch) if isinstance(x, torch.Tensor) and x.dim()), 0
        )


class _Direct:
    """Gradients of the outputs of blocks that do not come through the next block of the stack.

    There are some where what follows the stack reads more than the last outputs, such as a head
    that reads several hidden states.

    Args:
        store: Holds the gradients.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._places: dict[tuple[str, int], int] = {}

    def add(self, index: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Store the gradients of the outputs of blocks for a batch, by block."""
        for block, gradient in gradients.items():
            place = self._places[block, index] = len(self._places)
            self._store[place] = gradient

    def get(self, block: str, index: int) -> torch.Tensor | None:
        """Return the gradient of the outputs of a block for a batch; None without one."""
        place = self._places.get((block, index))
        return None if place is None else self._store[place]


def _back(block: Block, gradients: ActivationStore, direct: _Direct, index: int) -> torch.Tensor:
    """Run a block backward: replace the gradient of its outputs by that of its inputs."""
    output_gradient = gradients[index].clone()
    if (own := direct.get(block.name, index)) is not None:
        output_gradient += own
    gradients[index] = block.backward(index, output_gradient)
    return output_gradient


def _run_forward(block: Block, part: Stack) -> None:
    """Run all batches through a block of a stack.

    Raises:
        ValueError: See ``_check_constant``.
    """
    block.run()
    if part.shares and block.name == part.names[0]:
        _check_constant(block)


def _check_constant(first: Block) -> None:
    """Check that tensors that the first block of a stack makes for others need no gradients.

    Raises:
        ValueError: They depend on its inputs, and gradients through them are not followed.
    """
    outputs: list[Any] = []
    hook = first.module.register_forward_hook(lambda module, args, out: outputs.append(out))
    try:
        for index in range(min(len(first), 1)):
            first.backward(index, torch.zeros_like(first.outputs(index)))
    finally:
        hook.remove()
    if sum(tensor.requires_grad for tensor in iter_tensors(outputs)) > 1:
        raise ValueError(
            f"{first.name} computes tensors from its inputs for the blocks after it. Gradients "
            "through these tensors are not followed. Choose an algorithm without gradients, such "
            "as gptq."
        )


class _Ending(NamedTuple):
    """The part of a model after a stack.

    Attributes:
        model: The model.
        part: The stack.
        later: The stacks after it.
        arguments: The arguments of its blocks.
        masks: Number of a batch -> mask of the tokens that have logits.
        loss: See ``run_blocks_backward``.
    """

    model: nn.Module
    part: Stack
    later: list[Stack]
    arguments: BlockArguments
    masks: dict[int, torch.Tensor | None]
    loss: Loss

    def gradients(
        self, batch: Any, first: int, blocks: Sequence[Block], index: int
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of the loss with respect to outputs of the stack, by block.

        Gradients through a later block of the stack are left out. So are blocks without any; that
        of the last block is zero then.

        Args:
            batch: The batch.
            first: Number of its first sequence in the data.
            blocks: The blocks of the stack, which have run.
            index: Number of the batch among those that reach the stack.

        Raises:
            ValueError: What follows the stack reads tensors that a block computes from its inputs,
                beside hidden states.
        """
        last, others = blocks[-1], set[str]()
        gradients = {last.name: torch.zeros_like(last.outputs(index))}
        outputs: list[Any] = []
        forwards = {block.name: self._recall(block, index, gradients, others) for block in blocks}
        later = (name for part in self.later for name in part.names)
        forwards |= {n: checkpointed(self.model.get_submodule(n).forward) for n in later}
        hook = self.model.register_forward_hook(lambda module, args, out: outputs.append(out))
        # What the gradient passes stays; blocks run again when it passes them.
        kept = resident(self.model, *around(self.model, list(forwards)))
        try:
            # Around the backward pass too: blocks run again there, and as they ran before.
            products = float_products()
            with kept, replace_forwards(self.model, forwards), products, torch.enable_grad():
                run_batch(self.model, batch)
                logits = _logits(outputs.pop())
                mask = self.masks.get(self.arguments.numbers[index])
                if mask is not None and logits.shape[:-1] != mask.shape:
                    mask = None  # logits of whole sequences, as of a classifier
                value = self.loss(logits, mask, first)
                if value.requires_grad:  # else of another branch, such as classes beside boxes
                    value.backward()  # type: ignore[no-untyped-call]
        finally:
            hook.remove()
        for block in blocks:
            if block.name in others:
                _check_constant(block)
        return gradients

    def _recall(
        self, block: Block, index: int, gradients: dict[str, torch.Tensor], others: set[str]
    ) -> Callable[..., Any]:
        """Return a forward that returns the outputs of a block, and keeps their gradient.

        The name of the block joins ``others`` if a gradient reaches what it returns beside them.
        """

        def watch(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            leaf = value.detach().requires_grad_()
            leaf.register_hook(lambda gradient: others.add(block.name))  # type: ignore[no-untyped-call]
            return leaf

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Only the graph holds the leaf, so that outputs that nothing reads are not held.
            leaf = block.outputs(index).detach().requires_grad_()
            x = leaf.clone()  # the model may write to it in place
            keep = partial(gradients.__setitem__, block.name)
            leaf.register_hook(keep)  # type: ignore[no-untyped-call]
            output = self.arguments.wrap(block.name, x, index)
            if type(output) is not tuple:
                return output
            return tuple(item if item is x else watch(item) for item in output)

        return forward


@torch.no_grad()
def check_logits(model: nn.Module, batches: Iterable[Any]) -> None:
    """Check that a model returns logits for the first tokens of the data, which is quick.

    Raises:
        ValueError: It does not, so no loss can be computed.
    """
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with eval_mode(model):
            run_batch(model, take_excerpt(next(flatten_batches(batches))))
    finally:
        hook.remove()
    _logits(outputs[0])


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"Gradients need a model that returns logits, got {type(output).__name__} without any. "
            "Choose an algorithm without gradients, such as gptq, or a model with a head."
        )
    return logits
