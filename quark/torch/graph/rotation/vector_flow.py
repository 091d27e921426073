"""The flow of vectors: which tensors hold vectors of one space, and would rotate with it.

The entries along an axis of a parameter form a space, such as the output channels of a projection.
Every element of every tensor that holds its vectors is labeled with an entry. Rules by operation:

- Moves, and linear operations that treat all entries alike, keep the space.
- Adding vectors of two spaces merges the spaces.
- Operations that treat entries differently split the space into parts that a rotation may still
  mix: attention splits values into heads, a nonlinearity splits off every entry.

Example: ``x = table[ids]; y = down(act(up(norm(x)))); x + y``

    table[ids]    space of the columns of table
    norm(x)       the same space, with the gain of the norm
    up(…)         reads the space; its outputs are a new space
    act(…)        splits the new space into single entries
    down(…)       a third space
    x + y         the first and the third space are merged: the residual stream
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from quark.torch.graph.aliases import Alias, Aliases
from quark.torch.graph.movement_ops import is_move, labels_vary, move_labels, project_labels
from quark.torch.graph.op_kinds import ATTENTION_PREFIX, FACTORIES, matmul_operands
from quark.torch.graph.rotation.spaces import Gain, ParameterAxis, Spaces, Vectors
from quark.torch.graph.trace import Op, Trace, Value


class VectorFlow:
    """The flow of the vectors of all spaces through a trace.

    Attributes:
        spaces: The spaces.
        vectors: Number of a tensor -> its vectors.
        understood: Parameter -> indices of the operations that read it and have a rule.
        unmatched: Axes of parameters that multiply tensors without vectors.
    """

    def __init__(self, trace: Trace, aliases: Aliases) -> None:
        self.spaces = Spaces(aliases)
        self.vectors: dict[int, Vectors] = {}
        self.understood: dict[str, set[int]] = defaultdict(set)
        self.unmatched: set[ParameterAxis] = set()
        self._aliases = aliases
        self._zeros: set[int] = set()  # tensors that hold zeros or uninitialized memory
        self._means: dict[
            int, int
        ] = {}  # number of a mean -> number of the tensor that was averaged
        for index, op in enumerate(trace.ops):
            if op.is_empty:
                continue
            out = self._rule(op)(index, op)
            for value, vectors in zip(op.outputs, out, strict=False):
                if vectors is not None:
                    self.vectors[value.number] = vectors
        for number in trace.results & self.vectors.keys():
            self._split(self.vectors[number], "leaves the model")

    def _rule(self, op: Op) -> Callable[[int, Op], list[Vectors | None]]:
        if op.name in FACTORIES:
            return self._factory
        if op.name == "index" and self._unshifted_alias(op.args[0]):
            return self._embedding
        if is_move(op):
            return self._move
        if matmul_operands(op) is not None:
            return self._product
        if op.name.startswith(ATTENTION_PREFIX):
            return self._attention
        rules = {
            "embedding": self._embedding,
            "add": self._add,
            "sub": self._sub,
            "mul": self._mul,
            "div": self._div,
            "neg": self._keep,
            "pow": self._pow,
            "square": self._pow,
            "mean": self._mean,
            "sum": self._sum,
            "index_add": self._scatter_rows,
            "index_put": self._scatter_rows,
            "masked_fill": self._masked_fill,
            "native_layer_norm": self._norm,
            "_fused_rms_norm": self._norm,
        }
        return rules.get(op.name, self._unknown)

    def _vectors_of(self, value: Any) -> Vectors | None:
        return self.vectors.get(value.number) if isinstance(value, Value) else None

    def _alias(self, value: Any) -> Alias | None:
        return self._aliases.by_number.get(value.number) if isinstance(value, Value) else None

    def _unshifted_alias(self, value: Any) -> Alias | None:
        """Return the alias that a tensor is, None if a constant was added to the parameter."""
        alias = self._alias(value)
        return None if alias is None or alias.offset else alias

    def _split(self, vectors: Vectors, reason: str) -> None:
        self.spaces.split(vectors.space, vectors.labels, (), reason)

    def _unknown(self, index: int, op: Op, what: str = "") -> list[Vectors | None]:
        for value in op.inputs:
            vectors = self._vectors_of(value)
            if vectors is not None:
                self._split(vectors, f"{what or f'goes through {op.name}'} {op.location}")
        return []

    def _factory(self, index: int, op: Op) -> list[Vectors | None]:
        if "empty" in op.name or "zero" in op.name:
            self._zeros.update(v.number for v in op.outputs)
        return []

    def _keep(self, index: int, op: Op) -> list[Vectors | None]:
        return [self._vectors_of(op.args[0])]

    def _move(self, index: int, op: Op) -> list[Vectors | None]:
        inputs = [(v.number, w) for v in op.inputs if (w := self._vectors_of(v)) is not None]
        if not inputs:
            if len(op.inputs) == 1 and op.inputs[0].number in self._zeros:
                self._zeros.update(v.number for v in op.outputs)
            return []
        first = inputs[0][1]
        for _, other in inputs[1:]:
            if not self._merge_spaces(first, other):
                return self._unknown(index, op, "is concatenated with another tensor")
        labels = move_labels(op, {number: vectors.labels for number, vectors in inputs})
        return [first._replace(labels=marks) for marks in labels]

    def _merge_spaces(self, one: Vectors, other: Vectors) -> bool:
        """Merge the spaces of two tensors; return whether they can be merged."""
        if one.gain != other.gain or one.is_square != other.is_square:
            return False
        if len(one.space.partition) != len(other.space.partition):
            return False
        self.spaces.merge(one.space, other.space)
        return True

    def _embedding(self, index: int, op: Op) -> list[Vectors | None]:
        alias = self._unshifted_alias(op.args[0])
        match = None if alias is None else alias.match_axis(-1)
        is_row = op.name == "embedding" or len(op.args[1]) < len(op.args[0].shape)
        if alias is None or match is None or not is_row:
            return self._unknown(index, op)
        return [self._parameter_vectors(index, alias, match, -1, op.outputs[0])]

    def _parameter_vectors(
        self, index: int, alias: Alias, match: tuple[int, torch.Tensor], dim: int, out: Value
    ) -> Vectors:
        """Return a tensor whose dimension ``dim`` runs along an axis of a parameter as vectors."""
        axis, coordinates = match
        self.understood[alias.parameter].add(index)
        shape = [1] * len(out.shape)
        shape[dim] = -1
        labels = coordinates.view(shape).expand(out.shape)
        return Vectors(labels, self.spaces.get((alias.parameter, axis)))

    def _add(self, index: int, op: Op) -> list[Vectors | None]:
        first, second = op.args[:2]
        if self._vectors_of(first) is None:
            first, second = second, first
        return [self._add_term(index, op, self._vectors_of(first), second)]

    def _add_term(self, index: int, op: Op, vectors: Vectors | None, other: Any) -> Vectors | None:
        """Add a term to vectors. Its space is merged; a parameter alone becomes a source."""
        if vectors is None:
            return None
        labels = vectors.labels.expand(op.outputs[0].shape)
        vectors = vectors._replace(labels=labels)
        if isinstance(other, Value) and other.number in self._zeros:
            return vectors
        alias, term = self._unshifted_alias(other), self._vectors_of(other)
        if alias is not None and term is None:
            match = alias.match_axis(-1)
            if match is not None and vectors.gain is not None and vectors.gain.bias is None:
                self.understood[alias.parameter].add(index)
                return vectors._replace(gain=vectors.gain._replace(bias=alias.parameter))
            if match is not None:
                term = self._parameter_vectors(index, alias, match, -1, op.outputs[0])
        if term is None or not torch.equal(term.labels.expand(labels.shape), labels):
            self._split(vectors, f"is added to another tensor {op.location}")
            if term is not None:
                self._split(term, f"is added to another tensor {op.location}")
            return None
        if not self._merge_spaces(vectors, term):
            norm = vectors.gain or term.gain
            source = f"the output of {norm.module}" if norm else "another tensor"
            reason = f"is added to {source} {op.location}"
            self._split(vectors, reason)
            self._split(term, reason)
            return None
        return vectors

    def _sub(self, index: int, op: Op) -> list[Vectors | None]:
        vectors, mean = self._vectors_of(op.args[0]), op.args[1]
        is_mean = isinstance(mean, Value) and isinstance(op.args[0], Value)
        if vectors is not None and is_mean and self._means.get(mean.number) == op.args[0].number:
            return [vectors._replace(gain=Gain(op.module, subtracts_mean=True))]
        return self._unknown(index, op)

    def _div(self, index: int, op: Op) -> list[Vectors | None]:
        if self._vectors_of(op.args[1]) is not None or op.kwargs.get("rounding_mode") is not None:
            return self._unknown(index, op)
        return self._mul(index, op)

    def _mul(self, index: int, op: Op) -> list[Vectors | None]:
        (first, second), shape = op.args[:2], op.outputs[0].shape
        one, other = self._vectors_of(first), self._vectors_of(second)
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
            scaled = self._apply_gain(index, op, vectors, alias)
            if scaled is not None:
                return [scaled]
        size = (1,) * (len(shape) - len(second.shape)) + tuple(second.shape)
        alike = [d for d in range(len(shape)) if size[d] == 1]
        reason = f"is multiplied by another tensor {op.location}"
        self.spaces.split(vectors.space, vectors.labels, alike, reason)
        return [vectors]

    def _apply_gain(self, index: int, op: Op, vectors: Vectors, alias: Alias) -> Vectors | None:
        """Multiply whole vectors by a parameter entry by entry: a gain, at most one per vector."""
        gain, match = vectors.gain or Gain(op.module), alias.match_axis(-1)
        entries = project_labels(vectors.labels, -1)
        if gain.weight is not None or match is None or entries is None or vectors.is_square:
            return None
        if not torch.equal(entries, match[1]) or len(entries) != len(vectors.space.partition):
            return None
        self.understood[alias.parameter].add(index)
        return vectors._replace(gain=gain._replace(weight=alias.parameter, offset=alias.offset))

    def _pow(self, index: int, op: Op) -> list[Vectors | None]:
        vectors = self._vectors_of(op.args[0])
        if vectors is None or vectors.is_square or (op.name == "pow" and op.args[1] != 2):
            return self._unknown(index, op)
        return [vectors._replace(is_square=True)]

    def _mean(self, index: int, op: Op) -> list[Vectors | None]:
        vectors = self._vectors_of(op.args[0])
        if vectors is None:
            return []
        dims = op.args[1] if len(op.args) > 1 else None
        dims = [dims] if isinstance(dims, int) else dims
        if vectors.is_square and dims:
            reason = f"is normalized in parts {op.location}"
            self.spaces.split(vectors.space, vectors.labels, dims, reason)
            return []
        entries = project_labels(vectors.labels, -1)
        is_whole = entries is not None and len(entries) == len(vectors.space.partition)
        if vectors.gain is None and is_whole and dims in ([-1], [vectors.labels.dim() - 1]):
            self._means[op.outputs[0].number] = op.args[0].number
            return []
        return self._unknown(index, op)

    def _sum(self, index: int, op: Op) -> list[Vectors | None]:
        vectors = self._vectors_of(op.args[0])
        if vectors is None or vectors.is_square:
            return self._mean(index, op)
        dims, rank = (op.args[1] if len(op.args) > 1 else None), vectors.labels.dim()
        entries = project_labels(vectors.labels, -1)
        if not dims or entries is None or rank - 1 in {dim % rank for dim in dims}:
            return self._unknown(index, op)
        return [vectors._replace(labels=entries.expand(op.outputs[0].shape))]

    def _scatter_rows(self, index: int, op: Op) -> list[Vectors | None]:
        """Write rows of one tensor to rows of another, or add them (``index_put, index_add``)."""
        target, source = op.args[0], op.args[3] if op.name == "index_add" else op.args[2]
        vectors, old = self._vectors_of(source), self._vectors_of(target)
        rank, is_zero = len(target.shape), target.number in self._zeros
        if not source.shape.numel():
            self._zeros.update(v.number for v in op.outputs if is_zero)
            return [old]
        entries = None if vectors is None else project_labels(vectors.labels, -1)
        last = op.args[1] % rank + 1 if op.name == "index_add" else len(op.args[1])
        if vectors is None or entries is None or last == rank or not (is_zero or old):
            return self._unknown(index, op)
        if old is not None and not self._merge_spaces(vectors, old):
            return self._unknown(index, op, "is added to another tensor")
        return [vectors._replace(labels=entries.expand(op.outputs[0].shape))]

    def _masked_fill(self, index: int, op: Op) -> list[Vectors | None]:
        vectors, mask, value = self._vectors_of(op.args[0]), op.args[1], op.args[2]
        if vectors is None:
            return []
        if value != 0 or (mask.shape and mask.shape[-1] != 1):
            return self._unknown(index, op)
        return [vectors]

    def _norm(self, index: int, op: Op) -> list[Vectors | None]:
        vectors, shape = self._vectors_of(op.args[0]), op.args[1]
        if vectors is None:
            return []
        entries = project_labels(vectors.labels, -1)
        is_whole = entries is not None and len(entries) == len(vectors.space.partition)
        if vectors.gain is not None or vectors.is_square or len(shape) != 1 or not is_whole:
            return self._unknown(index, op)
        is_layer = op.name == "native_layer_norm"
        weight, bias = (
            self._alias(op.args[2]),
            self._unshifted_alias(op.args[3]) if is_layer else None,
        )
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
            vectors = self._vectors_of(other)
            if vectors is not None:
                self._split(vectors, f"goes through a softmax {op.location}")
        vectors = self._vectors_of(value)
        if vectors is None or vectors.gain is not None or vectors.is_square:
            return self._unknown(index, op)
        if labels_vary(vectors.labels, -2):
            return self._unknown(index, op)
        self._split_heads(vectors, op)
        shape = op.outputs[0].shape
        labels = vectors.labels[:, :, :1]
        labels = labels.repeat_interleave(shape[1] // labels.shape[1], 1)
        return [vectors._replace(labels=labels.expand(shape))]

    def _split_heads(self, vectors: Vectors, op: Op) -> None:
        self.spaces.split(vectors.space, vectors.labels, (-1,), f"has heads {op.location}")
        self.spaces.find(vectors.space).is_attended = True

    def _product(self, index: int, op: Op) -> list[Vectors | None]:
        factors = matmul_operands(op)
        assert factors is not None
        added, left, right = factors
        vectors, weight = self._vectors_of(left), self._unshifted_alias(right)
        if self._vectors_of(right) is not None:
            return self._mix_tokens(index, op, left, right)
        if weight is None:
            return self._unknown(index, op)
        inner, match = weight.match_axis(-2), weight.match_axis(-1)
        if vectors is not None:
            self._apply_weight(index, op, vectors, weight)
        elif inner is not None:
            self.unmatched.add((weight.parameter, inner[0]))
        if match is None:
            return []
        out = self._parameter_vectors(index, weight, match, -1, op.outputs[0])
        return [out if added is None else self._add_term(index, op, out, added)]

    def _apply_weight(self, index: int, op: Op, vectors: Vectors, weight: Alias) -> None:
        """Multiply vectors by a weight, whose input axis can be rotated to match."""
        match, entries = weight.match_axis(-2), project_labels(vectors.labels, -1)
        if match is None or entries is None or vectors.is_square:
            self._split(vectors, f"is not read as vectors {op.location}")
            return
        axis, coordinates = match
        met = torch.full((self._aliases.shapes[weight.parameter][axis],), -1, device="cpu")
        met[coordinates] = entries
        self.understood[weight.parameter].add(index)
        side = (weight.parameter, axis)
        self.spaces.add_reader(vectors.space, side, met, vectors.gain)

    def _mix_tokens(self, index: int, op: Op, left: Value, right: Value) -> list[Vectors | None]:
        """Average vectors over tokens, as attention does with values."""
        vectors = self._vectors_of(right)
        if self._vectors_of(left) is not None or vectors is None or vectors.gain is not None:
            return self._unknown(index, op)
        if vectors.is_square or labels_vary(vectors.labels, -2) or op.name not in ("mm", "bmm"):
            return self._unknown(index, op)
        self._split_heads(vectors, op)
        labels = vectors.labels.narrow(-2, 0, 1)
        return [vectors._replace(labels=labels.expand(op.outputs[0].shape))]
