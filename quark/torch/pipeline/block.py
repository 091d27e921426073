"""A block of a model, and the data that reaches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from quark.torch.graph.float_products import float_products
from quark.torch.numerics.finite import is_finite
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.capture import BlockArguments
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.reducer import Reducer
from quark.torch.pipeline.stacks import StopForward
from quark.torch.quantization.nn.expert_tokens import count_tokens
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

    def fold(self, index: int) -> int | None:
        """Return the fold that the leaf of a batch belongs to, 0 or 1; None if there is one leaf.

        Adjacent leaves belong to different folds, in which what one fold suggests is judged by the
        other.
        """
        leaves = self._arguments.leaves
        return leaves.leaf_of(self.number(index)) % 2 if leaves.count > 1 else None

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

    def first_outputs(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Iterate over (number of the first batch of a leaf, outputs for it).

        The outputs of the reference are among them. There are none without runs.
        """
        streams = [self._stream, *([] if self._reference is None else [self._reference])]
        leaves = map(self._leaf, range(self._arguments.leaves.count))
        for index in (batches[0] for batches in leaves if batches):
            outputs = [stream.outputs[index] for stream in streams if len(stream.outputs)]
            if outputs:
                yield self.number(index), outputs

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
            leaf = self._stream.inputs[index].detach().requires_grad_()
            x = leaf.clone()  # the block may write to it in place
            args, kwargs = self._arguments.call(index, self.name, x)
            # Layers of cross-attention read another stream, such as the states of an encoder.
            streams = [leaf]
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
        # A copy, because a block may write to its input in place, as `nn.ReLU(inplace=True)` does.
        args, kwargs = (arguments or self._arguments).call(index, self.name, x.clone())
        return self._call(index, args, kwargs, parameters)

    def _call(
        self,
        index: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        processes().check_others()
        self.mask = self._arguments.masks[index]
        try:
            encoder = self._arguments.encoder_masks[index]
            tokens = count_tokens(self.module, self.number(index))
            with padding(self.mask, encoder), tokens, float_products():
                y = functional_call(self.module, dict(parameters or {}), args, kwargs)
            self._arguments.keep_output(index, self.name, y)
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


def _is_stream(tensor: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether an argument of a block has the axes of hidden states."""
    return tensor.is_floating_point() and tensor.dim() == x.dim()


@contextmanager
def constant(module: nn.Module) -> Iterator[None]:
    """Switch off gradients of parameters while the context is open.

    Gradients of activations then have the same bits for every model: torch chooses another kernel
    for attention with a bias that needs a gradient.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
