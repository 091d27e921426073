"""The residual stream: what gives its vectors, what reads them, and what stands in the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.rescaling.flow import operands
from quark.torch.graph.rescaling.proposal import ORIGIN, origins
from quark.torch.graph.rotation.spaces import Gain, Side, Space
from quark.torch.graph.rotation.vectors import Follower
from quark.torch.graph.structure import ResidualStream, StreamNorm, StreamWeight, ValueHeads
from quark.torch.graph.trace import Trace, tensors
from quark.torch.graph.unreached import Siblings


class ObstacleError(Exception):
    """The residual stream cannot be rotated; the message says why."""


class Seen(NamedTuple):
    """What was seen of a model in one pass."""

    trace: Trace
    aliases: Aliases
    follower: Follower
    siblings: Siblings


def find_stream(seen: Seen) -> tuple[ResidualStream, set[int]]:
    """Find what touches the residual stream.

    Returns:
        The stream, and the numbers of the tensors that hold its vectors as they are.

    Raises:
        ObstacleError: It cannot be rotated.
    """
    aliases, trace, siblings = seen.aliases, seen.trace, seen.siblings
    space = _space_of_blocks(seen)
    sources = [(side, _how_read(seen, side)) for side in space.sources]
    embeddings = [StreamWeight(*side) for side, how in sources if how == "embedding"]
    head, tied = _head(seen, space, {weight.parameter for weight in embeddings})
    gains = _gains(seen, space, tied)
    names = {side[0] for side in [*space.sources, *space.readers]}
    for gain in gains.values():
        names |= {name for name in (gain.weight, gain.bias) if name}
    for name in sorted(names):
        for index in aliases.readers[name]:
            if index not in seen.follower.understood[name]:
                op = trace.ops[index]
                raise ObstacleError(f"{name} is also read by {op.name} {op.where}")
    writers = [StreamWeight(*side) for side, how in sources if how == "weight"]
    values = find_values(seen)
    stream = ResidualStream(
        size=len(space.parts),
        embeddings=tuple(embeddings),
        writers=tuple(_with_unseen(writers, siblings)),
        biases=tuple(
            _with_unseen([StreamWeight(*s) for s, how in sources if how == "added"], siblings)
        ),
        readers=tuple(_with_unseen(_readers(space, head, tied), siblings)),
        norms=tuple(
            StreamNorm(g.module, "layer" if g.takes_mean else "rms", g.weight, g.offset, g.bias)
            for g in gains.values()
        ),
        head=head,
        tied=bool(tied),
        values=values,
        downs=find_ends(seen, values),
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


def _spaces_of_stream(seen: Seen) -> dict[Space | None, str]:
    """Return the spaces of the vectors that blocks get and give, and the first block of each."""
    found: dict[Space | None, str] = {}
    for block, calls in seen.trace.blocks.items():
        for call in calls:
            for number in (call.given[0], call.made[0]):
                held = seen.follower.held.get(number)
                space = None if held is None else seen.follower.spaces.find(held.space)
                found.setdefault(space, block)
    return found


def _space_of_blocks(seen: Seen) -> Space:
    """Return the space of the vectors that all blocks get and give."""
    found = _spaces_of_stream(seen)
    if not found:
        raise ObstacleError("there are no repeated blocks")
    tables = (
        space
        for space in seen.follower.spaces.all()
        if any(s[1] and _how_read(seen, s) == "embedding" for s in space.sources)
    )
    known = [*found, *(tables if None in found else ())]
    broken = next((s for s in known if s is not None and not s.is_whole), None)
    if broken is not None:
        raise ObstacleError(f"the stream {broken.reason}")
    space = next(iter(found))
    if space is None or len(found) > 1:
        other = next(reversed(found.values()))
        raise ObstacleError(f"{other} does not get or give vectors of the same space as others")
    return space


def _gains(seen: Seen, space: Space, tied: str) -> dict[str, Gain]:
    """Return the norms in front of readers, by module."""
    gains: dict[str, Gain] = {}
    whole = torch.arange(len(space.parts))
    for side, (entries, gain) in space.readers.items():
        copies = len(entries) // len(whole)
        if not copies or not torch.equal(entries, whole.repeat(copies)):
            raise ObstacleError(f"{side[0]} reads a part of the stream only")
        if copies > 1 and gain is not None and (gain.weight or gain.bias):
            raise ObstacleError(f"{side[0]} reads several vectors that {gain.module} scaled")
        if gain is not None and gains.setdefault(gain.module, gain) != gain:
            raise ObstacleError(f"{gain.module} is not the same norm each time it runs")
    _expect_apart(seen, space, {gain.weight for gain in gains.values() if gain.weight}, tied)
    return gains


def _expect_apart(seen: Seen, space: Space, weights: set[str], tied: str) -> None:
    """Expect that parameters of the stream do not serve elsewhere, but for a head to be untied."""
    own = {side for side in space.sources.keys() | space.readers.keys() if side[0] != tied}
    for other in seen.follower.spaces.all():
        if other is space:
            continue
        for side in (own & other.readers.keys()) | (own & seen.follower.foreign):
            raise ObstacleError(f"{side[0]} also reads what is not of the stream")
        for side, (_, gain) in other.readers.items():
            if gain is not None and gain.weight in weights:
                raise ObstacleError(f"{gain.weight} also scales what {side[0]} reads")


def _how_read(seen: Seen, side: Side) -> str:
    """Return what a source of the stream is: "embedding", "weight" or "added"."""
    names = {seen.trace.ops[index].name for index in seen.aliases.readers[side[0]]}
    if "embedding" in names:
        return "embedding"
    is_added = len(seen.aliases.shapes[side[0]]) == 1 or not names.isdisjoint(("add", "index"))
    return "added" if is_added else "weight"


def _head(seen: Seen, space: Space, embeddings: set[str]) -> tuple[str, str]:
    """Return the module that makes logits, and the embedding that its weight is too, if it is one.

    It lies outside of blocks, and multiplies with an embedding or is the last to read the stream.
    """
    last = ("", "")
    for parameter in [*(side[0] for side in space.readers), *sorted(embeddings)]:
        for index in seen.aliases.readers[parameter]:
            op = seen.trace.ops[index]
            if not op.block and op.name != "embedding":
                last = (op.module, parameter)
    return last[0], last[1] if last[1] in embeddings else ""


def _readers(space: Space, head: str, tied: str) -> Iterator[StreamWeight]:
    for (parameter, axis), (_, gain) in space.readers.items():
        name = f"{head}.weight" if parameter == tied else parameter
        yield StreamWeight(name, axis, gain.module if gain else "")


def _with_unseen(weights: Iterable[StreamWeight], siblings: Siblings) -> Iterator[StreamWeight]:
    """Iterate over weights, and over those of modules that did not run but are like theirs."""
    for weight in weights:
        yield weight
        for slot, seen in siblings.items():
            if weight.parameter.startswith(f"{seen[0]}."):
                name = slot + weight.parameter.removeprefix(seen[0])
                yield StreamWeight(name, weight.axis, weight.norm)


def find_ends(seen: Seen, values: Iterable[ValueHeads]) -> tuple[str, ...]:
    """Return the modules that end a branch of a block, but for those that read heads of values.

    They alone read what cannot be rotated, and give what is as wide as the stream.
    """
    outputs = {heads.output for heads in values}
    known = {*outputs, *(s for space in _spaces_of_stream(seen) if space for s in space.readers)}
    broken = (space for space in seen.follower.spaces.all() if not space.is_whole)
    sides = {side for space in broken for side in space.readers} | seen.follower.foreign
    widths = {b: next(tensors(calls[0].output)).shape[-1] for b, calls in seen.trace.blocks.items()}
    alone = _read_alone(seen)
    found: dict[str, None] = {}
    for name, readers in seen.aliases.readers.items():
        shape = seen.aliases.shapes[name]
        wide = {widths.get(seen.trace.ops[index].block) for index in readers}
        for axis in range(len(shape)) if len(shape) == 2 and alone.issuperset(readers) else ():
            if wide == {shape[1 - axis]} and (name, axis) in sides - known:
                found[name] = None
    named = _with_unseen((StreamWeight(name, 0) for name in found), seen.siblings)
    return tuple(dict.fromkeys(weight.parameter.rpartition(".")[0] for weight in named))


def _read_alone(seen: Seen) -> set[int]:
    """Return the matrix products whose first factor nothing else reads."""
    origin = origins(seen.trace)
    factors: dict[int, int] = {}
    times: Counter[int] = Counter()
    for index, op in enumerate(seen.trace.ops):
        product = operands(op)
        if product is not None:
            number = product[1].number
            factors[index] = origin.get(number, number)
        if op.name not in ORIGIN:
            times.update({origin.get(v.number, v.number) for v in op.inputs})
    return {index for index, number in factors.items() if times[number] == 1}


def find_values(seen: Seen) -> tuple[ValueHeads, ...]:
    """Return the values whose heads may be rotated, whatever becomes of the stream."""
    return tuple(_values(seen))


def _values(seen: Seen) -> Iterator[ValueHeads]:
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
