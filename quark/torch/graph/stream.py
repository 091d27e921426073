"""The residual stream: what gives its vectors, what reads them, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.spaces import Gain, Side, Space
from quark.torch.graph.structure import ResidualStream, StreamNorm, StreamWeight, ValueHeads
from quark.torch.graph.trace import Trace
from quark.torch.graph.unseen import Siblings
from quark.torch.graph.vectors import Follower


class ObstacleError(Exception):
    """The residual stream cannot be rotated; the message says why."""


@dataclass(frozen=True)
class _Pass:
    """What was seen of a model."""

    model: nn.Module
    trace: Trace
    aliases: Aliases
    follower: Follower
    siblings: Siblings


def find_stream(
    model: nn.Module, trace: Trace, aliases: Aliases, siblings: Siblings
) -> tuple[ResidualStream, set[int]]:
    """Find what touches the residual stream.

    Returns:
        The stream, and the numbers of the tensors that hold its vectors as they are.

    Raises:
        ObstacleError: It cannot be rotated.
    """
    seen = _Pass(model, trace, aliases, Follower(trace, aliases), siblings)
    space = _space_of_blocks(seen)
    gains = _gains(seen, space)
    names = {side[0] for side in [*space.sources, *space.readers]}
    for gain in gains.values():
        names |= {name for name in (gain.weight, gain.bias) if name}
    for name in sorted(names):
        for index in aliases.readers[name]:
            if index not in seen.follower.understood[name]:
                op = trace.ops[index]
                raise ObstacleError(f"{name} is also read by {op.name} {op.where}")
    sources = [(side, _how_read(seen, side)) for side in space.sources]
    embeddings = [StreamWeight(*side) for side, how in sources if how == "embedding"]
    head, tied = _head(seen, space, {weight.parameter for weight in embeddings})
    writers = [StreamWeight(*side) for side, how in sources if how == "weight"]
    values = tuple(_values(seen))
    outputs = {heads.output[0] for heads in values}
    stream = ResidualStream(
        size=len(space.parts),
        embeddings=tuple(embeddings),
        writers=tuple(_with_unseen(writers, siblings)),
        biases=tuple(
            _with_unseen([StreamWeight(*s) for s, how in sources if how == "added"], siblings)
        ),
        readers=tuple(_with_unseen(_readers(space, head if tied else ""), siblings)),
        norms=tuple(
            StreamNorm(g.module, "layer" if g.takes_mean else "rms", g.weight, g.offset, g.bias)
            for g in gains.values()
        ),
        head=head,
        tied=tied,
        values=values,
        downs=tuple(
            w.parameter.rpartition(".")[0]
            for w in _with_unseen(writers, siblings)
            if w.parameter not in outputs
        ),
    )
    find = seen.follower.spaces.find
    held = seen.follower.held.items()
    return stream, {n for n, v in held if find(v.space) is space and v.gain is None}


def expect_read(stream: ResidualStream, unread: dict[str, list[tuple[str, torch.Size]]]) -> None:
    """Expect that no weight that was not read may belong to a stream.

    Raises:
        ObstacleError: One may.
    """
    for name, shape in (weight for weights in unread.values() for weight in weights):
        if stream.size in shape:
            raise ObstacleError(f"{name} was not read: it may belong to the stream")


def _space_of_blocks(seen: _Pass) -> Space:
    """Return the space of the vectors that all blocks get and give."""
    found: dict[Space | None, str] = {}
    for block, calls in seen.trace.blocks.items():
        for call in calls:
            for number in (call.given[0], call.made[0]):
                held = seen.follower.held.get(number)
                space = None if held is None else seen.follower.spaces.find(held.space)
                found.setdefault(space, block)
    if not found:
        raise ObstacleError("there are no repeated blocks")
    broken = next((s for s in found if s is not None and not s.is_whole), None)
    if broken is not None:
        raise ObstacleError(f"the stream {broken.reason}")
    space = next(iter(found))
    if space is None or len(found) > 1:
        other = next(reversed(found.values()))
        raise ObstacleError(f"{other} does not get or give vectors of the same space as others")
    return space


def _gains(seen: _Pass, space: Space) -> dict[str, Gain]:
    """Return the norms in front of readers, by module."""
    gains: dict[str, Gain] = {}
    for side, (entries, gain) in space.readers.items():
        if not torch.equal(entries, torch.arange(len(space.parts))):
            raise ObstacleError(f"{side[0]} reads a part of the stream only")
        if gain is not None and gains.setdefault(gain.module, gain) != gain:
            raise ObstacleError(f"{gain.module} is not the same norm each time it runs")
    _expect_apart(seen, space, {gain.weight for gain in gains.values() if gain.weight})
    return gains


def _expect_apart(seen: _Pass, space: Space, weights: set[str]) -> None:
    """Expect that parameters of the stream do not serve elsewhere."""
    own = space.sources.keys() | space.readers.keys()
    for other in seen.follower.spaces.all():
        if other is space:
            continue
        for side in (own & other.readers.keys()) | (own & seen.follower.foreign):
            raise ObstacleError(f"{side[0]} also reads what is not of the stream")
        for side, (_, gain) in other.readers.items():
            if gain is not None and gain.weight in weights:
                raise ObstacleError(f"{gain.weight} also scales what {side[0]} reads")


def _how_read(seen: _Pass, side: Side) -> str:
    """Return what a source of the stream is: "embedding", "weight" or "added"."""
    names = {seen.trace.ops[index].name for index in seen.aliases.readers[side[0]]}
    if "embedding" in names:
        return "embedding"
    is_added = len(seen.aliases.shapes[side[0]]) == 1 or "add" in names
    return "added" if is_added else "weight"


def _head(seen: _Pass, space: Space, embeddings: set[str]) -> tuple[str, bool]:
    """Return the module that reads the stream last, outside of blocks, and whether it is tied."""
    last = ("", "")
    for parameter, _ in space.readers:
        for index in seen.aliases.readers[parameter]:
            op = seen.trace.ops[index]
            if not op.block and op.name != "embedding":
                last = (op.module, parameter)
    return last[0], last[1] in embeddings


def _readers(space: Space, tied_head: str) -> Iterator[StreamWeight]:
    for (parameter, axis), (_, gain) in space.readers.items():
        is_source = (parameter, axis) in space.sources
        name = f"{tied_head}.weight" if tied_head and is_source else parameter
        yield StreamWeight(name, axis, gain.module if gain else "")


def _with_unseen(weights: Iterable[StreamWeight], siblings: Siblings) -> Iterator[StreamWeight]:
    """Iterate over weights, and over those of modules that did not run but are like theirs."""
    for weight in weights:
        yield weight
        for slot, seen in siblings.items():
            if weight.parameter.startswith(f"{seen[0]}."):
                name = slot + weight.parameter.removeprefix(seen[0])
                yield StreamWeight(name, weight.axis, weight.norm)


def _values(seen: _Pass) -> Iterator[ValueHeads]:
    """Iterate over values whose heads may be rotated."""
    for space in seen.follower.spaces.all():
        readers = [(s, e) for s, (e, gain) in space.readers.items() if gain is None]
        if not space.is_attended or len(readers) != 1 or len(space.readers) != 1:
            continue
        (output, entries), parts = readers[0], space.parts
        names = [name for name, _ in [*space.sources, output]]
        blocks = {seen.trace.ops[i].block for n in names for i in seen.aliases.readers[n]}
        understood = all(set(seen.aliases.readers[n]) <= seen.follower.understood[n] for n in names)
        rows, columns = _runs(parts, torch.arange(len(parts))), _runs(parts, entries)
        if rows is None or columns is None or len(blocks) != 1 or not understood:
            continue
        if bool((entries[columns] - entries[columns][:, :1] != torch.arange(rows.shape[1])).any()):
            continue
        met = set(entries[columns][:, 0].tolist())
        rows = rows[[int(row[0]) in met for row in rows]]
        if set(rows[:, 0].tolist()) == met and blocks != {""}:
            yield ValueHeads(blocks.pop(), tuple(space.sources), output, rows, columns)


def _runs(parts: torch.Tensor, entries: torch.Tensor) -> torch.Tensor | None:
    """Return the positions of entries of one part, a row for each run; None if they differ."""
    of = torch.where(entries >= 0, parts[entries], -1)
    is_next = (of[1:] == of[:-1]) & (entries[1:] == entries[:-1] + 1)
    starts = torch.cat([torch.tensor([True]), ~is_next])
    ends = [*starts.nonzero().flatten().tolist(), len(of)]
    runs = [torch.arange(a, b) for a, b in pairwise(ends) if of[a] >= 0 and b - a > 1]
    sizes = {len(run) for run in runs}
    return torch.stack(runs) if len(sizes) == 1 else None
