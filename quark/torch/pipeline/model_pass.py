"""A pass of data through a whole model.

A model in memory takes the batches one by one. Of a model larger than memory each part is read
once: what comes before the blocks takes all batches, then each block does, then what follows.
Passes over several models can take turns (``interleaved_passes``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.replay import replace_forwards
from quark.torch.graph.residency import residency_of, resident
from quark.torch.graph.trace import trace_blocks
from quark.torch.pipeline.activation_store import ActivationStore, current_limit
from quark.torch.pipeline.batch_padding import batch_padding
from quark.torch.pipeline.batches import flatten_batches, run_batch, show_progress, take_excerpt
from quark.torch.pipeline.block import Block, HiddenStates
from quark.torch.pipeline.capture import BlockArguments, capture
from quark.torch.pipeline.chunks import count_calls, own_calls
from quark.torch.pipeline.hidden_states import split_hidden_states
from quark.torch.pipeline.interleaved_passes import Pauses, Steps, complete, deliver, never
from quark.torch.pipeline.stacks import Stack, find_stacks
from quark.torch.quantization.nn.expert_tokens import count_tokens

Receiver = Callable[[int, Any], None]


def run_data(
    model: nn.Module,
    batches: Iterable[Any],
    what: str,
    observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
    receive: Receiver | None = None,
    limit: int | None = None,
    observed: Collection[str] | None = None,
) -> int:
    """Run every batch of this process through a model, in evaluation mode.

    A model that is larger than memory ends after its last block if nothing more is asked for: its
    logits can take more memory than a block.

    Args:
        model: The model.
        batches: Data for the model, repeatable.
        what: Title of the progress bar.
        observe: Opened while data runs; each module runs once for each batch inside.
        receive: Takes the number of a batch and the output of the model for it; None if outputs
            are not needed.
        limit: Bytes of hidden states to hold in memory; None for ``current_limit``.
        observed: Names of the modules that ``observe`` looks at; None for any.

    Returns:
        The number of batches of all processes.
    """
    return complete(data_steps(model, batches, what, observe, receive, limit, observed))


@torch.no_grad()
def data_steps(
    model: nn.Module,
    batches: Iterable[Any],
    what: str,
    observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
    receive: Receiver | None = None,
    limit: int | None = None,
    observed: Collection[str] | None = None,
    call: Callable[[nn.Module, Any], Any] = run_batch,
    pauses: Pauses = never,
) -> Steps[int]:
    """Return a pass of data that can take turns with others; see ``run_data``.

    Args:
        model: As in ``run_data``, like the arguments that follow.
        batches: Likewise.
        what: Likewise.
        observe: Likewise; left and opened again at each pause.
        receive: Likewise.
        limit: Likewise.
        observed: Likewise.
        call: Runs the model on a batch and returns what ``receive`` takes.
        pauses: Whether to pause after the output of a batch.
    """
    with eval_mode(model):
        blocks = _find_blocks(model, batches) if residency_of(model) is not None else []
        if blocks:
            bound = current_limit() if limit is None else limit
            ends_early = receive is None and _are_inside(blocks, observed)
            ending = None if ends_early else _Ending(receive or _drop, call, pauses)
            return (yield from _run_by_blocks(model, blocks, batches, what, observe, ending, bound))
        count, is_own = 0, own_calls(batches)

        def run(batch: Any) -> None:
            nonlocal count
            if is_own(count):
                with batch_padding(model, batch), count_tokens(model, count):
                    (receive or _drop)(count, call(model, batch))
            count += 1

        yield from deliver(flatten_batches(show_progress(batches, what)), observe, run, pauses)
        return count


class _Ending(NamedTuple):
    """Arguments of ``data_steps`` for the part of a pass after the blocks."""

    receive: Receiver
    call: Callable[[nn.Module, Any], Any]
    pauses: Pauses


def _drop(index: int, output: Any) -> None:
    """Receive an output that is not needed."""


def _are_inside(blocks: Collection[str], names: Collection[str] | None) -> bool:
    """Whether modules lie in blocks; None stands for modules that are not known."""
    inside = tuple(f"{block}." for block in blocks)
    return names is not None and all(f"{name}.".startswith(inside) for name in names)


def _find_blocks(model: nn.Module, batches: Iterable[Any]) -> list[str]:
    """Return the blocks of a model; none if one of them runs more than once."""
    first = next(flatten_batches(batches), None)
    if first is None:
        return []
    calls = trace_blocks(model, lambda: run_batch(model, take_excerpt(first)))
    return list(calls) if all(len(runs) == 1 for runs in calls.values()) else []


class _Finished(NamedTuple):
    """A stack that all batches have passed.

    Attributes:
        part: The stack.
        arguments: The arguments of its blocks.
        outputs: What its last block returned.
    """

    part: Stack
    arguments: BlockArguments
    outputs: ActivationStore

    def forwards(self, current: _Current) -> dict[str, Callable[..., Any]]:
        """Return forwards that take the place of the blocks; the last returns the outputs."""

        def forward(name: str, *args: Any, **kwargs: Any) -> Any:
            x = split_hidden_states(args, kwargs)[0]
            index = self.arguments.numbers.index(current.number)
            if name == self.part.names[-1]:
                x = self.outputs[index]
            return self.arguments.wrap(name, x, index)

        return {name: partial(forward, name) for name in self.part.names}


class _Current:
    """Batches that know the number of the one that runs.

    Attributes:
        number: The number.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.number = 0

    def __iter__(self) -> Iterator[Any]:
        for self.number, batch in enumerate(flatten_batches(self._batches)):  # noqa: B020
            yield batch


def _run_by_blocks(
    model: nn.Module,
    names: list[str],
    batches: Iterable[Any],
    what: str,
    observe: Callable[[], AbstractContextManager[Any]],
    ending: _Ending | None,
    limit: int,
) -> Steps[int]:
    """Run every batch through one block after the other; see ``data_steps``.

    Without ``ending`` the pass ends after the last block.
    """
    stacks = find_stacks(model, names, batches)
    current = _Current(batches)
    with ExitStack() as stack:
        new = partial(_open_store, stack, limit // (3 * len(stacks)))
        progress = iter(show_progress([*names, *(["the rest"] if ending else [])], what))
        forwards: dict[str, Callable[..., Any]] = {}
        for number, part in enumerate(stacks):
            stream, others = HiddenStates(new(), new()), new()
            with replace_forwards(model, forwards):
                arguments = capture(model, part, current, stream.inputs, others, number > 0)
            arguments.keep_outputs()
            stream.outputs.reserve(stream.inputs)
            for name in part.names:
                next(progress)
                block = Block(name, model.get_submodule(name), stream, None, arguments)
                with resident(model, name), observe():
                    block.run()
                stream = stream.advance()
                yield False
            stream.outputs.clear()
            forwards |= _Finished(part, arguments, stream.inputs).forwards(current)
        next(progress, None)
        if ending is None:
            return count_calls(batches)
        receive, call, pauses = ending
        count, is_own = 0, own_calls(batches)

        def run(batch: Any) -> None:
            nonlocal count
            if is_own(count):
                with batch_padding(model, batch):
                    receive(count, call(model, batch))
            count += 1

        @contextmanager
        def behind_blocks() -> Iterator[None]:
            with replace_forwards(model, forwards), observe():
                yield

        yield from deliver(current, behind_blocks, run, pauses)
        next(progress, None)  # ends the bar
    return count


def _open_store(stack: ExitStack, limit: int) -> ActivationStore:
    return stack.enter_context(ActivationStore(limit))
