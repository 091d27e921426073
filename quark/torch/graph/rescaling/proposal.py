"""Candidates for rescaling, read off the operations of one forward pass."""

from __future__ import annotations

import heapq
from collections import defaultdict

import torch

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.rescaling.flow import Spread, Taken, operands
from quark.torch.graph.structure import Edit, Rejected, ScaleGroup
from quark.torch.graph.trace import Trace

ORIGIN = {"view", "_unsafe_view", "reshape", "clone", "alias", "detach"}


def propose(trace: Trace, aliases: Aliases) -> tuple[list[ScaleGroup], list[Rejected]]:
    """Find what could be rescaled, and what could not.

    Every axis of every parameter is followed to whatever reads it. A parameter whose factors do
    not get through the first operation that reads it produces nothing, and is not mentioned.

    Returns:
        Candidates and rejected ones, in the order in which their producers run.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        for value in op.inputs:
            readers[value.number].append(index)
    order = sorted(aliases.readers, key=lambda name: aliases.readers[name][0])
    groups, rejected = [], []
    for parameter in order:
        for axis in range(len(aliases.shapes[parameter])):
            spread = Spread(aliases, parameter, axis)
            if not _follow(spread, trace, readers):
                continue
            found = _conclude(spread, parameter, axis, trace, aliases)
            if isinstance(found, Rejected):
                rejected.append(found)
            else:
                groups.append(found)
    return groups, rejected


def _follow(spread: Spread, trace: Trace, readers: dict[int, list[int]]) -> bool:
    """Carry factors as far as they go; return whether they got through any operation."""
    pending: list[int] = []
    seen: set[int] = set()

    def push(number: int) -> None:
        for index in readers[number]:
            if index not in seen:
                seen.add(index)
                heapq.heappush(pending, index)

    sources = set(spread.flows)
    for number in sources:
        push(number)
    while pending:
        index = heapq.heappop(pending)
        op = trace.ops[index]
        if op.outputs and sources.issuperset(v.number for v in op.outputs):
            continue  # makes another form of the parameter
        if op.is_idle:
            continue
        if spread.step(index, op):
            for value in op.outputs:
                push(value.number)
                if value.number in trace.results:
                    spread.stop(value, "leaves the model")
    return len(spread.flows) > len(sources)


def _conclude(
    spread: Spread, parameter: str, axis: int, trace: Trace, aliases: Aliases
) -> ScaleGroup | Rejected:
    """Make a group of what was followed, unless something else reads its parameters."""
    producer = parameter.rpartition(".")[0]
    consumers = tuple(dict.fromkeys(n.rpartition(".")[0] for n in spread.absorbed))
    own = set(aliases.numbers[parameter])
    used = (trace.ops[index].inputs for index in aliases.readers[parameter])
    offsets = {aliases.by_number[v.number].offset for i in used for v in i if v.number in own}
    if len(offsets) > 1:
        return Rejected(producer, consumers, "is read both as it is and with a constant added")
    for name, taken in [*spread.joined.items(), *spread.absorbed.items()]:
        unlike = _read_otherwise(name, taken, trace, aliases)
        if unlike or name == parameter:
            reason = f"{name} is also read {unlike or 'by itself'}"
            return Rejected(producer, consumers, reason)
    reached = torch.zeros_like(spread.stopped)
    for taken in spread.absorbed.values():
        for labels in (use.labels for use in taken.values()):
            reached[labels[labels >= 0]] = True
    free = reached & ~spread.stopped
    if not free.any():
        return Rejected(producer, consumers, spread.reason or "is read by no weight")
    factors = torch.full((len(free) + 1,), -1)  # label -> factor; the last is that of label -1
    factors[:-1][free] = torch.arange(int(free.sum()))
    edits = [Edit(parameter, axis, factors[:-1], -1, *offsets)]
    for name, uses in [*spread.joined.items(), *spread.absorbed.items()]:
        use = next(iter(uses.values()))
        edits.append(Edit(name, use.axis, factors[use.labels], use.power, use.offset))
    edits = [edit for edit in edits if bool((edit.index >= 0).any())]
    touched = {e.parameter for e in edits}
    absorbing = (n for n in spread.absorbed if n in touched)
    return ScaleGroup(
        kind="norm" if len(aliases.shapes[parameter]) == 1 else "linear",
        producer=producer,
        consumers=tuple(dict.fromkeys(n.rpartition(".")[0] for n in absorbing)),
        block=spread.blocks.pop() if len(spread.blocks) == 1 else "",
        size=int(free.sum()),
        edits=tuple(edits),
    )


def _read_otherwise(
    name: str, uses: dict[int, Taken], trace: Trace, aliases: Aliases
) -> str | None:
    """Return who reads a parameter without what the others ask of it, if anyone does."""
    first = next(iter(uses.values()))
    for index in aliases.readers[name]:
        if index not in uses or not uses[index].same(first):
            op = trace.ops[index]
            return f"by {op.name} {op.where}"
    return None


def origins(trace: Trace) -> dict[int, int]:
    """Return the number of the tensor that each other form of it was made of."""
    origin: dict[int, int] = {}
    for op in trace.ops:
        if op.name in ORIGIN:
            number = op.inputs[0].number
            for value in op.outputs:
                origin.setdefault(value.number, origin.get(number, number))
    return origin


def shared_inputs(trace: Trace, aliases: Aliases) -> tuple[tuple[str, ...], ...]:
    """Return the modules whose weights multiply the very same tensor, in the order of execution."""
    origin = origins(trace)
    found: dict[int, dict[str, None]] = defaultdict(dict)
    for op in trace.ops:
        factors = operands(op)
        if factors is not None:
            _, other, right = factors
            weight = aliases.by_number.get(right.number)
            if weight is not None and other.number not in aliases.by_number:
                name = weight.parameter.rpartition(".")[0]
                found[origin.get(other.number, other.number)][name] = None
    return tuple(tuple(names) for names in found.values() if len(names) > 1)
