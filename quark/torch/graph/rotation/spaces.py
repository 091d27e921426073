"""Spaces of vectors, and which of their entries may be mixed by a rotation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.movement_ops import compact

Side = tuple[str, int]  # a parameter and an axis of it


class Gain(NamedTuple):
    """A norm, as far as it matters for rotations: what it multiplies by, adds and takes away.

    Attributes:
        module: The module.
        weight: Parameter that the channels are multiplied by, if any.
        offset: What is added to it before.
        bias: Parameter that is added, if any.
        takes_mean: Whether it takes the mean of a vector away.
    """

    module: str
    weight: str | None = None
    offset: float = 0.0
    bias: str | None = None
    takes_mean: bool = False


@dataclass(eq=False)
class Space:
    """A space of vectors.

    Attributes:
        parts: (size,) int64: entries of one number may be mixed with each other.
        reason: What split it first.
        sources: Axes of parameters that give vectors of the space.
        is_attended: Whether attention mixes its vectors over tokens.
        readers: Axis of a parameter that vectors are multiplied with -> which entry of the space
            each position along it meets, and the norm in between.
    """

    parts: torch.Tensor
    reason: str = ""
    is_attended: bool = False
    sources: dict[Side, None] = field(default_factory=dict)
    readers: dict[Side, tuple[torch.Tensor, Gain | None]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all entries may be mixed."""
        return not bool((self.parts != self.parts[0]).any())


class Vectors(NamedTuple):
    """A tensor that holds vectors of a space.

    Attributes:
        labels: int64 in the shape of the tensor: entry of the space, -1 for none.
        space: The space.
        gain: The norm whose output this is. What it multiplies by is yet to be undone.
        is_square: Whether these are the squares of vectors.
    """

    labels: torch.Tensor
    space: Space
    gain: Gain | None = None
    is_square: bool = False


class Spaces:
    """The spaces of a model: one for each axis of a parameter, until they turn out to be one."""

    def __init__(self, aliases: Aliases) -> None:
        self._shapes = aliases.shapes
        self._joined: dict[Space, Space] = {}
        self._of_side: dict[Side, Space] = {}

    def all(self) -> list[Space]:
        """Return all spaces."""
        return list(dict.fromkeys(self.find(space) for space in self._of_side.values()))

    def source(self, side: Side) -> Space:
        """Return the space of what an axis of a parameter gives."""
        if side not in self._of_side:
            parts = torch.zeros(self._shapes[side[0]][side[1]], dtype=torch.int64)
            self._of_side[side] = Space(parts, sources={side: None})
        return self.find(self._of_side[side])

    def find(self, space: Space) -> Space:
        """Return what became of a space."""
        while space in self._joined:
            space = self._joined[space]
        return space

    def unite(self, one: Space, other: Space) -> Space:
        """Make one of two spaces of one size."""
        one, other = self.find(one), self.find(other)
        if one is not other:
            pairs = torch.stack([one.parts, other.parts])
            one.parts = torch.unique(pairs, dim=1, return_inverse=True)[1]
            one.reason = one.reason or other.reason
            one.is_attended = one.is_attended or other.is_attended
            one.sources |= other.sources
            for side, (entries, gain) in other.readers.items():
                self.add_reader(one, side, entries, gain)
            self._joined[other] = one
        return one

    def add_reader(
        self, space: Space, side: Side, entries: torch.Tensor, gain: Gain | None
    ) -> None:
        """Note that vectors of a space are multiplied with a parameter."""
        space = self.find(space)
        known, before = space.readers.setdefault(side, (entries, gain))
        if not torch.equal(known, entries) or before != gain:
            self.shatter(space, f"{side[0]} reads it in two ways")

    def shatter(self, space: Space, reason: str) -> None:
        """Let nothing be mixed."""
        space = self.find(space)
        space.parts = torch.arange(len(space.parts))
        space.reason = space.reason or reason

    def split(self, space: Space, labels: torch.Tensor, alike: Iterable[int], reason: str) -> None:
        """Keep apart entries that are treated differently.

        Args:
            space: The space.
            labels: Entry of the space, -1 for none, of each element of a tensor.
            alike: Dimensions of the tensor along which all elements are treated alike.
            reason: What treats the others differently.
        """
        space, same = self.find(space), {dim % labels.dim() for dim in alike}
        small = compact(labels)  # repeated along these dimensions: every entry is everywhere
        shape = [1 if d in same else n for d, n in enumerate(small.shape)]
        # An entry is told by the sum of random numbers of the places where it lies.
        generator = torch.Generator().manual_seed(0)
        places = torch.randint(2**40, shape, generator=generator).expand(small.shape)
        inside = small >= 0
        sums = torch.zeros(len(space.parts), dtype=torch.int64)
        sums.scatter_add_(0, small[inside], places[inside])
        parts = torch.unique(torch.stack([space.parts, sums]), dim=1, return_inverse=True)[1]
        if int(parts.max()) > int(space.parts.max()):
            space.parts = parts
            space.reason = space.reason or reason
