"""Arguments that each block of a model receives for each batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.replay import replace_forwards
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.batches import flatten_batches, padding_mask, run_batch
from quark.torch.pipeline.chunks import count_calls
from quark.torch.pipeline.hidden_states import (
    Arguments,
    OutputForm,
    OutputForms,
    hidden_keyword,
    split_hidden_states,
)
from quark.torch.pipeline.reducer import Leaves
from quark.torch.pipeline.stacks import Stack, StopForward


class _Slot(NamedTuple):
    """The number of a tensor in a store."""

    number: int


class _Received(NamedTuple):
    """A call of a block: shape of the hidden states, other arguments, keyword of the former."""

    shape: torch.Size
    others: Arguments
    keyword: str | None


@dataclass
class BlockArguments:
    """The arguments of all blocks for all batches, without the hidden states.

    Attributes:
        store: Store of the tensors among the arguments.
        by_batch: For each batch, name of a block -> its arguments, with slots in place of tensors.
        masks: For each batch, which tokens of the hidden states are not padding, (sequences,
            tokens) bool; None for all.
        encoder_masks: For each batch, the same of an encoder whose states a decoder reads too; None
            if both have as many tokens, since shapes tell them apart.
        leaves: Division of the data among processes.
        numbers: For each batch, its number in the data: others did not reach the blocks, or belong
            to other processes.
        keywords: Name of a block -> argument that is its hidden states, None for the first one.
        forms: Name of a block -> form of its output.
        outputs: None; or (number of a batch, name of a block) -> what the block returned for it
            beside hidden states, with slots in place of tensors. Blocks that return hidden states
            alone have none.
    """

    store: ActivationStore
    leaves: Leaves
    by_batch: list[dict[str, Arguments]] = field(default_factory=list)
    masks: list[torch.Tensor | None] = field(default_factory=list)
    encoder_masks: list[torch.Tensor | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    keywords: dict[str, str | None] = field(default_factory=dict)
    forms: dict[str, OutputForm] = field(default_factory=dict)
    outputs: dict[tuple[int, str], Any] | None = None
    _deduplicator: _Deduplicator | None = None

    def call(self, index: int, name: str, x: torch.Tensor) -> Arguments:
        """Return the arguments of a block for one batch, with hidden states in their place."""
        (args, kwargs), keyword = self.get(index, name), self.keywords.get(name)
        return ((x, *args), kwargs) if keyword is None else (args, kwargs | {keyword: x})

    def get(self, index: int, name: str) -> Arguments:
        """Return the arguments that a block receives for one batch."""
        args, kwargs = self.by_batch[index][name]
        return self._fetch(args), {key: self._fetch(value) for key, value in kwargs.items()}

    def _fetch(self, value: Any) -> Any:
        if isinstance(value, _Slot):
            return self.store[value.number]
        return tuple(map(self._fetch, value)) if type(value) is tuple else value

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.by_batch)

    def keep_outputs(self) -> None:
        """Keep what blocks return beside hidden states from now on, for ``wrap``."""
        self.outputs, self._deduplicator = {}, _Deduplicator(self.store)

    def keep_output(self, index: int, name: str, output: Any) -> None:
        """Keep what a block returned first for a batch, if outputs are kept."""
        form = self.forms.get(name)
        if self.outputs is None or form is None or form.is_plain or (index, name) in self.outputs:
            return
        assert self._deduplicator is not None
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        rest = form._replace(output=output).wrap(none)
        self.outputs[index, name] = self._deduplicator.store_value(name, rest)

    def wrap(self, name: str, x: torch.Tensor, index: int | None = None) -> Any:
        """Return hidden states in the form in which a block returns them, such as a tuple.

        Args:
            name: The block.
            x: The hidden states.
            index: Number of the batch, for which the other items are those that were kept; None for
                those of the first batch.
        """
        kept = None if index is None or self.outputs is None else self.outputs.get((index, name))
        form = self.forms[name]
        return form.wrap(x) if kept is None else form._replace(output=self._fetch(kept)).wrap(x)

    def hidden_states(self, name: str, output: Any) -> torch.Tensor:
        """Return the hidden states in the output of a block.

        Raises:
            ValueError: There are none where they were in the first batch.
        """
        place = self.forms[name].place if name in self.forms else 0
        x = output if isinstance(output, torch.Tensor) else output[place]
        if not isinstance(x, torch.Tensor):
            raise ValueError(
                f"A block returned {type(output).__name__} without hidden states as its first item."
            )
        return x


@torch.no_grad()
def capture(
    model: nn.Module,
    part: Stack,
    batches: Iterable[Any],
    inputs: ActivationStore,
    others: ActivationStore,
    is_later: bool = False,
) -> BlockArguments:
    """Record the arguments of each block for each batch, and the inputs of the first block.

    The model runs with blocks that record their arguments and return their input, so a batch costs
    no more than what comes before them. Where blocks return more than hidden states, the first
    batch runs through the real blocks as well, to learn the form of their outputs. What comes
    after the last block, such as the output head, never runs: its logits can take more memory
    than a block. Batches that do not reach the blocks, such as texts without images before a vision
    tower, are left out. So are those of other processes.

    Args:
        model: The model.
        part: Its blocks. Real ones run if later ones receive what the first one makes.
        batches: Data for the model.
        inputs: Store for the hidden states that enter the first block, by batch.
        others: Store for other tensors, such as masks. Equal tensors of successive batches are
            stored once.
        is_later: Whether another stack runs before, such as an encoder. Then the mask is that of
            the decoder where the model knows two.

    Raises:
        ValueError: A block before the last one runs more than once in a forward pass.
    """
    leaves = Leaves(count_calls(batches))
    arguments, deduplicator = BlockArguments(others, leaves), _Deduplicator(others)
    names, forms = part.names, part.forms
    if all(name in forms and forms[name].is_plain for name in names):
        arguments.forms = {name: forms[name] for name in names}
    mask_name = _mask_name(model, is_later)
    for number, batch in enumerate(flatten_batches(batches)):
        if not leaves.is_own(number):
            continue
        if not arguments.forms:
            with _record_outputs(model, names, arguments), suppress(StopForward):
                run_batch(model, batch)
        received: dict[str, _Received] = {}
        with (
            _record_arguments(model, part, arguments, received, inputs),
            suppress(StopForward),
        ):
            run_batch(model, batch)
        if received.keys() != set(names):
            continue
        mask = padding_mask(batch, mask_name)
        arguments.by_batch.append({n: deduplicator.store(n, r.others) for n, r in received.items()})
        shape = received[names[0]].shape
        arguments.masks.append(_fitting(mask, shape))
        encoder = padding_mask(batch) if mask_name != "attention_mask" else None
        arguments.encoder_masks.append(None if _fitting(encoder, shape) is not None else encoder)
        arguments.numbers.append(number)
        arguments.keywords.update({n: r.keyword for n, r in received.items()})
    return arguments


def _mask_name(model: nn.Module, is_later: bool) -> str:
    """Return the argument of the model that marks the padding of a stack."""
    known = inspect.signature(model.forward).parameters
    name = "decoder_attention_mask"
    return name if is_later and name in known else "attention_mask"


def _fitting(mask: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """Return a mask if hidden states of a shape have its tokens, else None."""
    if mask is None or shape[:-1] not in (mask.shape, (mask.numel(),)):
        return None
    return mask


@contextmanager
def _record_outputs(
    model: nn.Module, names: list[str], arguments: BlockArguments
) -> Iterator[None]:
    """Record the forms of the outputs of blocks, and stop after the last block."""
    forms = OutputForms()
    arguments.forms = forms.by_name

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in arguments.forms:
                raise ValueError(f"{name} runs more than once in a forward pass.")
            x = split_hidden_states(args, kwargs)[0]
            forms.receive(x)
            forms.leave(name, output, x.shape)
            if name == names[-1]:
                raise StopForward

        return hook

    handles = [
        model.get_submodule(n).register_forward_hook(watch(n), with_kwargs=True) for n in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record_arguments(
    model: nn.Module,
    part: Stack,
    arguments: BlockArguments,
    received: dict[str, _Received],
    inputs: ActivationStore,
) -> AbstractContextManager[None]:
    """Make blocks record their arguments and return their hidden states unchanged, or run."""

    def record(name: str) -> Callable[..., Any]:
        own = model.get_submodule(name).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            x, others = split_hidden_states(args, kwargs)
            received[name] = _Received(x.shape, others, None if args else hidden_keyword(kwargs))
            if name == part.names[0]:
                inputs[len(arguments)] = x
            if name == part.names[-1]:
                raise StopForward
            return own(*args, **kwargs) if part.shares else arguments.wrap(name, x)

        return forward

    return replace_forwards(model, {name: record(name) for name in part.names})


class _Deduplicator:
    """Puts tensors into a store, one for all that equal those of the batch before.

    Example: 128 batches of 32 blocks receive the same (1, 1, 2048, 2048) mask: it is stored once,
    not 4096 times.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._previous: dict[Any, tuple[torch.Tensor, _Slot]] = {}

    def store(self, name: str, arguments: Arguments) -> Arguments:
        """Return the arguments of a block with slots in place of tensors."""
        args, kwargs = arguments
        return self._value(args, name), {k: self._value(v, (name, k)) for k, v in kwargs.items()}

    def store_value(self, name: str, value: Any) -> Any:
        """Return an output of a block with slots in place of tensors."""
        return self._value(value, name)

    def _value(self, value: Any, key: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._slot(value, key)
        if type(value) is tuple:
            return tuple(self._value(v, (key, i)) for i, v in enumerate(value))
        return value  # lists and mappings stay: blocks may share state through them

    def _slot(self, x: torch.Tensor, key: Any) -> _Slot:
        pair = self._previous.get(key)
        if pair is None or not (pair[0] is x or _are_equal(pair[0], x)):
            # The same tensor may have been stored for another block.
            pair = next((other for other in self._previous.values() if other[0] is x), None)
            pair = pair or self._store_new(x)
            self._previous[key] = pair
        return pair[1]

    def _store_new(self, x: torch.Tensor) -> tuple[torch.Tensor, _Slot]:
        slot = _Slot(len(self._store))
        self._store[slot.number] = x
        return x, slot


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
