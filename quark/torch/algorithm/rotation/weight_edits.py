"""Rotations as edits of parameters: each new value is computed from the old one in one precision.

The model computes the same (QuaRot, Ashkboos et al. 2024, section 4; SpinQuant, Liu et al. 2024,
section 3.1). Gains of norms are folded into the weights that read them (SliceGPT, Ashkboos et al.
2024, section 3.2). Layer norms keep their type, since their rotations preserve the mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import iterate_parts, resident
from quark.torch.graph.structure import RescalingGroup, ResidualStream, StreamNorm, ValueHeads
from quark.torch.numerics.hadamard import rotate

STREAM = "stream"  # name of the rotation R1


class AxisEdit(NamedTuple):
    """A change of a parameter along one of its axes: multiplied by factors, or rotated.

    Attributes:
        axis: The axis.
        operand: The factors, (size of the axis,), or the name of the rotation.
        positions: Entries of the axis to rotate, in this order; None for all.
    """

    axis: int
    operand: torch.Tensor | str
    positions: torch.Tensor | None = None


class FactorEdit(NamedTuple):
    """A change of a parameter along one of its axes by learned factors.

    Attributes:
        axis: The axis.
        operand: Name of the logarithms of the factors.
        numbers: Number of the factor of each entry of the axis, -1 for none.
        power: Exponent of the factors.
        offset: What the model adds to the parameter before it computes with it.
    """

    axis: int
    operand: str
    numbers: torch.Tensor
    power: int
    offset: float

    def apply(self, x: torch.Tensor, logarithms: torch.Tensor) -> torch.Tensor:
        """Return the changed value of a parameter."""
        factors = torch.cat([logarithms, logarithms.new_zeros(1)])  # -1: the zero
        by = (factors[self.numbers.to(factors.device)] * self.power).exp().to(x)
        scaled = (x + self.offset).movedim(self.axis, -1) * by
        return scaled.movedim(-1, self.axis) - self.offset


class RotationEdits:
    """The changes of parameters that rotate a model.

    Attributes:
        values: New values of parameters in float64, which replace the old ones before the edits.
        edits: Edits of each parameter, in order.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.edits: dict[str, list[AxisEdit | FactorEdit]] = defaultdict(list)

    def names(self) -> list[str]:
        """Return the names of the parameters that change."""
        return list(dict.fromkeys([*self.values, *self.edits]))

    def value(
        self,
        parameter: torch.Tensor,
        name: str,
        rotations: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the new value of a parameter, computed in ``dtype``.

        Args:
            parameter: Its current value.
            name: Its full name.
            rotations: The rotations by name, and logarithms of factors.
            dtype: Floating-point type.
        """
        x = self.values.get(name, parameter.detach()).to(parameter.device, dtype)
        for edit in self.edits.get(name, ()):
            if isinstance(edit, FactorEdit):
                x = edit.apply(x, rotations[edit.operand])
            elif isinstance(edit.operand, str):
                x = _rotate_axis(x, edit, rotations[edit.operand].to(x.device))
            else:
                x = (x.movedim(edit.axis, -1) * edit.operand.to(x)).movedim(-1, edit.axis)
        return x

    @torch.no_grad()
    def apply_(self, model: nn.Module, rotations: Mapping[str, torch.Tensor]) -> None:
        """Change all parameters in place, in double precision."""
        for part in iterate_parts(model):
            for name in self.names():
                if part.holds(name.rpartition(".")[0]):
                    parameter = model.get_parameter(name)
                    write_(parameter, self.value(parameter, name, rotations, torch.float64))


def _rotate_axis(x: torch.Tensor, edit: AxisEdit, rotation: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with the vectors along an axis multiplied by a rotation, block by block."""
    # Example: 2 heads of 4 values, in rows 0..3 and 4..7 of a weight (8, inputs), and R2 of order
    # 4. The rows become the last axis, positions 0..7 are gathered, `rotate` multiplies each run of
    # 4 by R2, and the results return to rows 0..7. Of a fused qkv weight the positions would be
    # those of v only, and the other rows stay.
    vectors = x.movedim(edit.axis, -1)
    if edit.positions is None:
        return rotate(vectors, rotation).movedim(-1, edit.axis)
    positions = edit.positions.to(x.device)
    rotated = rotate(vectors[..., positions], rotation)
    return vectors.index_copy(-1, positions, rotated).movedim(-1, edit.axis)


def add_stream_rotation(edits: RotationEdits, model: nn.Module, stream: ResidualStream) -> None:
    """Add the edits that rotate the residual stream by R1, after gains of norms are folded.

    Raises:
        ValueError: The bias of a norm can neither be folded nor be divided by the gain.
    """
    for norm in stream.norms:
        with resident(model, norm.module):
            _fold_norm(edits, model, stream, norm)
    # Vectors x of the stream become x R. Embeddings, writers and biases produce them, readers take
    # them. With rows along the axis of the stream both are multiplied by R on the right:
    # (x R) (W R)ᵀ = x Wᵀ. So one kind of edit serves all.
    for weight in [*stream.embeddings, *stream.writers, *stream.biases, *stream.readers]:
        edits.edits[weight.parameter].append(AxisEdit(weight.axis, STREAM))


def add_value_rotation(edits: RotationEdits, heads: ValueHeads, rotation: str) -> None:
    """Add the edits that rotate the values of each head by the rotation of that name (R2)."""
    for parameter, axis in heads.sources:
        edits.edits[parameter].append(AxisEdit(axis, rotation, heads.rows.flatten()))
    parameter, axis = heads.output
    edits.edits[parameter].append(AxisEdit(axis, rotation, heads.columns.flatten()))


def add_smoothing(edits: RotationEdits, group: RescalingGroup) -> str:
    """Add the edits that rescale a group by learned factors, and return the name of these."""
    name = f"factors of {group.producer}"
    for edit in group.edits:
        made = FactorEdit(edit.axis, name, edit.index, edit.power, edit.offset)
        # Outputs of norms are rotated by R1 before the gain, so factors follow the rotation of
        # their readers. Values are divided in the projection, before R2 rotates them.
        steps = edits.edits[edit.parameter]
        steps.insert(len(steps) if group.kind == "norm" else 0, made)
    return name


def _fold_norm(
    edits: RotationEdits, model: nn.Module, stream: ResidualStream, norm: StreamNorm
) -> None:
    """Fold gain and bias of a norm into the weights and biases of its readers.

    If a reader has no bias, the bias of the norm stays there, divided by the gain and rotated.
    """
    readers = [weight for weight in stream.readers if weight.norm == norm.module]
    biases = [_find_bias(model, weight.parameter) for weight in readers]
    gain = None
    if norm.weight is not None:
        value = model.get_parameter(norm.weight).detach().double()
        gain = value + norm.offset
        edits.values[norm.weight] = torch.full_like(value, 1.0 - norm.offset)
    if norm.bias is not None:
        bias = model.get_parameter(norm.bias).detach().double()
        if None not in biases:
            edits.values[norm.bias] = torch.zeros_like(bias)
            for weight, name in zip(readers, biases, strict=True):
                assert name is not None
                with resident(model, name):
                    matrix = model.get_parameter(weight.parameter).detach().movedim(weight.axis, -1)
                    before = model.get_parameter(name).detach().double()
                    edits.values[name] = before + matrix.double() @ bias.to(matrix.device)
        else:
            edits.values[norm.bias] = bias if gain is None else _divide(bias, gain, norm.bias)
            edits.edits[norm.bias].append(AxisEdit(0, STREAM))
    if gain is not None:
        for weight in readers:
            edits.edits[weight.parameter].append(AxisEdit(weight.axis, gain))


def _divide(bias: torch.Tensor, gain: torch.Tensor, name: str) -> torch.Tensor:
    if bool(((gain == 0) & (bias != 0)).any()):
        raise ValueError(
            f"rotation: {name} cannot be folded: the gain of its norm has zeros, and not every "
            "layer that reads the norm has a bias. Set r1=False."
        )
    return torch.where(gain == 0, 0.0, bias / gain)


def _find_bias(model: nn.Module, weight: str) -> str | None:
    """Return the name of the bias in the module of a weight, or None."""
    path, _, attribute = weight.rpartition(".")
    bias = getattr(model.get_submodule(path), "bias", None) if attribute == "weight" else None
    return f"{path}.bias" if isinstance(bias, nn.Parameter) else None


def untie(model: nn.Module, stream: ResidualStream) -> None:
    """Give the head a weight of its own if it is tied to an embedding."""
    if stream.tied:
        head: Any = model.get_submodule(stream.head)
        with resident(model, stream.head):
            head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
        if hasattr(model, "config"):
            model.config.tie_word_embeddings = False  # type: ignore[union-attr]
