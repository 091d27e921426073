"""The loop over the blocks of a model, for algorithms that need data.

Each block sees the data twice. With blocks A and B, and a batch x:

    x -> A, with hooks            the algorithm observes the inputs of the layers of A
    the algorithm changes A
    x -> A'                       pass without hooks: its outputs are the inputs of B

So B is calibrated with the errors of the quantized blocks before it. A model with several stacks,
such as an encoder and a decoder, goes on so: the data runs through the model with its changed
encoder up to the first block of the decoder, whose inputs are recorded there.

With a journal, blocks that an earlier run has finished are restored: data only runs through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.residency import resident
from quark.torch.pipeline.activation_store import ActivationStore, current_limit
from quark.torch.pipeline.batches import show_progress
from quark.torch.pipeline.block import Block, HiddenStates
from quark.torch.pipeline.capture import BlockArguments, capture
from quark.torch.pipeline.journal import Journal
from quark.torch.pipeline.journaled_pass import JournaledPass, Run
from quark.torch.pipeline.stacks import Stack, find_stacks
from quark.torch.pipeline.statistics import digest


def run_blocks(
    model: nn.Module,
    names: Iterable[str],
    batches: Iterable[Any],
    what: str,
    limit: int | None = None,
    compare: bool = False,
    journal: Journal | None = None,
    around: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Block]:
    """Iterate over blocks, each with the data that reaches it; the caller runs the data.

    A block that the caller did not run is run before the next one. Hidden states between blocks are
    held in memory up to a limit, then on disk. Blocks that are finished in the journal are left
    out: they get the state that the caller gave them. It must not run a block that it has changed.

    Args:
        model: The model.
        names: Its blocks in the order of execution.
        batches: Data for the model; may be empty.
        what: Title of the progress bar.
        limit: Bytes of hidden states to hold in memory; None for ``current_limit``.
        compare: Whether to keep the reference: hidden states of the unchanged model.
        journal: Where finished blocks are, and go to; None for nowhere.
        around: Returns a context for a block, which stays open until the last block is finished.

    Raises:
        OSError: The disk is too full for the journal.
        ValueError: The journal is of a machine that computes other values.
    """
    names = list(names)
    finished = None if journal is None else JournaledPass(model, names, journal)
    if finished is not None and finished.restore_all():
        return
    with ExitStack() as stack, eval_mode(model):
        stacks = find_stacks(model, names, batches)
        steps = _Steps(finished, lambda name: stack.enter_context(around(name)), stacks)
        later = len(stacks) - 1 if compare else 0  # whose references wait in stores of their own
        whole = current_limit() if limit is None else limit
        share = whole // ((5 if compare else 3) + 3 * later)
        new_store = partial(_open_store, stack, share)
        references = {
            part.names[0]: _Reference.capture(model, part, batches, new_store)
            for part in (stacks[1:] if compare else ())
        }
        progress = iter(show_progress(names, what))
        for number, part in enumerate(stacks):
            with ExitStack() as own:
                new = partial(_open_store, own, share)
                stream, others = HiddenStates(new(), new()), new()
                arguments = capture(model, part, batches, stream.inputs, others, number > 0)
                stream.outputs.reserve(stream.inputs)
                reference = references.get(part.names[0])
                if compare and reference is None:
                    reference = _Reference.copy(stream.inputs, arguments, new)
                yield from _run_stack(model, part, stream, reference, arguments, progress, steps)
        next(progress, None)  # ends the bar


def _open_store(stack: ExitStack, limit: int) -> ActivationStore:
    return stack.enter_context(ActivationStore(limit))


class _Reference(NamedTuple):
    """Hidden states that enter a stack in the unchanged model, and the other arguments there."""

    stream: HiddenStates
    arguments: BlockArguments

    @classmethod
    def capture(
        cls,
        model: nn.Module,
        part: Stack,
        batches: Iterable[Any],
        new_store: Callable[[], ActivationStore],
    ) -> _Reference:
        """Record those of a later stack, before the model is changed."""
        stream = HiddenStates(new_store(), new_store())
        arguments = capture(model, part, batches, stream.inputs, new_store(), True)
        stream.outputs.reserve(stream.inputs)
        return cls(stream, arguments)

    @classmethod
    def copy(
        cls,
        inputs: ActivationStore,
        arguments: BlockArguments,
        new_store: Callable[[], ActivationStore],
    ) -> _Reference:
        """Copy those of the first stack, which is not changed yet."""
        stream = HiddenStates(new_store(), new_store())
        for index in range(len(arguments)):
            stream.inputs[index] = inputs[index]
        stream.outputs.reserve(inputs)
        return cls(stream, arguments)


class _Steps(NamedTuple):
    """What is done with each block.

    Attributes:
        finished: The finished blocks, None without a journal.
        enter: Opens the context of a block.
        stacks: The stacks. No block needs the outputs of the last block of the last one.
    """

    finished: JournaledPass | None
    enter: Callable[[str], Any]
    stacks: list[Stack]

    def run(self, block: Block) -> Iterator[Block]:
        """Restore a finished block, or let the caller have it; run the data that did not run."""
        is_needed = block.name != self.stacks[-1].names[-1]
        if self.finished is None or block.name not in self.finished:
            self.enter(block.name)
            with nullcontext() if self.finished is None else self.finished.watch():
                yield block
            is_first = block.has_run
            if is_needed:
                block.finish()
            if self.finished is not None:
                self.finished.write(block.name, Run(is_first, _digest_outputs(block)))
        else:
            self._restore(block, self.finished, is_needed)

    def _restore(self, block: Block, finished: JournaledPass, is_needed: bool) -> None:
        """Restore a block, and run the data through it as it ran when it was finished."""
        if is_needed:
            block.finish_reference()
        self.enter(block.name)
        if is_needed and finished.runs_first(block.name):
            block.run()
        finished.restore(block.name)
        if is_needed:
            block.finish()
        finished.finish_restored(block.name, _digest_outputs(block) if is_needed else {})


def _digest_outputs(block: Block) -> dict[int, str]:
    """Return a digest of what a block returned for the first batch of each leaf, by its number."""
    return {number: digest(*outputs) for number, outputs in block.first_outputs()}


def _run_stack(
    model: nn.Module,
    part: Stack,
    stream: HiddenStates,
    reference: _Reference | None,
    arguments: BlockArguments,
    progress: Iterator[Any],
    steps: _Steps,
) -> Iterator[Block]:
    """Iterate over the blocks of a stack; see ``run_blocks``."""
    float_stream = reference and reference.stream
    for name in part.names:
        next(progress)
        block = Block(
            name,
            model.get_submodule(name),
            stream,
            float_stream,
            arguments,
            reference and reference.arguments,
        )
        with resident(model, name):
            yield from steps.run(block)
        stream, float_stream = stream.advance(), float_stream and float_stream.advance()
