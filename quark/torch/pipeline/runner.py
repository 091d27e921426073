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

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.residency import resident
from quark.torch.numerics.finite import is_finite
from quark.torch.pipeline.activation_store import ActivationStore, current_limit
from quark.torch.pipeline.batches import show_progress
from quark.torch.pipeline.capture import BlockArguments, StopForward, capture
from quark.torch.pipeline.journal import Journal
from quark.torch.pipeline.journaled_pass import JournaledPass, Run
from quark.torch.pipeline.reducer import Reducer
from quark.torch.pipeline.stacks import Stack, find_stacks
from quark.torch.quantization.nn.experts import count_tokens
from quark.torch.quantization.nn.padding import padding, without_padding


class HiddenStates(NamedTuple):
    """Hidden states that enter a block, by batch, and the outputs of the block for them."""

    inputs: ActivationStore
    outputs: ActivationStore

    def advance(self) -> HiddenStates:
        """Return the hidden states of the next block: the outputs of this one are its inputs."""
        self.inputs.recycle()
        return HiddenStates(self.outputs, self.inputs)


class Block:
    """A block of the model and the data that reaches it.

    There may be a second set of hidden states, the reference: those that reach the block in the
    unchanged model.

    Attributes:
        name: Full name of the module.
        module: The module.
        mask: While data runs, (sequences, tokens) bool, which tokens are not padding; None for all.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        stream: HiddenStates,
        reference: HiddenStates | None,
        arguments: BlockArguments,
        reference_arguments: BlockArguments | None = None,
    ) -> None:
        self.name, self.module = name, module
        self._stream, self._reference = stream, reference
        self._arguments = arguments
        self._reference_arguments = reference_arguments or arguments
        self.mask: torch.Tensor | None = None

    def run(self) -> None:
        """Run all batches through the block. The next block receives the last outputs."""
        for index in range(len(self)):
            self.run_batch(index)

    @torch.no_grad()
    def run_batch(self, index: int) -> None:
        """Run a batch through the block. The next block receives its last outputs."""
        self._stream.outputs[index] = self._checked(index, self.call(index))

    def reduce(self, reducer: Reducer[Any]) -> Iterator[list[int]]:
        """Iterate over the leaves of this process, each a list of batches; see ``Reducer.run``."""
        return reducer.run(self._arguments.leaves, self._leaf)

    def _leaf(self, leaf: int) -> list[int]:
        """Return the batches of a leaf."""
        leaves, numbers = self._arguments.leaves, self._arguments.numbers
        return [index for index, n in enumerate(numbers) if leaves.leaf_of(n) == leaf]

    def number(self, index: int) -> int:
        """Return the number of a batch in the data of all processes."""
        return self._arguments.numbers[index]

    @torch.no_grad()
    def observe(self, index: int) -> None:
        """Run a batch through the block for its hooks, which may raise `StopForward`."""
        with suppress(StopForward):
            self.call(index)

    @torch.no_grad()
    def run_reference(self, index: int) -> None:
        """Run a batch of the reference through the block, before its weights are changed.

        Hooks may raise `StopForward`, except in the last run of each batch.
        """
        assert self._reference is not None
        with suppress(StopForward):
            x = self._reference.inputs[index]
            self._reference.outputs[index] = self._checked(
                index, self._pass(index, x, arguments=self._reference_arguments)
            )

    def _checked(self, index: int, y: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the block for a batch, which must be finite.

        Raises:
            ValueError: An output of a token that is not padding is NaN or infinite.
        """
        with padding(self._arguments.masks[index]):
            if not is_finite(without_padding(y)):
                raise ValueError(
                    f"The outputs of {self.name} were NaN or infinite: check the data, or load "
                    f"the model in a wider type than {y.dtype}."
                )
        return y

    def masks(self, index: int) -> torch.Tensor | None:
        """Return which tokens of a batch are not padding, (sequences, tokens) bool, or None."""
        return self._arguments.masks[index]

    def first_outputs(self) -> list[torch.Tensor]:
        """Return the outputs for the first batch, of the reference too; none without runs."""
        streams = [self._stream, *([] if self._reference is None else [self._reference])]
        return [stream.outputs[0] for stream in streams if len(stream.outputs)]

    def outputs(self, index: int) -> torch.Tensor:
        """Return the outputs of the last run for a batch."""
        return self._stream.outputs[index]

    def reference_output(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the reference output for a batch, and the mask of tokens that are not padding."""
        assert self._reference is not None
        return self._reference.outputs[index], self._arguments.masks[index]

    def call(
        self, index: int, parameters: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the output of the block for a batch, with its graph where gradients are enabled.

        Args:
            index: Number of the batch.
            parameters: Name of a parameter in the block -> tensor to use in its place.
        """
        return self._pass(index, self._stream.inputs[index], parameters)

    def backward(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs of a batch, given the gradient of the outputs.

        Hooks on tensors inside of the block receive their gradients.
        """
        with torch.enable_grad():
            x = self._stream.inputs[index].detach().requires_grad_()
            args, kwargs = self._arguments.call(index, self.name, x)
            # Layers of cross-attention read another stream, such as the states of an encoder.
            streams = [x]
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, torch.Tensor) and tensor is not x and _is_stream(tensor, x):
                    streams.append(tensor.requires_grad_())
            y = self._call(index, args, kwargs)
        return torch.autograd.grad(y, streams, gradient, allow_unused=True)[0]

    def _pass(
        self,
        index: int,
        x: torch.Tensor,
        parameters: Mapping[str, torch.Tensor] | None = None,
        arguments: BlockArguments | None = None,
    ) -> torch.Tensor:
        args, kwargs = (arguments or self._arguments).call(index, self.name, x)
        return self._call(index, args, kwargs, parameters)

    def _call(
        self,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        self.mask = self._arguments.masks[index]
        try:
            encoder = self._arguments.encoder_masks[index]
            with padding(self.mask, encoder), count_tokens(self.module, self.number(index)):
                y = functional_call(self.module, dict(parameters or {}), args, kwargs)
            return self._arguments.hidden_states(self.name, y)
        finally:
            self.mask = None

    @property
    def has_run(self) -> bool:
        """Whether all batches have run through the block."""
        return len(self._stream.outputs) == len(self)

    def finish(self) -> None:
        """Run the batches that the caller did not run."""
        self.finish_reference()
        if not self.has_run:
            self.run()

    def finish_reference(self) -> None:
        """Run the batches of the reference that the caller did not run."""
        if self._reference is not None:
            for index in range(len(self._reference.outputs), len(self)):
                self.run_reference(index)

    def __len__(self) -> int:
        """Return the number of batches of this process."""
        return len(self._arguments)


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
                arguments = capture(
                    model, part.names, batches, stream.inputs, others, part.shares, number > 0
                )
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
        arguments = capture(
            model, part.names, batches, stream.inputs, new_store(), part.shares, True
        )
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
                self.finished.write(block.name, Run(is_first, block.first_outputs()))
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
        finished.finish_restored(block.name, block.first_outputs() if is_needed else [])


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


def _is_stream(tensor: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether an argument of a block has the axes of hidden states."""
    return tensor.is_floating_point() and tensor.dim() == x.dim()
