"""Proof by trying: what is rescaled must compute the same, and must matter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from quark.torch.graph.structure import Edit, Rejected, ScaleGroup
from quark.torch.graph.trace import Call, tensors
from quark.torch.graph.unreached import Siblings, exchanged, rounds, taking_part

# The largest part of what the producer alone changes that may be left when all are rescaled.
TOLERANCE = 1e-3
_SEED = 20
_Run = Callable[[], list[torch.Tensor]]


@torch.no_grad()
def prove(
    model: nn.Module,
    run: Callable[[], object],
    blocks: dict[str, list[Call]],
    groups: Iterable[ScaleGroup],
    siblings: Siblings,
) -> tuple[list[ScaleGroup], list[Rejected]]:
    """Keep the groups which provably leave what the model computes unchanged.

    Each is rescaled by random factors in [0.5, 2], within the block it lies in, or within what
    surrounds the blocks. The output must stay the same, and must change if the producer alone is
    rescaled. All groups of a block are tried at once: random factors do not cancel. Each is tried
    alone if that fails. Half precision is lifted to single meanwhile.

    Args:
        model: The model. It is unchanged in the end, bit by bit.
        run: Runs the model once.
        blocks: The recorded calls of each block in one run.
        groups: Candidates.
        siblings: Modules that the run did not reach, and those that can stand for them. What is
            proved of these is tried again with the parameters of those.

    Returns:
        The groups that are proved, and the others with the reasons.
    """
    by_block: dict[str, list[ScaleGroup]] = defaultdict(list)
    for group in groups:
        by_block[group.block].append(group)
    proved: list[ScaleGroup] = []
    rejected: list[Rejected] = []
    for block, candidates in by_block.items():
        if block:
            attempt = _repeated(model.get_submodule(block), blocks[block])
        else:
            edited = {e.parameter for group in candidates for e in group.edits}
            attempt = _surroundings(model, run, blocks, edited)
        try:
            with attempt as again:
                good, bad = _try(model, again, candidates)
                for pairs in rounds(siblings, good):
                    touched = [g for g in good if taking_part(g, pairs.values())]
                    with exchanged(model, pairs):
                        kept, worse = _try(model, again, touched)
                    good = [g for g in good if g in kept or g not in touched]
                    bad += worse
        except Exception as error:  # anything that a model can raise
            reason = f"it cannot be run again as it ran before: {type(error).__name__}: {error}"
            good, bad = [], [Rejected(g.producer, g.consumers, reason) for g in candidates]
        proved += good
        rejected += bad
    return proved, rejected


def _try(
    model: nn.Module, run: _Run, groups: Sequence[ScaleGroup]
) -> tuple[list[ScaleGroup], list[Rejected]]:
    generator = torch.Generator().manual_seed(_SEED)
    reference = run()
    factors = [_random_factors(group.size, generator) for group in groups]

    def change(edits: Iterable[tuple[Edit, torch.Tensor]]) -> float:
        with _edited(model, edits):
            return distance(run(), reference)

    def everything(index: int) -> list[tuple[Edit, torch.Tensor]]:
        return [(edit, factors[index]) for edit in groups[index].edits]

    def control(index: int) -> float:
        return change((e, f) for e, f in everything(index) if e.power < 0)

    controls = [control(i) for i in range(len(groups))]
    together = change(pair for i in range(len(groups)) for pair in everything(i))
    if all(together <= TOLERANCE * c and c > 0 for c in controls):
        return list(groups), []
    proved, rejected = [], []
    for index, group in enumerate(groups):
        reason = _judge(change(everything(index)), controls[index])
        if reason is None:
            proved.append(group)
        else:
            rejected.append(Rejected(group.producer, group.consumers, reason))
    return proved, rejected


def _judge(error: float, control: float) -> str | None:
    if math.isnan(control):
        return "the outputs are not finite"
    if not control > 0:
        return "rescaling the producer alone changes nothing: the input does not show what it does"
    if not error <= TOLERANCE * control:
        return (
            f"rescaling all of them changes the output by {error / control:.1e} of what rescaling "
            "the producer alone does"
        )
    return None


def _random_factors(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.exp2(torch.rand(size, generator=generator, dtype=torch.float64) * 2 - 1)


def distance(tensors: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean distance, NaN if it is not finite."""
    pairs = zip(tensors, reference, strict=True)
    total = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return math.sqrt(total) if math.isfinite(total) else math.nan


@contextmanager
def _edited(model: nn.Module, edits: Iterable[tuple[Edit, torch.Tensor]]) -> Iterator[None]:
    """Rescale parameters for a while. Their values are put back, not computed back."""
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
def _lifted(modules: Iterable[nn.Module], recurse: bool = True) -> Iterator[None]:
    """Compute in single precision for a while what is in half precision."""
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for module in modules:
            for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
                if _is_half(tensor):
                    saved.append((tensor, tensor.data))
                    tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, value in saved:
            tensor.data = value


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def lifted(tree: Any) -> Any:
    """Return nested tensors with those of half precision in single."""
    return tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) and _is_half(t) else t, tree)


def floats(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in nested ones."""
    return [t for t in tensors(output) if t.is_floating_point()]


@contextmanager
def _repeated(module: nn.Module, calls: Sequence[Call]) -> Iterator[_Run]:
    """Give what repeats recorded calls of a module."""
    given = [lifted((call.args, call.kwargs)) for call in calls]
    with _lifted([module]):
        yield lambda: [t for args, kwargs in given for t in floats(module(*args, **kwargs))]


@contextmanager
def _surroundings(
    model: nn.Module,
    run: Callable[[], object],
    blocks: dict[str, list[Call]],
    edited: set[str],
) -> Iterator[_Run]:
    """Give what runs a model. Blocks recall what they gave if they get what they got.

    Blocks with a parameter that will be edited do run.
    """
    modules = {
        name: model.get_submodule(name)
        for name in blocks
        if not any(parameter.startswith(f"{name}.") for parameter in edited)
    }
    inside = {id(m) for block in modules.values() for m in block.modules()}
    outputs: list[Any] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output)

    def again() -> list[torch.Tensor]:
        outputs.clear()
        run()
        return [t for output in outputs for t in floats(output)]

    with ExitStack() as stack:
        outside = [m for m in model.modules() if id(m) not in inside]
        stack.enter_context(_lifted(outside, recurse=False))
        for name, module in modules.items():
            stack.enter_context(_recalling(module, blocks[name]))
        stack.callback(model.register_forward_hook(keep).remove)
        yield again


@contextmanager
def _recalling(module: nn.Module, calls: Sequence[Call]) -> Iterator[None]:
    """Let a module give what it gave before, as long as it gets what it got."""
    known = [(next(tensors((c.args, c.kwargs))), c.output) for c in calls]

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = next(tensors((args, kwargs)))
        for before, output in known:
            if given.shape == before.shape and torch.equal(given.to(before.dtype), before):
                return lifted(output)
        return type(module).forward(module, *args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
