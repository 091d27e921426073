"""Proof of rescaling groups by experiment: rescale, run again, compare the outputs.

Each experiment has a control, in which only the producer is rescaled. Without it a group would be
"proved" whose modules have no effect on this input: 0 · (b(a(x))) is unchanged by any factors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.graph.block_selection import BlockCall
from quark.torch.graph.replay import (
    TOLERANCE,
    float_tensors,
    is_half,
    output_distance,
    replace_forwards,
    upcast_half,
)
from quark.torch.graph.residency import around, resident
from quark.torch.graph.structure import Edit, Rejection, RescalingGroup
from quark.torch.graph.trace import iter_tensors
from quark.torch.graph.unreached import Counterparts, edits_any, iterate_pairings, swap_parameters

_SEED = 20
_Run = Callable[[], list[torch.Tensor]]


@torch.no_grad()
def prove_groups(
    model: nn.Module,
    run: Callable[[], object],
    blocks: dict[str, list[BlockCall]],
    groups: Iterable[RescalingGroup],
    counterparts: Counterparts,
) -> tuple[list[RescalingGroup], list[Rejection]]:
    """Keep the groups whose rescaling leaves the function of the model unchanged.

    Each group is rescaled by random factors in [0.5, 2]. The block of the group, or the part of the
    model outside of the blocks, runs again on the recorded inputs. The output must be the same, and
    must change in the control. All groups of a block are tested together first, since random
    factors do not cancel; one by one if that fails. Half precision is computed in float32.

    Args:
        model: The model. It is unchanged in the end, bit by bit.
        run: Runs the model once.
        blocks: Recorded calls of each block in one run.
        groups: Candidates.
        counterparts: Modules that the run did not reach -> modules that it did. A group that edits
            a counterpart is tested again with the parameters of the unreached module in its place.

    Returns:
        The proved groups, and the others with the reasons.
    """
    by_block: dict[str, list[RescalingGroup]] = defaultdict(list)
    for group in groups:
        by_block[group.block].append(group)
    proved: list[RescalingGroup] = []
    rejected: list[Rejection] = []
    for block, candidates in by_block.items():
        edited = {e.parameter for group in candidates for e in group.edits}
        if block:
            attempt = _repeat_calls(model.get_submodule(block), blocks[block])
        else:
            attempt = _run_around_blocks(model, run, blocks, edited)
        used = [block] if block else [*around(model, blocks), *edited]
        try:
            with resident(model, *used), attempt as again:
                good, bad = _test_groups(model, again, candidates)
                for pairs in iterate_pairings(counterparts, good):
                    touched = [g for g in good if edits_any(g, pairs.values())]
                    with resident(model, *pairs), swap_parameters(model, pairs):
                        still_good, worse = _test_groups(model, again, touched)
                    good = [g for g in good if g in still_good or g not in touched]
                    bad += worse
        except Exception as error:  # anything that a model can raise
            reason = f"it cannot be run again as it ran before: {type(error).__name__}: {error}"
            good, bad = [], [Rejection(g.producer, g.consumers, reason) for g in candidates]
        proved += good
        rejected += bad
    return proved, rejected


def _test_groups(
    model: nn.Module, run: _Run, groups: Sequence[RescalingGroup]
) -> tuple[list[RescalingGroup], list[Rejection]]:
    generator = torch.Generator().manual_seed(_SEED)
    reference = run()
    factors = [_random_factors(group.size, generator) for group in groups]

    def change(edits: Iterable[tuple[Edit, torch.Tensor]]) -> float:
        with _apply_edits(model, edits):
            return output_distance(run(), reference)

    def all_edits(index: int) -> list[tuple[Edit, torch.Tensor]]:
        return [(edit, factors[index]) for edit in groups[index].edits]

    def control(index: int) -> float:
        return change((e, f) for e, f in all_edits(index) if e.power < 0)

    # Example: a norm and its readers q, k, v. Control: only the norm is divided, and the output
    # moves by 4.0. All four: it moves by 1e-6 <= TOLERANCE · 4.0, proved.
    controls = [control(i) for i in range(len(groups))]
    together = change(pair for i in range(len(groups)) for pair in all_edits(i))
    if all(together <= TOLERANCE * c and c > 0 for c in controls):
        return list(groups), []
    proved, rejected = [], []
    for index, group in enumerate(groups):
        reason = _rejection_reason(change(all_edits(index)), controls[index])
        if reason is None:
            proved.append(group)
        else:
            rejected.append(Rejection(group.producer, group.consumers, reason))
    return proved, rejected


def _rejection_reason(error: float, control: float) -> str | None:
    if math.isnan(control):
        return "the outputs are not finite"
    if not control > 0:
        return "rescaling the producer alone changes nothing: this input does not show its effect"
    if not error <= TOLERANCE * control:
        return (
            f"rescaling all of them changes the output by {error / control:.1e} of what rescaling "
            "the producer alone does"
        )
    return None


def _random_factors(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.exp2(
        torch.rand(size, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    )


@contextmanager
def _apply_edits(model: nn.Module, edits: Iterable[tuple[Edit, torch.Tensor]]) -> Iterator[None]:
    """Rescale parameters while the context is open. Afterwards they have their old bits."""
    saved: dict[str, torch.Tensor] = {}
    try:
        for edit, factors in edits:
            parameter = model.get_parameter(edit.parameter)
            if edit.parameter not in saved:
                saved[edit.parameter] = parameter.data
                parameter.data = parameter.data.clone()
            edit.apply_(model, factors)
        yield
    finally:
        for name, value in saved.items():
            model.get_parameter(name).data = value


@contextmanager
def _upcast_half_modules(modules: Iterable[nn.Module], recurse: bool = True) -> Iterator[None]:
    """Hold parameters and buffers of half precision in float32 while the context is open."""
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for module in modules:
            for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
                if is_half(tensor):
                    saved.append((tensor, tensor.data))
                    tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, value in saved:
            tensor.data = value


@contextmanager
def _repeat_calls(module: nn.Module, calls: Sequence[BlockCall]) -> Iterator[_Run]:
    """Yield a function that repeats recorded calls of a module."""
    inputs = [upcast_half((call.args, call.kwargs)) for call in calls]
    with _upcast_half_modules([module]):
        yield lambda: [t for args, kwargs in inputs for t in float_tensors(module(*args, **kwargs))]


@contextmanager
def _run_around_blocks(
    model: nn.Module,
    run: Callable[[], object],
    blocks: dict[str, list[BlockCall]],
    edited: set[str],
) -> Iterator[_Run]:
    """Yield a function that runs the model, with blocks that return their recorded outputs.

    Blocks with a parameter that will be edited run.
    """
    modules = {
        name: model.get_submodule(name)
        for name in blocks
        if not any(parameter.startswith(f"{name}.") for parameter in edited)
    }
    inside = {id(m) for block in modules.values() for m in block.modules()}
    outputs: list[Any] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)

    def again() -> list[torch.Tensor]:
        outputs.clear()
        run()
        return [t for output in outputs for t in float_tensors(output)]

    with ExitStack() as stack:
        outside = [m for m in model.modules() if id(m) not in inside]
        stack.enter_context(_upcast_half_modules(outside, recurse=False))
        for name, module in modules.items():
            stack.enter_context(_recall_outputs(module, blocks[name]))
        stack.callback(model.register_forward_hook(record).remove)
        yield again


@contextmanager
def _recall_outputs(module: nn.Module, calls: Sequence[BlockCall]) -> Iterator[None]:
    """Return the recorded output for a recorded input; run the module for any other input."""
    known = [(next(iter_tensors((c.args, c.kwargs))), c.output) for c in calls]
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = next(iter_tensors((args, kwargs)))
        for recorded, output in known:
            if x.shape == recorded.shape and torch.equal(x.to(recorded.dtype), recorded):
                return upcast_half(output)
        return own(*args, **kwargs)

    with replace_forwards(module, {"": forward}):
        yield
