"""Sums over calibration data, with the same bits for any number of processes.

The chunks of the data are divided into leaves: at most ``LEAVES`` runs of consecutive chunks. Each
leaf is summed by one process, chunk by chunk. The sums of the leaves are added in their order:

    chunks     0 1 2   3 4 5   6 7 8   …
    leaves     a       b       c               process 0: a c …, process 1: b d …
    total      ((a + b) + c) + …

So memory holds two sums, that of the leaf and the total. More processes than leaves have no data of
their own; they take part in rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from quark.torch.pipeline.processes import Header, State, describe, processes

LEAVES = 8  # more would take more communication, fewer would keep fewer processes busy


class Mergeable(Protocol):
    """Statistics of a part of the data."""

    @property
    def is_empty(self) -> bool:
        """Whether no data was observed."""
        ...

    def merge(self, other: Any) -> None:
        """Add the statistics of a later part of the data."""
        ...

    def tensors(self) -> State:
        """Return the tensors that hold the statistics."""
        ...

    def set_tensors(self, tensors: State) -> None:
        """Replace the statistics by those that the tensors hold."""
        ...


A = TypeVar("A", bound=Mergeable)


class Leaves:
    """The division of chunks among leaves, and of leaves among processes.

    Args:
        chunks: Number of chunks.

    Attributes:
        count: Number of leaves.
        rounds: Number of leaves of the process that has most.
    """

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self.count = min(LEAVES, chunks)
        self.rounds = -(-self.count // processes().count)

    def leaf_of(self, number: int) -> int:
        """Return the leaf of a chunk, given its number in the data."""
        return number * self.count // self._chunks

    def is_own(self, number: int) -> bool:
        """Whether this process runs a chunk."""
        return self.leaf_of(number) % processes().count == processes().rank

    def own_leaf(self, round: int) -> int:
        """Return the leaf of this process in a round; it has no chunks if there is none."""
        return round * processes().count + processes().rank


class Reducer(Generic[A]):
    """Accumulates statistics of the leaves of this process, and adds those of all leaves.

    Args:
        keys: Names of the statistics.
        new: Returns empty statistics for a leaf, given its number.

    Attributes:
        parts: Statistics of the leaf at work, by name.
        totals: After the last leaf, statistics of all leaves, by name.
    """

    def __init__(self, keys: Iterable[str], new: Callable[[int], A]) -> None:
        self._keys, self._new = list(keys), new
        self.parts: dict[str, A] = {}
        self.totals: dict[str, A] = {}

    def run(self, leaves: Leaves, indices: Callable[[int], list[int]]) -> Iterator[list[int]]:
        """Iterate over the leaves of this process, each a list of its batches.

        The caller adds the statistics of these batches to ``parts``.

        Args:
            leaves: The division of the data.
            indices: Returns the batches of a leaf, given its number.
        """
        for round in range(leaves.rounds):
            leaf = leaves.own_leaf(round)
            self.parts = {key: self._new(leaf) for key in self._keys}
            yield indices(leaf)
            self._add_parts()
        self._share_totals()

    def combine(self, parts: dict[str, A]) -> dict[str, A]:
        """Return the totals of the statistics that each process has of its own data."""
        self.parts = dict(parts)
        self._add_parts()
        self._share_totals()
        return self.totals

    def _add_parts(self) -> None:
        """Add the parts of all processes to the totals, in the order of the processes."""
        group = processes()
        own = {k: describe(p.tensors()) for k, p in self.parts.items() if not p.is_empty}
        headers: list[dict[str, Header]] = group.exchange(own)
        for place, key in enumerate(self._keys):
            part, root = self.parts.pop(key), place % group.count
            for source, header in enumerate(headers):
                if key not in header:
                    continue
                tensors = part.tensors() if source == group.rank else ()
                tensors = group.send(tensors, header[key], source, root)
                if group.rank == root:
                    self._merge(key, part if source == root else self._make(tensors))

    def _merge(self, key: str, part: A) -> None:
        if key in self.totals:
            self.totals[key].merge(part)
        else:
            self.totals[key] = part

    def _make(self, tensors: State) -> A:
        made = self._new(0)
        made.set_tensors(tensors)
        return made

    def _share_totals(self) -> None:
        """Give every process each total, which one process has."""
        group = processes()
        headers: list[dict[str, Header]] = group.exchange(
            {key: describe(total.tensors()) for key, total in self.totals.items()}
        )
        for place, key in enumerate(self._keys):
            root = place % group.count
            header = headers[root].get(key)
            if header is None:
                self.totals[key] = self._new(0)
                continue
            tensors = self.totals[key].tensors() if group.rank == root else ()
            tensors = group.broadcast(tensors, header, root)
            if group.rank != root:
                self.totals[key] = self._make(tensors)
        self.totals = {key: self.totals[key] for key in self._keys}
