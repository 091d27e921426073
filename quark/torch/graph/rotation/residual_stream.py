"""The residual stream: its sources, its readers, and the obstacles to rotating it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.op_kinds import VIEWS, find_view_origins, matmul_operands
from quark.torch.graph.rotation.spaces import Gain, ParameterAxis, Space
from quark.torch.graph.rotation.vector_flow import VectorFlow
from quark.torch.graph.structure import ResidualStream, StreamNorm, StreamWeight, ValueHeads
from quark.torch.graph.trace import Trace, iter_tensors
from quark.torch.graph.unreached import Counterparts


class ObstacleError(Exception):
    """The residual stream cannot be rotated; the message says why."""


class Analysis(NamedTuple):
    """Results of the analysis of one pass."""

    trace: Trace
    aliases: Aliases
    flow: VectorFlow
    counterparts: Counterparts


def find_stream(analysis: Analysis) -> tuple[ResidualStream, set[int]]:
    """Find all parameters that write to or read from the residual stream.

    Returns:
        The stream, and the numbers of the tensors that hold its vectors without a gain.

    Raises:
        ObstacleError: It cannot be rotated.
    """
    aliases, trace, counterparts = analysis.aliases, analysis.trace, analysis.counterparts
    space = _find_stream_space(analysis)
    sources = [(side, _classify_source(analysis, side)) for side in space.sources]
    embeddings = [StreamWeight(*side) for side, kind in sources if kind == "embedding"]
    head, tied = _find_head(analysis, space, {weight.parameter for weight in embeddings})
    gains = _find_gains(analysis, space, tied)
    names = {side[0] for side in [*space.sources, *space.readers]}
    for gain in gains.values():
        names |= {name for name in (gain.weight, gain.bias) if name}
    for name in sorted(names):
        for index in aliases.readers[name]:
            if index not in analysis.flow.understood[name]:
                op = trace.ops[index]
                raise ObstacleError(f"{name} is also read by {op.name} {op.location}")
    writers = [StreamWeight(*side) for side, kind in sources if kind == "weight"]
    values = find_value_heads(analysis)
    stream = ResidualStream(
        size=len(space.partition),
        embeddings=tuple(embeddings),
        writers=tuple(_add_unreached(writers, counterparts)),
        biases=tuple(
            _add_unreached(
                [StreamWeight(*s) for s, kind in sources if kind == "added"], counterparts
            )
        ),
        readers=tuple(_add_unreached(_readers(space, head, tied), counterparts)),
        norms=tuple(
            StreamNorm(g.module, "layer" if g.subtracts_mean else "rms", g.weight, g.offset, g.bias)
            for g in gains.values()
        ),
        head=head,
        tied=bool(tied),
        value_heads=values,
        down_projections=find_down_projections(analysis, values),
    )
    find = analysis.flow.spaces.find
    vectors = analysis.flow.vectors.items()
    return stream, {n for n, v in vectors if find(v.space) is space and v.gain is None}


def check_all_read(stream: ResidualStream, unread: dict[str, list[tuple[str, torch.Size]]]) -> None:
    """Check that no unread weight has an axis as wide as the stream.

    Weights that the traced pass did not read cannot be assigned to the stream.

    Raises:
        ObstacleError: An unread weight may belong to the stream.
    """
    for name, shape in (weight for weights in unread.values() for weight in weights):
        if stream.size in shape:
            raise ObstacleError(f"{name} was not read: it may belong to the stream")


def _find_block_spaces(analysis: Analysis) -> dict[Space | None, str]:
    """Return the spaces of the inputs and outputs of blocks, each with its first block.

    The key None stands for tensors that hold no vectors.
    """
    first_blocks: dict[Space | None, str] = {}
    for block, calls in analysis.trace.blocks.items():
        for call in calls:
            for number in (call.input_numbers[0], call.output_numbers[0]):
                vectors = analysis.flow.vectors.get(number)
                space = None if vectors is None else analysis.flow.spaces.find(vectors.space)
                first_blocks.setdefault(space, block)
    return first_blocks


def _find_stream_space(analysis: Analysis) -> Space:
    """Return the space of the inputs and outputs of all blocks.

    Raises:
        ObstacleError: There are no blocks, or several spaces, or a rotation cannot mix all entries.
    """
    spaces = _find_block_spaces(analysis)
    if not spaces:
        raise ObstacleError("there are no repeated blocks")
    tables = (
        space
        for space in analysis.flow.spaces.distinct()
        if any(s[1] and _classify_source(analysis, s) == "embedding" for s in space.sources)
    )
    candidates = [*spaces, *(tables if None in spaces else ())]
    broken = next((s for s in candidates if s is not None and not s.is_whole), None)
    if broken is not None:
        raise ObstacleError(f"the stream {broken.reason}")
    space = next(iter(spaces))
    if space is None or len(spaces) > 1:
        other = next(reversed(spaces.values()))
        raise ObstacleError(
            f"the inputs or outputs of {other} are not of the same space as those of other blocks"
        )
    return space


def _find_gains(analysis: Analysis, space: Space, tied: str) -> dict[str, Gain]:
    """Return the norms between the stream and its readers, by module.

    Raises:
        ObstacleError: A reader or a norm does not treat the whole vector alike every time.
    """
    gains: dict[str, Gain] = {}
    whole = torch.arange(len(space.partition), device="cpu")
    for side, (entries, gain) in space.readers.items():
        # A reader of several concatenated vectors has the entries [0, 1, …, n-1, 0, 1, …, n-1].
        copies = len(entries) // len(whole)
        if not copies or not torch.equal(entries, whole.repeat(copies)):
            raise ObstacleError(f"{side[0]} reads a part of the stream only")
        if copies > 1 and gain is not None and (gain.weight or gain.bias):
            raise ObstacleError(f"{side[0]} reads several vectors that {gain.module} scaled")
        if gain is not None and gains.setdefault(gain.module, gain) != gain:
            raise ObstacleError(f"{gain.module} is not the same norm each time it runs")
    _check_exclusive(analysis, space, {gain.weight for gain in gains.values() if gain.weight}, tied)
    return gains


def _check_exclusive(analysis: Analysis, space: Space, weights: set[str], tied: str) -> None:
    """Check that only the stream uses its parameters; a tied head is untied before a rotation."""
    own = {side for side in space.sources.keys() | space.readers.keys() if side[0] != tied}
    for other in analysis.flow.spaces.distinct():
        if other is space:
            continue
        for side in (own & other.readers.keys()) | (own & analysis.flow.unmatched):
            raise ObstacleError(f"{side[0]} also reads a tensor outside of the stream")
        for side, (_, gain) in other.readers.items():
            if gain is not None and gain.weight in weights:
                raise ObstacleError(f"{gain.weight} also scales what {side[0]} reads")


def _classify_source(analysis: Analysis, side: ParameterAxis) -> str:
    """Return the kind of a source of the stream: "embedding", "weight" or "added"."""
    names = {analysis.trace.ops[index].name for index in analysis.aliases.readers[side[0]]}
    if "embedding" in names:
        return "embedding"
    is_added = len(analysis.aliases.shapes[side[0]]) == 1 or not names.isdisjoint(("add", "index"))
    return "added" if is_added else "weight"


def _find_head(analysis: Analysis, space: Space, embeddings: set[str]) -> tuple[str, str]:
    """Return the module that computes logits, and the embedding that it is tied to, "" if none.

    The head is outside of blocks. It multiplies by an embedding, or is the last reader.
    """
    last = ("", "")
    for parameter in [*(side[0] for side in space.readers), *sorted(embeddings)]:
        for index in analysis.aliases.readers[parameter]:
            op = analysis.trace.ops[index]
            if not op.block and op.name != "embedding":
                last = (op.module, parameter)
    return last[0], last[1] if last[1] in embeddings else ""


def _readers(space: Space, head: str, tied: str) -> Iterator[StreamWeight]:
    for (parameter, axis), (_, gain) in space.readers.items():
        name = f"{head}.weight" if parameter == tied else parameter
        yield StreamWeight(name, axis, gain.module if gain else "")


def _add_unreached(
    weights: Iterable[StreamWeight], counterparts: Counterparts
) -> Iterator[StreamWeight]:
    """Iterate over weights, and over the same weights of modules that did not run."""
    for weight in weights:
        yield weight
        for slot, reached in counterparts.items():
            if weight.parameter.startswith(f"{reached[0]}."):
                name = slot + weight.parameter.removeprefix(reached[0])
                yield StreamWeight(name, weight.axis, weight.norm)


def find_down_projections(analysis: Analysis, values: Iterable[ValueHeads]) -> tuple[str, ...]:
    """Return the modules that end a branch of a block, except attention output projections.

    The input of such a module has no other reader and cannot be rotated offline, since a
    nonlinearity made it. Its output is as wide as the stream.
    """
    outputs = {heads.output for heads in values}
    known = {
        *outputs,
        *(s for space in _find_block_spaces(analysis) if space for s in space.readers),
    }
    broken = (space for space in analysis.flow.spaces.distinct() if not space.is_whole)
    sides = {side for space in broken for side in space.readers} | analysis.flow.unmatched
    widths = {
        b: next(iter_tensors(calls[0].output)).shape[-1]
        for b, calls in analysis.trace.blocks.items()
    }
    exclusive = _find_exclusive_products(analysis)
    weights: dict[str, None] = {}
    for name, readers in analysis.aliases.readers.items():
        shape = analysis.aliases.shapes[name]
        wide = {widths.get(analysis.trace.ops[index].block) for index in readers}
        for axis in range(len(shape)) if len(shape) == 2 and exclusive.issuperset(readers) else ():
            if wide == {shape[1 - axis]} and (name, axis) in sides - known:
                weights[name] = None
    stream_weights = (StreamWeight(name, 0) for name in weights)
    complete = _add_unreached(stream_weights, analysis.counterparts)
    return tuple(dict.fromkeys(weight.parameter.rpartition(".")[0] for weight in complete))


def _find_exclusive_products(analysis: Analysis) -> set[int]:
    """Return the indices of matrix products whose left operand has no other reader."""
    origin = find_view_origins(analysis.trace)
    factors: dict[int, int] = {}
    times: Counter[int] = Counter()
    for index, op in enumerate(analysis.trace.ops):
        product = matmul_operands(op)
        if product is not None:
            number = product[1].number
            factors[index] = origin.get(number, number)
        if op.name not in VIEWS:
            times.update({origin.get(v.number, v.number) for v in op.inputs})
    return {index for index, number in factors.items() if times[number] == 1}


def find_value_heads(analysis: Analysis) -> tuple[ValueHeads, ...]:
    """Return the attention heads whose values can be rotated, with or without the stream."""
    return tuple(_iterate_value_heads(analysis))


def _iterate_value_heads(analysis: Analysis) -> Iterator[ValueHeads]:
    for space in analysis.flow.spaces.distinct():
        readers = [(s, e) for s, (e, gain) in space.readers.items() if gain is None]
        if not space.is_attended or len(readers) != 1 or len(space.readers) != 1:
            continue
        (output, entries), parts = readers[0], space.partition
        names = [name for name, _ in [*space.sources, output]]
        blocks = {analysis.trace.ops[i].block for n in names for i in analysis.aliases.readers[n]}
        understood = all(
            set(analysis.aliases.readers[n]) <= analysis.flow.understood[n] for n in names
        )
        rows = _find_runs(parts, torch.arange(len(parts), device="cpu"))
        columns = _find_runs(parts, entries)
        if rows is None or columns is None or len(blocks) != 1 or not understood:
            continue
        steps = entries[columns] - entries[columns][:, :1]
        if bool((steps != torch.arange(rows.shape[1], device="cpu")).any()):
            continue
        met = set(entries[columns][:, 0].tolist())
        rows = rows[[int(row[0]) in met for row in rows]]
        if set(rows[:, 0].tolist()) == met and blocks != {""}:
            yield ValueHeads(blocks.pop(), tuple(space.sources), output, rows, columns)


def _find_runs(partition: torch.Tensor, entries: torch.Tensor) -> torch.Tensor | None:
    """Return the positions of runs of consecutive entries of one part, a row for each run.

    Example: partition [0, 0, 1, 1] and two query heads per value head:
    entries [0, 1, 0, 1, 2, 3, 2, 3] -> [[0, 1], [2, 3], [4, 5], [6, 7]].

    Returns:
        (runs, length) int64, or None if the runs differ in length.
    """
    part = torch.where(entries >= 0, partition[entries], -1)
    is_next = (part[1:] == part[:-1]) & (entries[1:] == entries[:-1] + 1)
    starts = torch.cat([torch.tensor([True], device="cpu"), ~is_next])
    ends = [*starts.nonzero().flatten().tolist(), len(part)]
    runs = [
        torch.arange(a, b, device="cpu") for a, b in pairwise(ends) if part[a] >= 0 and b - a > 1
    ]
    sizes = {len(run) for run in runs}
    return torch.stack(runs) if len(sizes) == 1 else None
