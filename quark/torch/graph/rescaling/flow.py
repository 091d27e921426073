"""How factors on the entries of a parameter travel through the operations that follow.

Every element of every tensor is marked with the factor it is proportional to, exactly, whatever
the data are; -1 stands for none. Operations are known by what they compute. One that is not listed
here, or that mixes factors, stops the flow: the factors that reach it cannot be free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.movement_ops import along, compact, is_move, replay, varies
from quark.torch.graph.trace import Op, Value

# f(c·x) = c·f(x) for c > 0
_HOMOGENEOUS = {"relu", "leaky_relu", "neg", "abs"}
_PRODUCTS = {"mm", "bmm", "_grouped_mm"}
_PRODUCTS_ADDED = {"addmm", "baddbmm"}
_NORMS = {"native_layer_norm": (2, 3), "_fused_rms_norm": (2, None)}  # weight and bias
ATTENTION = "_scaled_dot_product_"
# What is made has the shape of the input, not its values.
FACTORIES = {
    *("new_empty", "new_zeros", "empty", "zeros", "empty_like", "zeros_like", "zero"),
    *("new_ones", "new_full", "ones_like", "full_like", "fill"),
}


class Flow(NamedTuple):
    """What the elements of a tensor are proportional to: the inverse of ``factors ** power``.

    Attributes:
        labels: int64 in the shape of the tensor: which factor, -1 for none.
        power: Exponent, common to the tensor.
    """

    labels: torch.Tensor
    power: int


class Taken(NamedTuple):
    """How a parameter plus an offset takes part: along an axis, by ``factors[labels] ** power``."""

    axis: int
    labels: torch.Tensor
    power: int
    offset: float

    def same(self, other: Taken) -> bool:
        """Whether two operations ask the same of the parameter."""
        key = self.axis, self.power, self.offset
        theirs = other.axis, other.power, other.offset
        return key == theirs and torch.equal(self.labels, other.labels)


def operands(op: Op) -> tuple[Value | None, Value, Value] | None:
    """Return what a matrix product adds, and its factors: (…, rows, inner), (…, inner, columns).

    None for other operations.
    """
    if op.name in _PRODUCTS_ADDED:
        added, left, right = op.args[:3]
        return added, left, right
    if op.name in _PRODUCTS and not any(isinstance(arg, Value) for arg in op.args[3:]):
        return None, op.args[0], op.args[1]
    return None


class Spread:
    """The flow of the factors of one axis of a parameter through the operations of a pass.

    Attributes:
        flows: Number of a tensor -> its flow.
        stopped: (factors,) bool: which reached something that stops them.
        reason: What stopped the first of them.
        joined: Parameter -> operation -> how it is scaled like the producer: biases.
        absorbed: Parameter -> operation -> how it makes up for the factors: consumers.
        blocks: Decoder blocks of the operations on the way.
    """

    def __init__(self, aliases: Aliases, parameter: str, axis: int) -> None:
        self._aliases = aliases
        self.flows: dict[int, Flow] = {}
        for number in aliases.numbers[parameter]:
            labels = aliases.by_number[number].coordinates[axis]
            self.flows[number] = Flow(labels, 1)
        self.stopped = torch.zeros(aliases.shapes[parameter][axis], dtype=torch.bool)
        self.reason = ""
        self.joined: dict[str, dict[int, Taken]] = defaultdict(dict)
        self.absorbed: dict[str, dict[int, Taken]] = defaultdict(dict)
        self.blocks: set[str] = set()

    def stop(self, value: Value, reason: str) -> None:
        """Stop the factors in a tensor."""
        flow = self.flows.get(value.number)
        if flow is not None:
            self._stop_flow(flow, reason)

    def _stop_flow(self, flow: Flow, reason: str) -> None:
        labels = torch.unique(compact(flow.labels))
        self.stopped[labels[labels >= 0]] = True
        self.reason = self.reason or reason

    def step(self, index: int, op: Op) -> bool:
        """Carry the flow through an operation that reads a tensor with a flow.

        Returns:
            Whether something flows on.
        """
        self.blocks.add(op.block)
        out = self._rule(op)(index, op)
        for value, flow in zip(op.outputs, out, strict=False):
            if flow is not None:
                self.flows[value.number] = flow
        return any(flow is not None for flow in out)

    def _rule(self, op: Op) -> Callable[[int, Op], list[Flow | None]]:
        if is_move(op):
            return self._move
        if op.name in FACTORIES:
            return lambda index, op: []
        if op.name in _HOMOGENEOUS:
            return lambda index, op: [self._flow(op.args[0])]
        if operands(op) is not None:
            return self._product
        if op.name in _NORMS:
            return self._norm
        if op.name.startswith(ATTENTION):
            return self._attention
        rules = {
            "mul": self._mul,
            "div": self._div,
            "add": self._add,
            "sub": self._add,
            "pow": self._pow,
            "convolution": self._convolution,
        }
        return rules.get(op.name, self._unknown)

    def _flow(self, value: Any) -> Flow | None:
        return self.flows.get(value.number) if isinstance(value, Value) else None

    def _stop_all(self, op: Op, reason: str) -> list[Flow | None]:
        for value in op.inputs:
            self.stop(value, f"{reason} {op.where}")
        return []

    def _unknown(self, index: int, op: Op) -> list[Flow | None]:
        return self._stop_all(op, f"goes through {op.name}")

    def _move(self, index: int, op: Op) -> list[Flow | None]:
        flows = {v.number: f for v in op.inputs if (f := self._flow(v)) is not None}
        powers = {flow.power for flow in flows.values()}
        if len(powers) > 1:
            return self._stop_all(op, "is joined with a power of itself")
        labels = replay(op, {number: flow.labels for number, flow in flows.items()})
        return [Flow(marks, *powers) for marks in labels]

    def _mul(self, index: int, op: Op) -> list[Flow | None]:
        shape, both = op.outputs[0].shape, [self._flow(a) for a in op.args[:2]]
        flows = [Flow(f.labels.expand(shape), f.power) for f in both if f is not None]
        if len(flows) == 2 and not torch.equal(flows[0].labels, flows[1].labels):
            self._stop_flow(flows.pop(0), f"is multiplied with what it affects itself {op.where}")
        return [Flow(flows[0].labels, sum(flow.power for flow in flows))]

    def _div(self, index: int, op: Op) -> list[Flow | None]:
        if self._flow(op.args[1]) is not None:
            return self._stop_all(op, "divides something")
        if op.kwargs.get("rounding_mode") is not None:
            return self._unknown(index, op)
        return self._mul(index, op)

    def _pow(self, index: int, op: Op) -> list[Flow | None]:
        flow, exponent = self._flow(op.args[0]), op.args[1]
        if flow is None or not isinstance(exponent, int) or exponent < 1:
            return self._unknown(index, op)
        return [Flow(flow.labels, flow.power * exponent)]

    def _convolution(self, index: int, op: Op) -> list[Flow | None]:
        x, weight, bias = op.args[:3]  # (batch, channels, …), (channels out, …)
        is_transposed, groups = op.args[6], op.args[8]
        flows, channels = (self._flow(x), self._flow(weight)), op.outputs[0].shape[1]
        is_depthwise = groups == x.shape[1] == channels
        flow = flows[0] or flows[1]
        if flow is None or all(flows) or is_transposed or not (is_depthwise or flows[1]):
            return self._unknown(index, op)
        vector = along(flow.labels, 1 if flows[0] else 0)
        if vector is None:
            return self._unknown(index, op)
        batch, _, *places = op.outputs[0].shape
        out: Flow | None = Flow(vector.expand(batch, *places, channels), flow.power)
        if bias is not None:
            assert out is not None
            out = self._join(index, op, out, bias)
        return [out and out._replace(labels=out.labels.movedim(-1, 1))]

    def _add(self, index: int, op: Op) -> list[Flow | None]:
        (first, second), shape = op.args[:2], op.outputs[0].shape
        if self._flow(first) is None:
            first, second = second, first
        flow = self._flow(first)
        assert flow is not None
        flow = Flow(flow.labels.expand(shape), flow.power)
        return [self._join(index, op, flow, second)]

    def _join(self, index: int, op: Op, flow: Flow, other: Any) -> Flow | None:
        """Add something: it must be scaled alike, which a parameter can be."""
        theirs = self._flow(other)
        if theirs is not None:
            if theirs.power == flow.power and torch.equal(
                theirs.labels.expand(flow.labels.shape), flow.labels
            ):
                return flow
            self._stop_all(op, "is added to something else that it affects")
            return None
        alias = self._aliases.by_number.get(other.number) if isinstance(other, Value) else None
        if alias is None or len(alias.coordinates) != 1:
            self._stop_all(op, "is added to something else")
            self._stop_flow(flow, f"is added to something else {op.where}")
            return None
        places = alias.coordinates[0].expand(flow.labels.shape)
        vector = torch.full(self._aliases.shapes[alias.parameter], -1)
        vector[places] = flow.labels
        if not torch.equal(vector[places], flow.labels):
            self._stop_flow(flow, f"shares the bias {alias.parameter}")
            return None
        self.joined[alias.parameter][index] = Taken(0, vector, -flow.power, alias.offset)
        return flow

    def _norm(self, index: int, op: Op) -> list[Flow | None]:
        weight, bias = _NORMS[op.name]
        self.stop(op.args[0], f"is normalized {op.where}")
        flow = self._flow(op.args[weight])
        if flow is None:
            return self._stop_all(op, "is added to something else")
        out: Flow | None = Flow(flow.labels.expand(op.outputs[0].shape), flow.power)
        if bias is not None and op.args[bias] is not None:
            assert out is not None
            out = self._join(index, op, out, op.args[bias])
        return [out]

    def _attention(self, index: int, op: Op) -> list[Flow | None]:
        query, key, value = op.args[:3]  # (batch, heads, tokens, size)
        for other in (query, key):
            self.stop(other, f"goes through a softmax {op.where}")
        flow = self._flow(value)
        if flow is None:
            return []
        if varies(flow.labels, -2):
            self.stop(value, f"is mixed over tokens {op.where}")
            return []
        shape = op.outputs[0].shape
        labels = flow.labels[:, :, :1]
        labels = labels.repeat_interleave(shape[1] // labels.shape[1], 1)
        return [Flow(labels.expand(shape), flow.power)]

    def _product(self, index: int, op: Op) -> list[Flow | None]:
        factors = operands(op)
        assert factors is not None
        added, left, right = factors
        flows = self._flow(left), self._flow(right)
        if all(flows) or not any(flows):
            return self._stop_all(op, "is multiplied with what it affects itself")
        flow, inner, kept = (flows[0], -1, -2) if flows[0] else (flows[1], -2, -1)
        assert flow is not None
        own, other, other_inner = (left, right, -2) if flows[0] else (right, left, -1)
        if varies(flow.labels, inner):
            self._absorb(index, op, flow, own, inner, other, other_inner)
            return []
        labels = flow.labels.narrow(inner, 0, 1) if flow.labels.shape[inner] else flow.labels
        if op.name == "_grouped_mm" and labels.dim() == 3:  # rows meet one expert each
            vector = along(labels, kept)
            if vector is None:
                return self._stop_all(op, "differs between experts")
            labels = vector.unsqueeze(inner)
        out: Flow | None = Flow(labels.expand(op.outputs[0].shape), flow.power)
        if added is not None:
            assert out is not None
            out = self._join(index, op, out, added)
        return [out]

    def _absorb(
        self, index: int, op: Op, flow: Flow, own: Value, inner: int, other: Value, dim: int
    ) -> None:
        """Let the columns of a weight make up for the factors of what it multiplies."""
        alias = self._aliases.by_number.get(other.number)
        place = None if alias is None else alias.axis_along(dim)
        vector = along(flow.labels, inner)
        if alias is None or place is None or vector is None:
            what = "activations" if alias is None else "a weight in a way that is not understood"
            self.stop(own, f"is multiplied with {what} {op.where}")
            return
        axis, coordinates = place
        labels = torch.full((self._aliases.shapes[alias.parameter][axis],), -1)
        labels[coordinates] = vector
        self.absorbed[alias.parameter][index] = Taken(axis, labels, flow.power, alias.offset)
