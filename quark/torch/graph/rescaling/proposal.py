"""Candidates for rescaling, derived from the trace of one forward pass."""

from __future__ import annotations

import heapq
from collections import defaultdict

import torch

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.rescaling.factor_flow import FactorFlow, ParameterUse
from quark.torch.graph.structure import Edit, Rejection, RescalingGroup
from quark.torch.graph.trace import Trace


def propose_groups(trace: Trace, aliases: Aliases) -> tuple[list[RescalingGroup], list[Rejection]]:
    """Find candidates for rescaling.

    The factors of every axis of every parameter are followed to the operations that read them. A
    parameter whose factors stop at the first operation is not a producer, and is left out.

    Returns:
        Candidates and rejections, in the order in which their producers run.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        for value in op.inputs:
            readers[value.number].append(index)
    order = sorted(aliases.readers, key=lambda name: aliases.readers[name][0])
    groups, rejected = [], []
    for parameter in order:
        shape = aliases.shapes[parameter]
        for axis, size in enumerate(shape):
            if size == 1 and len(shape) > 2:
                continue  # of a kernel: one factor for the whole parameter
            flow = FactorFlow(aliases, parameter, axis)
            if not _propagate(flow, trace, readers):
                continue
            group = _make_group(flow, parameter, axis, trace, aliases)
            if isinstance(group, Rejection):
                rejected.append(group)
            else:
                groups.append(group)
    return groups, rejected


def _propagate(flow: FactorFlow, trace: Trace, readers: dict[int, list[int]]) -> bool:
    """Follow the factors to the end; return whether they passed any operation."""
    pending: list[int] = []
    seen: set[int] = set()

    def push(number: int) -> None:
        for index in readers[number]:
            if index not in seen:
                seen.add(index)
                heapq.heappush(pending, index)

    sources = set(flow.flows)
    for number in sources:
        push(number)
    while pending:
        index = heapq.heappop(pending)
        op = trace.ops[index]
        if op.outputs and sources.issuperset(v.number for v in op.outputs):
            continue  # the outputs are aliases of the parameter
        if op.is_empty:
            continue
        if flow.propagate(index, op):
            for value in op.outputs:
                push(value.number)
                if value.number in trace.results:
                    flow.stop(value, "leaves the model")
    return len(flow.flows) > len(sources)


def _make_group(
    flow: FactorFlow, parameter: str, axis: int, trace: Trace, aliases: Aliases
) -> RescalingGroup | Rejection:
    """Build the group of a flow, or reject it if another operation reads its parameters."""
    producer = parameter.rpartition(".")[0]
    consumers = tuple(dict.fromkeys(n.rpartition(".")[0] for n in flow.consumers))
    own = set(aliases.numbers[parameter])
    used = (trace.ops[index].inputs for index in aliases.readers[parameter])
    offsets = {aliases.by_number[v.number].offset for i in used for v in i if v.number in own}
    if len(offsets) > 1:
        return Rejection(producer, consumers, "is read both with and without a constant added")
    for name, uses in [*flow.biases.items(), *flow.consumers.items()]:
        conflict = _find_conflicting_reader(name, uses, trace, aliases)
        if conflict or name == parameter:
            reason = f"is also read {conflict}" if conflict else "multiplies its own output"
            return Rejection(producer, consumers, f"{name} {reason}")
    reached = torch.zeros_like(flow.stopped)
    for uses in flow.consumers.values():
        for labels in (use.labels for use in uses.values()):
            reached[labels[labels >= 0]] = True
    free = reached & ~flow.stopped
    if not free.any():
        return Rejection(producer, consumers, flow.reason or "is read by no weight")
    factors = torch.full(
        (len(free) + 1,), -1, device="cpu"
    )  # label -> factor; the last is that of label -1
    factors[:-1][free] = torch.arange(int(free.sum()), device="cpu")
    edits = [Edit(parameter, axis, factors[:-1], -1, *offsets)]
    for name, uses in [*flow.biases.items(), *flow.consumers.items()]:
        use = next(iter(uses.values()))
        edits.append(Edit(name, use.axis, factors[use.labels], use.power, use.offset))
    edits = [edit for edit in edits if bool((edit.index >= 0).any())]
    touched = {e.parameter for e in edits}
    absorbing = (n for n in flow.consumers if n in touched)
    return RescalingGroup(
        kind="norm" if len(aliases.shapes[parameter]) == 1 else "linear",
        producer=producer,
        consumers=tuple(dict.fromkeys(n.rpartition(".")[0] for n in absorbing)),
        block=flow.blocks.pop() if len(flow.blocks) == 1 else "",
        size=int(free.sum()),
        edits=tuple(edits),
    )


def _find_conflicting_reader(
    name: str, uses: dict[int, ParameterUse], trace: Trace, aliases: Aliases
) -> str | None:
    """Return the operation that reads a parameter but requires another change of it, or None."""
    first = next(iter(uses.values()))
    for index in aliases.readers[name]:
        if index not in uses or not uses[index].matches(first):
            op = trace.ops[index]
            return f"by {op.name} {op.location}"
    return None
