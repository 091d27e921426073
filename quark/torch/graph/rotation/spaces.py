"""Spaces of vectors, and which of their entries a rotation may mix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.movement_ops import unexpand_labels

ParameterAxis = tuple[str, int]  # a parameter and an axis of it


class Gain(NamedTuple):
    """The affine part of a norm, which has to be undone before a rotation.

    Attributes:
        module: Name of the norm.
        weight: Parameter that multiplies the channels, None without one.
        offset: Constant that is added to the parameter before.
        bias: Parameter that is added to the channels, None without one.
        subtracts_mean: Whether the norm subtracts the mean of a vector.
    """

    module: str
    weight: str | None = None
    offset: float = 0.0
    bias: str | None = None
    subtracts_mean: bool = False


@dataclass(eq=False)
class Space:
    """A space of vectors.

    Attributes:
        partition: (size,) int64. A rotation may mix entries with equal numbers. Example: two heads
            of two entries, [0, 0, 1, 1]; after an entry-wise nonlinearity, [0, 1, 2, 3].
        reason: The operation that split the space first, for messages.
        sources: Parameters whose outputs or rows are vectors of the space, with the axis.
        is_attended: Whether attention mixes the vectors over tokens.
        readers: Parameter that multiplies the vectors, and its axis -> (size of the axis,) entry of
            the space at each position, and the norm in between.
    """

    partition: torch.Tensor
    reason: str = ""
    is_attended: bool = False
    sources: dict[ParameterAxis, None] = field(default_factory=dict)
    readers: dict[ParameterAxis, tuple[torch.Tensor, Gain | None]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether a rotation may mix all entries."""
        return not bool((self.partition != self.partition[0]).any())


class Vectors(NamedTuple):
    """A tensor that holds vectors of a space.

    Attributes:
        labels: int64 in the shape of the tensor, entry of the space, -1 for none.
        space: The space.
        gain: The norm whose output this is, None if there is none.
        is_square: Whether the tensor holds squares of vectors.
    """

    labels: torch.Tensor
    space: Space
    gain: Gain | None = None
    is_square: bool = False


class Spaces:
    """The spaces of a model, a union-find structure.

    Each axis of a parameter starts as a space of its own. Spaces are merged when their vectors are
    added. Example: the outputs of the embedding and of every ``down_proj`` become one space, the
    residual stream.
    """

    def __init__(self, aliases: Aliases) -> None:
        self._shapes = aliases.shapes
        self._merged_into: dict[Space, Space] = {}
        self._by_axis: dict[ParameterAxis, Space] = {}

    def distinct(self) -> list[Space]:
        """Return the spaces that are left after merging."""
        return list(dict.fromkeys(self.find(space) for space in self._by_axis.values()))

    def get(self, side: ParameterAxis) -> Space:
        """Return the space of an axis of a parameter."""
        if side not in self._by_axis:
            parts = torch.zeros(self._shapes[side[0]][side[1]], dtype=torch.int64, device="cpu")
            self._by_axis[side] = Space(parts, sources={side: None})
        return self.find(self._by_axis[side])

    def find(self, space: Space) -> Space:
        """Return the space that a space was merged into, or itself."""
        while space in self._merged_into:
            space = self._merged_into[space]
        return space

    def merge(self, one: Space, other: Space) -> Space:
        """Merge two spaces of one size, and return the result."""
        one, other = self.find(one), self.find(other)
        if one is not other:
            pairs = torch.stack([one.partition, other.partition])
            one.partition = torch.unique(pairs, dim=1, return_inverse=True)[1]
            one.reason = one.reason or other.reason
            one.is_attended = one.is_attended or other.is_attended
            one.sources |= other.sources
            for side, (entries, gain) in other.readers.items():
                self.add_reader(one, side, entries, gain)
            self._merged_into[other] = one
        return one

    def add_reader(
        self, space: Space, side: ParameterAxis, entries: torch.Tensor, gain: Gain | None
    ) -> None:
        """Record that a parameter multiplies vectors of a space."""
        space = self.find(space)
        known, before = space.readers.setdefault(side, (entries, gain))
        if not torch.equal(known, entries) or before != gain:
            self.split_fully(space, f"{side[0]} reads it in two ways")

    def split_fully(self, space: Space, reason: str) -> None:
        """Put every entry into a part of its own: no rotation is possible."""
        space = self.find(space)
        space.partition = torch.arange(len(space.partition), device="cpu")
        space.reason = space.reason or reason

    def split(self, space: Space, labels: torch.Tensor, alike: Iterable[int], reason: str) -> None:
        """Split a space into the parts whose entries an operation treats alike.

        Args:
            space: The space.
            labels: Entry of the space, -1 for none, of each element of a tensor.
            alike: Dimensions of the tensor along which the operation treats all elements alike.
            reason: Description of the operation.
        """
        space, same = self.find(space), {dim % labels.dim() for dim in alike}
        small = unexpand_labels(
            labels
        )  # along expanded dimensions every entry is at every position
        shape = [1 if d in same else n for d, n in enumerate(small.shape)]
        # Two entries are treated alike if they lie at the same places of the other dimensions. A
        # random number per place, summed by entry, tells that without comparing sets. Example:
        # values (heads, tokens, size) = (2, 1, 3), alike along the last: places r0, r1 (one per
        # head). Entries 0 to 2 have the sum r0, entries 3 to 5 the sum r1: two parts.
        generator = torch.Generator().manual_seed(0)
        places = torch.randint(2**40, shape, generator=generator, device="cpu").expand(small.shape)
        inside = small >= 0
        sums = torch.zeros(len(space.partition), dtype=torch.int64, device="cpu")
        sums.scatter_add_(0, small[inside], places[inside])
        parts = torch.unique(torch.stack([space.partition, sums]), dim=1, return_inverse=True)[1]
        if int(parts.max()) > int(space.partition.max()):
            space.partition = parts
            space.reason = space.reason or reason
