"""Which tensors hold vectors of one space, so that a rotation of it carries through the model.

Where ``flow`` follows factors, this follows vectors. The entries along an axis of a parameter are a
space, such as the rows of a projection. What is computed of it linearly, and alike for all entries,
holds vectors of that space. What is added must be of the same space, and spaces that are added are
one. Whatever treats entries differently splits the space into the parts that may still be mixed:
attention splits values into heads, a nonlinearity splits all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from quark.torch.graph.aliases import Alias, Aliases
from quark.torch.graph.movement_ops import along, is_move, replay, varies
from quark.torch.graph.rescaling.flow import ATTENTION, FACTORIES, operands
from quark.torch.graph.rotation.spaces import Gain, Side, Spaces, Vectors
from quark.torch.graph.trace import Op, Trace, Value


class Follower:
    """Follows the vectors of all spaces through a pass.

    Attributes:
        spaces: The spaces.
        held: Number of a tensor -> the vectors in it.
        understood: Parameter -> operations that read it as its spaces tell.
        foreign: Axes of parameters that meet something else than vectors of a space.
    """

    def __init__(self, trace: Trace, aliases: Aliases) -> None:
        self.spaces = Spaces(aliases)
        self.held: dict[int, Vectors] = {}
        self.understood: dict[str, set[int]] = defaultdict(set)
        self.foreign: set[Side] = set()
        self._aliases = aliases
        self._zeros: set[int] = set()  # tensors without content
        self._means: dict[int, int] = {}  # number of a mean -> of what it is the mean
        for index, op in enumerate(trace.ops):
            if op.is_idle:
                continue
            out = self._rule(op)(index, op)
            for value, vectors in zip(op.outputs, out, strict=False):
                if vectors is not None:
                    self.held[value.number] = vectors
        for number in trace.results & self.held.keys():
            self._keep_apart(self.held[number], "leaves the model")

    def _rule(self, op: Op) -> Callable[[int, Op], list[Vectors | None]]:
        if op.name in FACTORIES:
            return self._factory
        if op.name == "index" and self._plain(op.args[0]):
            return self._embedding
        if is_move(op):
            return self._move
        if operands(op) is not None:
            return self._product
        if op.name.startswith(ATTENTION):
            return self._attention
        rules = {
            "embedding": self._embedding,
            "add": self._add,
            "sub": self._sub,
            "mul": self._mul,
            "div": self._div,
            "neg": self._same,
            "pow": self._pow,
            "square": self._pow,
            "mean": self._mean,
            "sum": self._sum,
            "index_add": self._placed,
            "index_put": self._placed,
            "masked_fill": self._masked,
            "native_layer_norm": self._norm,
            "_fused_rms_norm": self._norm,
        }
        return rules.get(op.name, self._unknown)

    def _of(self, value: Any) -> Vectors | None:
        return self.held.get(value.number) if isinstance(value, Value) else None

    def _alias(self, value: Any) -> Alias | None:
        return self._aliases.by_number.get(value.number) if isinstance(value, Value) else None

    def _plain(self, value: Any) -> Alias | None:
        """Return the parameter that a tensor holds as it is, with nothing added."""
        alias = self._alias(value)
        return None if alias is None or alias.offset else alias

    def _keep_apart(self, vectors: Vectors, reason: str) -> None:
        self.spaces.split(vectors.space, vectors.labels, (), reason)

    def _unknown(self, index: int, op: Op, what: str = "") -> list[Vectors | None]:
        for value in op.inputs:
            vectors = self._of(value)
            if vectors is not None:
                self._keep_apart(vectors, f"{what or f'goes through {op.name}'} {op.where}")
        return []

    def _factory(self, index: int, op: Op) -> list[Vectors | None]:
        if "empty" in op.name or "zero" in op.name:
            self._zeros.update(v.number for v in op.outputs)
        return []

    def _same(self, index: int, op: Op) -> list[Vectors | None]:
        return [self._of(op.args[0])]

    def _move(self, index: int, op: Op) -> list[Vectors | None]:
        found = [(v.number, w) for v in op.inputs if (w := self._of(v)) is not None]
        if not found:
            if len(op.inputs) == 1 and op.inputs[0].number in self._zeros:
                self._zeros.update(v.number for v in op.outputs)
            return []
        first = found[0][1]
        for _, other in found[1:]:
            if not self._agree(first, other):
                return self._unknown(index, op, "is joined with something else")
        labels = replay(op, {number: vectors.labels for number, vectors in found})
        return [first._replace(labels=marks) for marks in labels]

    def _agree(self, one: Vectors, other: Vectors) -> bool:
        """Make the spaces of two tensors one, if they can be."""
        if one.gain != other.gain or one.is_square != other.is_square:
            return False
        if len(one.space.parts) != len(other.space.parts):
            return False
        self.spaces.unite(one.space, other.space)
        return True

    def _embedding(self, index: int, op: Op) -> list[Vectors | None]:
        alias = self._plain(op.args[0])
        place = None if alias is None else alias.axis_along(-1)
        is_row = op.name == "embedding" or len(op.args[1]) < len(op.args[0].shape)
        if alias is None or place is None or not is_row:
            return self._unknown(index, op)
        return [self._given(index, alias, place, -1, op.outputs[0])]

    def _given(
        self, index: int, alias: Alias, place: tuple[int, torch.Tensor], dim: int, out: Value
    ) -> Vectors:
        """Return what lies along one dimension as the entries along an axis of a parameter."""
        axis, coordinates = place
        self.understood[alias.parameter].add(index)
        shape = [1] * len(out.shape)
        shape[dim] = -1
        labels = coordinates.view(shape).expand(out.shape)
        return Vectors(labels, self.spaces.source((alias.parameter, axis)))

    def _add(self, index: int, op: Op) -> list[Vectors | None]:
        first, second = op.args[:2]
        if self._of(first) is None:
            first, second = second, first
        return [self._sum_of(index, op, self._of(first), second)]

    def _sum_of(self, index: int, op: Op, vectors: Vectors | None, other: Any) -> Vectors | None:
        """Add something to vectors: it must be of their space, which a parameter can become."""
        if vectors is None:
            return None
        labels = vectors.labels.expand(op.outputs[0].shape)
        vectors = vectors._replace(labels=labels)
        if isinstance(other, Value) and other.number in self._zeros:
            return vectors
        alias, theirs = self._plain(other), self._of(other)
        if alias is not None and theirs is None:
            place = alias.axis_along(-1)
            if place is not None and vectors.gain is not None and vectors.gain.bias is None:
                self.understood[alias.parameter].add(index)
                return vectors._replace(gain=vectors.gain._replace(bias=alias.parameter))
            if place is not None:
                theirs = self._given(index, alias, place, -1, op.outputs[0])
        if theirs is None or not torch.equal(theirs.labels.expand(labels.shape), labels):
            self._keep_apart(vectors, f"is added to something else {op.where}")
            if theirs is not None:
                self._keep_apart(theirs, f"is added to something else {op.where}")
            return None
        if not self._agree(vectors, theirs):
            norm = vectors.gain or theirs.gain
            reason = (
                f"is added to the output of {norm.module} {op.where}"
                if norm
                else f"is added to something else {op.where}"
            )
            self._keep_apart(vectors, reason)
            self._keep_apart(theirs, reason)
            return None
        return vectors

    def _sub(self, index: int, op: Op) -> list[Vectors | None]:
        vectors, mean = self._of(op.args[0]), op.args[1]
        is_mean = isinstance(mean, Value) and isinstance(op.args[0], Value)
        if vectors is not None and is_mean and self._means.get(mean.number) == op.args[0].number:
            return [vectors._replace(gain=Gain(op.module, takes_mean=True))]
        return self._unknown(index, op)

    def _div(self, index: int, op: Op) -> list[Vectors | None]:
        if self._of(op.args[1]) is not None or op.kwargs.get("rounding_mode") is not None:
            return self._unknown(index, op)
        return self._mul(index, op)

    def _mul(self, index: int, op: Op) -> list[Vectors | None]:
        (first, second), shape = op.args[:2], op.outputs[0].shape
        one, other = self._of(first), self._of(second)
        if one is None and other is None:
            return []
        if one is not None and other is not None:
            is_same = op.name == "mul" and first.number == second.number
            return [one._replace(is_square=True)] if is_same else self._unknown(index, op)
        if one is None:
            one, first, second = other, second, first
        assert one is not None
        vectors = one._replace(labels=one.labels.expand(shape))
        if not isinstance(second, Value):
            return [vectors]
        alias = self._alias(second)
        if alias is not None and len(alias.coordinates) == 1 and op.name == "mul":
            scaled = self._scaled(index, op, vectors, alias)
            if scaled is not None:
                return [scaled]
        size = (1,) * (len(shape) - len(second.shape)) + tuple(second.shape)
        alike = [d for d in range(len(shape)) if size[d] == 1]
        reason = f"is multiplied with something else {op.where}"
        self.spaces.split(vectors.space, vectors.labels, alike, reason)
        return [vectors]

    def _scaled(self, index: int, op: Op, vectors: Vectors, alias: Alias) -> Vectors | None:
        """Multiply whole vectors by a parameter, entry by entry, if they were not yet."""
        gain, place = vectors.gain or Gain(op.module), alias.axis_along(-1)
        entries = along(vectors.labels, -1)
        if gain.weight is not None or place is None or entries is None or vectors.is_square:
            return None
        if not torch.equal(entries, place[1]) or len(entries) != len(vectors.space.parts):
            return None
        self.understood[alias.parameter].add(index)
        return vectors._replace(gain=gain._replace(weight=alias.parameter, offset=alias.offset))

    def _pow(self, index: int, op: Op) -> list[Vectors | None]:
        vectors = self._of(op.args[0])
        if vectors is None or vectors.is_square or (op.name == "pow" and op.args[1] != 2):
            return self._unknown(index, op)
        return [vectors._replace(is_square=True)]

    def _mean(self, index: int, op: Op) -> list[Vectors | None]:
        vectors = self._of(op.args[0])
        if vectors is None:
            return []
        dims = op.args[1] if len(op.args) > 1 else None
        dims = [dims] if isinstance(dims, int) else dims
        if vectors.is_square and dims:
            reason = f"is normalized in parts {op.where}"
            self.spaces.split(vectors.space, vectors.labels, dims, reason)
            return []
        entries = along(vectors.labels, -1)
        is_whole = entries is not None and len(entries) == len(vectors.space.parts)
        if vectors.gain is None and is_whole and dims in ([-1], [vectors.labels.dim() - 1]):
            self._means[op.outputs[0].number] = op.args[0].number
            return []
        return self._unknown(index, op)

    def _sum(self, index: int, op: Op) -> list[Vectors | None]:
        vectors = self._of(op.args[0])
        if vectors is None or vectors.is_square:
            return self._mean(index, op)
        dims, rank = (op.args[1] if len(op.args) > 1 else None), vectors.labels.dim()
        entries = along(vectors.labels, -1)
        if not dims or entries is None or rank - 1 in {dim % rank for dim in dims}:
            return self._unknown(index, op)
        return [vectors._replace(labels=entries.expand(op.outputs[0].shape))]

    def _placed(self, index: int, op: Op) -> list[Vectors | None]:
        """Put rows of one tensor, or add them, to rows of another."""
        target, source = op.args[0], op.args[3] if op.name == "index_add" else op.args[2]
        vectors, old = self._of(source), self._of(target)
        rank, is_zero = len(target.shape), target.number in self._zeros
        if not source.shape.numel():
            self._zeros.update(v.number for v in op.outputs if is_zero)
            return [old]
        entries = None if vectors is None else along(vectors.labels, -1)
        last = op.args[1] % rank + 1 if op.name == "index_add" else len(op.args[1])
        if vectors is None or entries is None or last == rank or not (is_zero or old):
            return self._unknown(index, op)
        if old is not None and not self._agree(vectors, old):
            return self._unknown(index, op, "is added to something else")
        return [vectors._replace(labels=entries.expand(op.outputs[0].shape))]

    def _masked(self, index: int, op: Op) -> list[Vectors | None]:
        vectors, mask, value = self._of(op.args[0]), op.args[1], op.args[2]
        if vectors is None:
            return []
        if value != 0 or (mask.shape and mask.shape[-1] != 1):
            return self._unknown(index, op)
        return [vectors]

    def _norm(self, index: int, op: Op) -> list[Vectors | None]:
        vectors, shape = self._of(op.args[0]), op.args[1]
        if vectors is None:
            return []
        entries = along(vectors.labels, -1)
        is_whole = entries is not None and len(entries) == len(vectors.space.parts)
        if vectors.gain is not None or vectors.is_square or len(shape) != 1 or not is_whole:
            return self._unknown(index, op)
        is_layer = op.name == "native_layer_norm"
        weight, bias = self._alias(op.args[2]), self._plain(op.args[3]) if is_layer else None
        if (weight is None) != (op.args[2] is None):
            return self._unknown(index, op)
        if is_layer and (bias is None) != (op.args[3] is None):
            return self._unknown(index, op)
        for alias in (weight, bias):
            if alias is not None:
                self.understood[alias.parameter].add(index)
        gain = Gain(
            op.module,
            weight.parameter if weight else None,
            weight.offset if weight else 0.0,
            bias.parameter if bias else None,
            is_layer,
        )
        return [vectors._replace(gain=gain)]

    def _attention(self, index: int, op: Op) -> list[Vectors | None]:
        query, key, value = op.args[:3]  # (batch, heads, tokens, size)
        for other in (query, key):
            vectors = self._of(other)
            if vectors is not None:
                self._keep_apart(vectors, f"goes through a softmax {op.where}")
        vectors = self._of(value)
        if vectors is None or vectors.gain is not None or vectors.is_square:
            return self._unknown(index, op)
        if varies(vectors.labels, -2):
            return self._unknown(index, op)
        self._attend(vectors, op)
        shape = op.outputs[0].shape
        labels = vectors.labels[:, :, :1]
        labels = labels.repeat_interleave(shape[1] // labels.shape[1], 1)
        return [vectors._replace(labels=labels.expand(shape))]

    def _attend(self, vectors: Vectors, op: Op) -> None:
        self.spaces.split(vectors.space, vectors.labels, (-1,), f"has heads {op.where}")
        self.spaces.find(vectors.space).is_attended = True

    def _product(self, index: int, op: Op) -> list[Vectors | None]:
        factors = operands(op)
        assert factors is not None
        added, left, right = factors
        vectors, weight = self._of(left), self._plain(right)
        if self._of(right) is not None:
            return self._mixed(index, op, left, right)
        if weight is None:
            return self._unknown(index, op)
        inner, place = weight.axis_along(-2), weight.axis_along(-1)
        if vectors is not None:
            self._read(index, op, vectors, weight)
        elif inner is not None:
            self.foreign.add((weight.parameter, inner[0]))
        if place is None:
            return []
        out = self._given(index, weight, place, -1, op.outputs[0])
        return [out if added is None else self._sum_of(index, op, out, added)]

    def _read(self, index: int, op: Op, vectors: Vectors, weight: Alias) -> None:
        """Multiply vectors with a weight, which can undo a rotation."""
        place, entries = weight.axis_along(-2), along(vectors.labels, -1)
        if place is None or entries is None or vectors.is_square:
            self._keep_apart(vectors, f"is not read as vectors {op.where}")
            return
        axis, coordinates = place
        met = torch.full((self._aliases.shapes[weight.parameter][axis],), -1)
        met[coordinates] = entries
        self.understood[weight.parameter].add(index)
        side = (weight.parameter, axis)
        self.spaces.add_reader(vectors.space, side, met, vectors.gain)

    def _mixed(self, index: int, op: Op, left: Value, right: Value) -> list[Vectors | None]:
        """Mix vectors with each other, as attention does."""
        vectors = self._of(right)
        if self._of(left) is not None or vectors is None or vectors.gain is not None:
            return self._unknown(index, op)
        if vectors.is_square or varies(vectors.labels, -2) or op.name not in ("mm", "bmm"):
            return self._unknown(index, op)
        self._attend(vectors, op)
        labels = vectors.labels.narrow(-2, 0, 1)
        return [vectors._replace(labels=labels.expand(op.outputs[0].shape))]
