"""Parameters that the traced input did not reach: experts without tokens, branches not taken.

Modules that did not run are treated like their counterparts: members of the same list, with
parameters of the same names and shapes, that did run. Example: ``experts.3`` got no token, its
counterparts are ``experts.0`` and ``experts.2``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from quark.torch.graph.structure import Edit, Rejection, RescalingGroup

Counterparts = dict[str, tuple[str, ...]]  # module that did not run -> modules that did
Unread = dict[str, list[tuple[str, torch.Size]]]  # block -> names and shapes of weights
_Signature = tuple[tuple[str, torch.Size], ...]


def find_counterparts(model: nn.Module, read: Iterable[str]) -> Counterparts:
    """Find members of module lists that did not run, such as experts, and their counterparts.

    Args:
        model: The model.
        read: Names of the parameters that were read.

    Returns:
        Module without any parameter that was read -> modules of the same list with parameters of
        the same names and shapes, all of which were read.
    """
    read_names = set(read)
    slots: dict[str, dict[str, torch.Size]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        slot = _innermost_number(name)
        if slot:
            slots[slot][name.removeprefix(slot)] = parameter.shape
    reached: dict[tuple[str, _Signature], list[str]] = defaultdict(list)
    unreached: list[tuple[str, tuple[str, _Signature]]] = []
    for slot, shapes in slots.items():
        key = slot.rpartition(".")[0], tuple(shapes.items())
        was_read = [slot + ending in read_names for ending in shapes]
        if all(was_read):
            reached[key].append(slot)
        elif not any(was_read):
            unreached.append((slot, key))
    return {slot: tuple(reached[key]) for slot, key in unreached if reached[key]}


def _innermost_number(name: str) -> str:
    """Return a name up to its last number: "experts.3" for "experts.3.up.weight"."""
    parts = name.split(".")
    ends = [i + 1 for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: ends[-1]]) if ends else ""


def find_unread_weights(
    model: nn.Module, blocks: Iterable[str], read: Iterable[str], counterparts: Counterparts
) -> Unread:
    """Find weights that were not read and have no counterpart.

    With other inputs they may read the same tensors as weights that were read. Lists of which no
    member ran, such as the layers of a vision tower, belong to another part of the model and are
    left out.

    Returns:
        Block (empty outside of blocks) -> names and shapes.
    """
    known, blocks = set(read), list(blocks)
    unread: Unread = defaultdict(list)
    for name, parameter in model.named_parameters():
        is_known = name in known or any(name.startswith(f"{slot}.") for slot in counterparts)
        if not is_known and parameter.dim() > 1:
            block = next((b for b in blocks if name.startswith(f"{b}.")), "")
            module_list = _innermost_number(name).rpartition(".")[0]
            if block or not module_list or any(n.startswith(f"{module_list}.") for n in known):
                unread[block].append((name, parameter.shape))
    return unread


def reject_unread_readers(
    groups: Iterable[RescalingGroup], unread: Unread
) -> tuple[list[RescalingGroup], list[Rejection]]:
    """Reject groups if an unread weight in their block has the width of their producer's output."""
    kept: list[RescalingGroup] = []
    rejected: list[Rejection] = []
    for group in groups:
        width = len(group.edits[0].index)
        weights = unread.get(group.block, ())
        reader = next((name for name, shape in weights if width in shape), None)
        if reader is None:
            kept.append(group)
        else:
            reason = f"{reader} was not read: it may read the output with other inputs"
            rejected.append(Rejection(group.producer, group.consumers, reason))
    return kept, rejected


def edits_any(group: RescalingGroup, modules: Iterable[str]) -> bool:
    """Whether a group edits parameters of any of the given members of lists."""
    return not {_innermost_number(e.parameter) for e in group.edits}.isdisjoint(modules)


def iterate_pairings(
    counterparts: Counterparts, groups: Iterable[RescalingGroup]
) -> Iterator[dict[str, str]]:
    """Iterate over pairings of modules that did not run with counterparts that groups edit.

    Each module that did not run is in exactly one pairing. Example: experts 0, 2 and 4 did not run,
    1 and 3 did: {0: 1, 2: 3}, then {4: 1}.

    Yields:
        Module that did not run -> module in whose place it can run.
    """
    parts = {_innermost_number(e.parameter) for group in groups for e in group.edits}
    waiting = {u: s for u, s in counterparts.items() if not parts.isdisjoint(s)}
    while waiting:
        pairs: dict[str, str] = {}
        for slot, reached in waiting.items():
            host = next((s for s in reached if s not in pairs.values()), None)
            if host is not None:
                pairs[slot] = host
        yield pairs
        waiting = {u: s for u, s in waiting.items() if u not in pairs}


@contextmanager
def swap_parameters(model: nn.Module, pairs: dict[str, str]) -> Iterator[None]:
    """Swap the parameters of pairs of modules while the context is open."""

    def swap() -> None:
        for one, other in pairs.items():
            first, second = model.get_submodule(one), model.get_submodule(other)
            for a, b in zip(first.parameters(), second.parameters(), strict=True):
                a.data, b.data = b.data, a.data

    swap()
    try:
        yield
    finally:
        swap()


def extend_group(group: RescalingGroup, counterparts: Counterparts) -> Iterator[RescalingGroup]:
    """Extend a group to modules that did not run.

    Such a module gets the edits of its counterparts if these agree. If the whole group lies inside
    of its first counterpart, it gets a copy of the group.

    Yields:
        The extended group, then its copies.
    """
    added: list[Edit] = []
    copies: list[RescalingGroup] = []
    edits: dict[str, list[Edit]] = defaultdict(list)
    for edit in group.edits:
        edits[_innermost_number(edit.parameter)].append(edit)
    for slot, reached in counterparts.items():
        if len(edits) == 1 and reached[0] in edits:
            copies.append(_copy_group(group, reached[0], slot))
        elif all(s in edits for s in reached):
            moved = [[_move_edit(e, s, slot) for e in edits[s]] for s in reached]
            if all(_edits_match(one, moved[0]) for one in moved):
                added += moved[0]
    names = dict.fromkeys(e.parameter.rpartition(".")[0] for e in added)
    yield replace(
        group,
        edits=(*group.edits, *added),
        consumers=(*group.consumers, *names),
        unreached=tuple(names),
    )
    yield from copies


def _move_edit(edit: Edit, old: str, new: str) -> Edit:
    return replace(edit, parameter=new + edit.parameter.removeprefix(old))


def _edits_match(edits: list[Edit], others: list[Edit]) -> bool:
    return len(edits) == len(others) and all(
        (a.parameter, a.axis, a.power, a.offset) == (b.parameter, b.axis, b.power, b.offset)
        and torch.equal(a.index, b.index)
        for a, b in zip(edits, others, strict=True)
    )


def _copy_group(group: RescalingGroup, old: str, new: str) -> RescalingGroup:
    consumers = tuple(new + name.removeprefix(old) for name in group.consumers)
    return replace(
        group,
        producer=new + group.producer.removeprefix(old),
        consumers=consumers,
        edits=tuple(_move_edit(edit, old, new) for edit in group.edits),
        unreached=(new + group.producer.removeprefix(old), *consumers),
    )
