"""The flow of factors: which factor each element of each tensor is proportional to.

Imagine each output channel of a layer divided by its own factor. Every element of every tensor gets
a label: the number of the factor it is inversely proportional to, for any data; -1 for none.

Example: ``y = W x + b`` with 3 outputs, divided by f0, f1, f2. The last axis of y has the labels
[0, 1, 2]. So has that of ``relu(y)``, since relu(c·y) = c·relu(y) for c > 0, and that of
``y.view(..., 3, 1)``, moved as the elements are. ``V y`` absorbs the factors if column i of V is
multiplied by fi. ``tanh(y)`` is not proportional to anything: it stops the three factors.

An operation without a rule stops all factors that reach it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.movement_ops import (
    is_move,
    labels_vary,
    move_labels,
    project_labels,
    unexpand_labels,
)
from quark.torch.graph.op_kinds import ATTENTION_PREFIX, FACTORIES, matmul_operands
from quark.torch.graph.trace import Op, Value

# f(c·x) = c·f(x) for c > 0
_HOMOGENEOUS = {"relu", "leaky_relu", "_prelu_kernel", "neg", "abs"}
_NORMS = {  # arguments that are weight and bias, axis of the channels
    "native_layer_norm": (2, 3, -1),
    "_fused_rms_norm": (2, None, -1),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training"), (1, 2, 1)),
    **dict.fromkeys(("cudnn_batch_norm", "miopen_batch_norm"), (1, 2, 1)),
    "_batch_norm_no_update": (1, 2, 1),
    "native_group_norm": (1, 2, 1),
}
# f(c·x) = c·f(x) for c > 0 and each channel alone: averages and maxima over positions
_POOLS = {
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "mean"),
    *("upsample_nearest1d", "upsample_linear1d", "upsample_nearest2d", "upsample_bilinear2d"),
    *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    *("adaptive_max_pool3d", "constant_pad_nd"),
}


class FactorLabels(NamedTuple):
    """Labels of a tensor whose elements are proportional to ``factors[labels] ** -power``.

    Attributes:
        labels: int64 in the shape of the tensor, number of a factor, -1 for none.
        power: Exponent of the whole tensor: 2 after a square.
    """

    labels: torch.Tensor
    power: int


class ParameterUse(NamedTuple):
    """The change that an operation requires of a parameter that it reads.

    (parameter + offset) is multiplied by ``factors[labels] ** power`` along an axis.
    """

    axis: int
    labels: torch.Tensor
    power: int
    offset: float

    def matches(self, other: ParameterUse) -> bool:
        """Whether two operations require the same change of the parameter."""
        key = self.axis, self.power, self.offset
        other_key = other.axis, other.power, other.offset
        return key == other_key and torch.equal(self.labels, other.labels)


class FactorFlow:
    """The flow of the factors of one axis of a parameter through the operations of a pass.

    Attributes:
        flows: Number of a tensor -> its labels.
        stopped: (factors,) bool, whether an operation stops the factor.
        reason: The operation that stopped the first factor, for messages.
        biases: Parameter -> operation -> its change: divided like the producer.
        consumers: Parameter -> operation -> its change: multiplied, to undo the factors.
        blocks: Decoder blocks of the operations that the flow passes.
    """

    def __init__(self, aliases: Aliases, parameter: str, axis: int) -> None:
        self._aliases = aliases
        self.flows: dict[int, FactorLabels] = {}
        for number in aliases.numbers[parameter]:
            labels = aliases.by_number[number].coordinates[axis]
            self.flows[number] = FactorLabels(labels, 1)
        self.stopped = torch.zeros(aliases.shapes[parameter][axis], dtype=torch.bool, device="cpu")
        self.reason = ""
        self.biases: dict[str, dict[int, ParameterUse]] = defaultdict(dict)
        self.consumers: dict[str, dict[int, ParameterUse]] = defaultdict(dict)
        self.blocks: set[str] = set()

    def stop(self, value: Value, reason: str) -> None:
        """Stop the factors in a tensor."""
        flow = self.flows.get(value.number)
        if flow is not None:
            self._stop_flow(flow, reason)

    def _stop_flow(self, flow: FactorLabels, reason: str) -> None:
        labels = torch.unique(unexpand_labels(flow.labels))
        self.stopped[labels[labels >= 0]] = True
        self.reason = self.reason or reason

    def propagate(self, index: int, op: Op) -> bool:
        """Label the outputs of an operation that reads a labeled tensor.

        Returns:
            Whether any output has labels.
        """
        self.blocks.add(op.block)
        out = self._rule(op)(index, op)
        for value, flow in zip(op.outputs, out, strict=False):
            if flow is not None:
                self.flows[value.number] = flow
        return any(flow is not None for flow in out)

    def _rule(self, op: Op) -> Callable[[int, Op], list[FactorLabels | None]]:
        if is_move(op):
            return self._move
        if op.name in FACTORIES:
            return lambda index, op: []
        if op.name in _HOMOGENEOUS:
            return lambda index, op: [self._flow(op.args[0])]
        if matmul_operands(op) is not None:
            return self._product
        if op.name in _NORMS:
            return self._norm
        if op.name in _POOLS:
            return self._pool
        if op.name.startswith(ATTENTION_PREFIX):
            return self._attention
        rules = {
            "mul": self._mul,
            "div": self._div,
            "add": self._add,
            "sub": self._add,
            "pow": self._pow,
            "convolution": self._convolution,
            "minimum": self._compare,
            "maximum": self._compare,
        }
        return rules.get(op.name, self._unknown)

    def _flow(self, value: Any) -> FactorLabels | None:
        return self.flows.get(value.number) if isinstance(value, Value) else None

    def _stop_all(self, op: Op, reason: str) -> list[FactorLabels | None]:
        for value in op.inputs:
            self.stop(value, f"{reason} {op.location}")
        return []

    def _unknown(self, index: int, op: Op) -> list[FactorLabels | None]:
        return self._stop_all(op, f"goes through {op.name}")

    def _move(self, index: int, op: Op) -> list[FactorLabels | None]:
        flows = {v.number: f for v in op.inputs if (f := self._flow(v)) is not None}
        powers = {flow.power for flow in flows.values()}
        if len(powers) > 1:
            return self._stop_all(op, "is concatenated with a power of itself")
        labels = move_labels(op, {number: flow.labels for number, flow in flows.items()})
        return [FactorLabels(marks, *powers) for marks in labels]

    def _mul(self, index: int, op: Op) -> list[FactorLabels | None]:
        shape, both = op.outputs[0].shape, [self._flow(a) for a in op.args[:2]]
        flows = [FactorLabels(f.labels.expand(shape), f.power) for f in both if f is not None]
        if len(flows) == 2 and not torch.equal(flows[0].labels, flows[1].labels):
            self._stop_flow(
                flows.pop(0), f"is multiplied by another tensor that depends on it {op.location}"
            )
        return [FactorLabels(flows[0].labels, sum(flow.power for flow in flows))]

    def _div(self, index: int, op: Op) -> list[FactorLabels | None]:
        if self._flow(op.args[1]) is not None:
            return self._stop_all(op, "divides something")
        if op.kwargs.get("rounding_mode") is not None:
            return self._unknown(index, op)
        return self._mul(index, op)

    def _pow(self, index: int, op: Op) -> list[FactorLabels | None]:
        flow, exponent = self._flow(op.args[0]), op.args[1]
        if flow is None or not isinstance(exponent, int) or exponent < 1:
            return self._unknown(index, op)
        return [FactorLabels(flow.labels, flow.power * exponent)]

    def _convolution(self, index: int, op: Op) -> list[FactorLabels | None]:
        x, weight, bias = op.args[:3]  # (batch, channels, …), (channels out, …)
        is_transposed, groups = op.args[6], op.args[8]
        inputs, outputs = (0, 1) if is_transposed else (1, 0)  # axes of the weight
        flows, channels = (self._flow(x), self._flow(weight)), op.outputs[0].shape[1]
        flow = flows[0] or flows[1]
        if flow is None or all(flows) or (is_transposed and groups > 1):
            return self._unknown(index, op)
        if flows[0] and groups == 1:
            self._add_consumer(index, op, flow, x, 1, weight, inputs)
            return []
        is_depthwise = groups == x.shape[1]
        vector = project_labels(flow.labels, 1 if flows[0] else outputs)
        if vector is None or not (is_depthwise or flows[1]):
            return self._unknown(index, op)
        if flows[0]:  # each input channel has outputs of its own
            vector = vector.repeat_interleave(channels // groups)
        return [self._per_channel(index, op, vector, flow.power, bias)]

    def _per_channel(
        self, index: int, op: Op, vector: torch.Tensor, power: int, bias: Any
    ) -> FactorLabels | None:
        """Return labels of an output (batch, channels, …) by channel, with a bias added."""
        batch, channels, *positions = op.outputs[0].shape
        flow = FactorLabels(vector.expand(batch, *positions, channels), power)
        out = flow if bias is None else self._add_term(index, op, flow, bias)
        return out and out._replace(labels=out.labels.movedim(-1, 1))

    def _pool(self, index: int, op: Op) -> list[FactorLabels | None]:
        flow, shape = self._flow(op.args[0]), op.outputs[0].shape
        vector = None if flow is None else project_labels(flow.labels, 1)
        # The batch and the channels stay: (2, 8, 4, 4) -> (2, 8, 1, 1) or (2, 8).
        is_other = flow is None or shape[:2] != flow.labels.shape[:2]
        pads_value = op.name == "constant_pad_nd" and any(op.args[2:])
        if flow is None or vector is None or is_other or pads_value:
            return self._unknown(index, op)
        labels = vector.view(-1, *(1 for _ in shape[2:])).expand(shape)
        return [FactorLabels(labels, flow.power)]

    def _compare(self, index: int, op: Op) -> list[FactorLabels | None]:
        """Take the smaller or larger one of a tensor and a parameter, such as a cap."""
        known = [self._flow(a) or self._aliases.by_number.get(a.number) for a in op.args[:2]]
        return self._add(index, op) if all(known) else self._unknown(index, op)

    def _add(self, index: int, op: Op) -> list[FactorLabels | None]:
        (first, second), shape = op.args[:2], op.outputs[0].shape
        if self._flow(first) is None:
            first, second = second, first
        flow = self._flow(first)
        assert flow is not None
        flow = FactorLabels(flow.labels.expand(shape), flow.power)
        return [self._add_term(index, op, flow, second)]

    def _add_term(self, index: int, op: Op, flow: FactorLabels, other: Any) -> FactorLabels | None:
        """Add a term. It must have the same labels; a parameter without labels is given them."""
        term = self._flow(other)
        if term is not None:
            if term.power == flow.power and torch.equal(
                term.labels.expand(flow.labels.shape), flow.labels
            ):
                return flow
            self._stop_all(op, "is added to another tensor that depends on it")
            return None
        alias = self._aliases.by_number.get(other.number) if isinstance(other, Value) else None
        if alias is None or len(alias.coordinates) != 1:
            self._stop_all(op, "is added to another tensor")
            self._stop_flow(flow, f"is added to another tensor {op.location}")
            return None
        positions = alias.coordinates[0].expand(flow.labels.shape)
        vector = torch.full(self._aliases.shapes[alias.parameter], -1, device="cpu")
        vector[positions] = flow.labels
        if not torch.equal(vector[positions], flow.labels):
            self._stop_flow(flow, f"shares the bias {alias.parameter}")
            return None
        self.biases[alias.parameter][index] = ParameterUse(0, vector, -flow.power, alias.offset)
        return flow

    def _norm(self, index: int, op: Op) -> list[FactorLabels | None]:
        weight, bias, axis = _NORMS[op.name]
        self.stop(op.args[0], f"is normalized {op.location}")
        flow = self._flow(op.args[weight])
        if flow is None:
            return self._stop_all(op, "is added to another tensor")
        added = None if bias is None else op.args[bias]
        if axis == 1:
            return [self._per_channel(index, op, flow.labels, flow.power, added)]
        out: FactorLabels | None = FactorLabels(flow.labels.expand(op.outputs[0].shape), flow.power)
        if added is not None:
            assert out is not None
            out = self._add_term(index, op, out, added)
        return [out]

    def _attention(self, index: int, op: Op) -> list[FactorLabels | None]:
        query, key, value = op.args[:3]  # (batch, heads, tokens, size)
        for other in (query, key):
            self.stop(other, f"goes through a softmax {op.location}")
        flow = self._flow(value)
        if flow is None:
            return []
        if labels_vary(flow.labels, -2):
            # Joint attention: values of text without labels follow those of images on one axis.
            is_joint = bool((flow.labels < 0).any())
            what = "is joined with values of another layer" if is_joint else "is mixed over tokens"
            self.stop(value, f"{what} {op.location}")
            return []
        # Grouped-query attention: with 2 value heads and 6 query heads, value head 0 serves the
        # query heads 0 to 2. Labels [a, b] along the heads become [a, a, a, b, b, b].
        shape = op.outputs[0].shape
        labels = flow.labels[:, :, :1]
        labels = labels.repeat_interleave(shape[1] // labels.shape[1], 1)
        return [FactorLabels(labels.expand(shape), flow.power)]

    def _product(self, index: int, op: Op) -> list[FactorLabels | None]:
        factors = matmul_operands(op)
        assert factors is not None
        added, left, right = factors
        flows = self._flow(left), self._flow(right)
        if all(flows) or not any(flows):
            return self._stop_all(op, "is multiplied by another tensor that depends on it")
        flow, inner, outer = (flows[0], -1, -2) if flows[0] else (flows[1], -2, -1)
        assert flow is not None
        own, other, other_inner = (left, right, -2) if flows[0] else (right, left, -1)
        # left @ right sums over the inner dimension. Labels along it are undone by the other
        # operand. Labels along the outer dimension stay: row i of (diag(1/f) A) B is divided by fi.
        if labels_vary(flow.labels, inner):
            self._add_consumer(index, op, flow, own, inner, other, other_inner)
            return []
        labels = flow.labels.narrow(inner, 0, 1) if flow.labels.shape[inner] else flow.labels
        if op.name == "_grouped_mm" and labels.dim() == 3:  # rows meet one expert each
            vector = project_labels(labels, outer)
            if vector is None:
                return self._stop_all(op, "differs between experts")
            labels = vector.unsqueeze(inner)
        out: FactorLabels | None = FactorLabels(labels.expand(op.outputs[0].shape), flow.power)
        if added is not None:
            assert out is not None
            out = self._add_term(index, op, out, added)
        return [out]

    def _add_consumer(
        self, index: int, op: Op, flow: FactorLabels, own: Value, inner: int, other: Value, dim: int
    ) -> None:
        """Let the columns of a weight undo the factors of the tensor that it multiplies."""
        alias = self._aliases.by_number.get(other.number)
        match = None if alias is None else alias.match_axis(dim)
        vector = project_labels(flow.labels, inner)
        if alias is None or match is None or vector is None:
            what = "activations" if alias is None else "a weight whose axis is not known"
            self.stop(own, f"is multiplied by {what} {op.location}")
            return
        axis, coordinates = match
        labels = torch.full((self._aliases.shapes[alias.parameter][axis],), -1, device="cpu")
        labels[coordinates] = vector
        self.consumers[alias.parameter][index] = ParameterUse(
            axis, labels, flow.power, alias.offset
        )
