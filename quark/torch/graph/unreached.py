"""Parameters that the data did not reach: experts no token chose, branches not taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from quark.torch.graph.structure import Edit, Rejected, ScaleGroup

Siblings = dict[str, tuple[str, ...]]
_Signature = tuple[tuple[str, torch.Size], ...]


def unseen_siblings(model: nn.Module, read: Iterable[str]) -> Siblings:
    """Find numbered modules that did not run, such as experts, and those beside them that did.

    Args:
        model: The model.
        read: Names of the parameters that were read.

    Returns:
        Module of which no parameter was read -> modules of the same list, with parameters of the
        same names and shapes, of which all were.
    """
    seen_names = set(read)
    slots: dict[str, dict[str, torch.Size]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        slot = _innermost_number(name)
        if slot:
            slots[slot][name.removeprefix(slot)] = parameter.shape
    seen: dict[tuple[str, _Signature], list[str]] = defaultdict(list)
    unseen: list[tuple[str, tuple[str, _Signature]]] = []
    for slot, shapes in slots.items():
        key = slot.rpartition(".")[0], tuple(shapes.items())
        was_read = [slot + ending in seen_names for ending in shapes]
        if all(was_read):
            seen[key].append(slot)
        elif not any(was_read):
            unseen.append((slot, key))
    return {slot: tuple(seen[key]) for slot, key in unseen if seen[key]}


def _innermost_number(name: str) -> str:
    """Return a name up to its last number: that of the expert, say, which has a parameter."""
    parts = name.split(".")
    ends = [i + 1 for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: ends[-1]]) if ends else ""


def unread_weights(
    model: nn.Module, blocks: Iterable[str], read: Iterable[str], siblings: Siblings
) -> dict[str, list[tuple[str, torch.Size]]]:
    """Find weights that were not read, and that nothing beside them can stand for.

    They may read what others read, for other inputs. Those in lists of modules of which none ran,
    such as the layers of a tower for images, are taken to be of another part of the model.

    Returns:
        Block, empty for what lies outside of all -> names and shapes.
    """
    known, blocks = set(read), list(blocks)
    found: dict[str, list[tuple[str, torch.Size]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        is_known = name in known or any(name.startswith(f"{slot}.") for slot in siblings)
        if not is_known and parameter.dim() > 1:
            block = next((b for b in blocks if name.startswith(f"{b}.")), "")
            beside = _innermost_number(name).rpartition(".")[0]
            if block or not beside or any(n.startswith(f"{beside}.") for n in known):
                found[block].append((name, parameter.shape))
    return found


def without_unread_readers(
    groups: Iterable[ScaleGroup], unread: dict[str, list[tuple[str, torch.Size]]]
) -> tuple[list[ScaleGroup], list[Rejected]]:
    """Reject groups beside weights that were not read and may read their producer."""
    kept: list[ScaleGroup] = []
    rejected: list[Rejected] = []
    for group in groups:
        width = len(group.edits[0].index)
        beside = unread.get(group.block, ())
        reader = next((name for name, shape in beside if width in shape), None)
        if reader is None:
            kept.append(group)
        else:
            reason = f"{reader} was not read: it may read the output for other inputs"
            rejected.append(Rejected(group.producer, group.consumers, reason))
    return kept, rejected


def taking_part(group: ScaleGroup, modules: Iterable[str]) -> bool:
    """Whether a group edits parameters of numbered modules."""
    return not {_innermost_number(e.parameter) for e in group.edits}.isdisjoint(modules)


def rounds(siblings: Siblings, groups: Iterable[ScaleGroup]) -> Iterator[dict[str, str]]:
    """Iterate over ways to let modules that ran, and take part, stand for those that did not.

    Yields:
        Module that did not run -> module in whose place it can run. All get their turn.
    """
    parts = {_innermost_number(e.parameter) for group in groups for e in group.edits}
    waiting = {u: s for u, s in siblings.items() if not parts.isdisjoint(s)}
    while waiting:
        pairs: dict[str, str] = {}
        for slot, seen in waiting.items():
            host = next((s for s in seen if s not in pairs.values()), None)
            if host is not None:
                pairs[slot] = host
        yield pairs
        waiting = {u: s for u, s in waiting.items() if u not in pairs}


@contextmanager
def exchanged(model: nn.Module, pairs: dict[str, str]) -> Iterator[None]:
    """Exchange the parameters of modules for a while."""

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


def extended(group: ScaleGroup, siblings: Siblings) -> Iterator[ScaleGroup]:
    """Give a group the modules that did not run, and iterate over it and its likes in these.

    A module that did not run takes part as those beside it do, if they agree. If the whole group
    lies in the first of them, there is one more just like it.
    """
    added: list[Edit] = []
    copies: list[ScaleGroup] = []
    edits: dict[str, list[Edit]] = defaultdict(list)
    for edit in group.edits:
        edits[_innermost_number(edit.parameter)].append(edit)
    for slot, seen in siblings.items():
        if len(edits) == 1 and seen[0] in edits:
            copies.append(_renamed(group, seen[0], slot))
        elif all(s in edits for s in seen):
            moved = [[_moved(e, s, slot) for e in edits[s]] for s in seen]
            if all(_alike(one, moved[0]) for one in moved):
                added += moved[0]
    names = dict.fromkeys(e.parameter.rpartition(".")[0] for e in added)
    yield replace(
        group,
        edits=(*group.edits, *added),
        consumers=(*group.consumers, *names),
        unseen=tuple(names),
    )
    yield from copies


def _moved(edit: Edit, old: str, new: str) -> Edit:
    return replace(edit, parameter=new + edit.parameter.removeprefix(old))


def _alike(edits: list[Edit], others: list[Edit]) -> bool:
    return len(edits) == len(others) and all(
        (a.parameter, a.axis, a.power, a.offset) == (b.parameter, b.axis, b.power, b.offset)
        and torch.equal(a.index, b.index)
        for a, b in zip(edits, others, strict=True)
    )


def _renamed(group: ScaleGroup, old: str, new: str) -> ScaleGroup:
    consumers = tuple(new + name.removeprefix(old) for name in group.consumers)
    return replace(
        group,
        producer=new + group.producer.removeprefix(old),
        consumers=consumers,
        edits=tuple(_moved(edit, old, new) for edit in group.edits),
        unseen=(new + group.producer.removeprefix(old), *consumers),
    )
