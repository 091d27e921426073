"""Rotations as changes of parameters: each is computed at once, in one precision, from its value.

What a model computes stays the same (QuaRot, Ashkboos et al. 2024, section 4; SpinQuant, Liu et
al. 2024, section 3.1). Gains of norms go into the weights that read them (SliceGPT, Ashkboos et al.
2024, section 3.2); layer norms stay what they are, since their rotations keep the mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.structure import ResidualStream, StreamNorm, ValueHeads
from quark.torch.numerics.hadamard import rotate

STREAM = "stream"


class Step(NamedTuple):
    """A change of a parameter along one of its axes: multiplied by factors, or rotated.

    Attributes:
        axis: The axis.
        by: The factors, (size of the axis,), or the name of the rotation.
        positions: What is rotated of the axis, in this order; None for all of it.
    """

    axis: int
    by: torch.Tensor | str
    positions: torch.Tensor | None = None


class Turns:
    """The changes that rotate a model.

    Attributes:
        values: New values of parameters, in float64, which replace their own.
        steps: What happens to each parameter then, in order.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.steps: dict[str, list[Step]] = defaultdict(list)

    def names(self) -> list[str]:
        """Return the parameters that change."""
        return list(dict.fromkeys([*self.values, *self.steps]))

    def value(
        self,
        parameter: torch.Tensor,
        name: str,
        rotations: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return what a parameter becomes, computed in ``dtype``.

        Args:
            parameter: Its value now.
            name: Its full name.
            rotations: The rotations by name.
            dtype: Floating-point type.
        """
        x = self.values.get(name, parameter.detach()).to(parameter.device, dtype)
        for step in self.steps.get(name, ()):
            if isinstance(step.by, str):
                x = _rotated(x, step, rotations[step.by].to(x.device))
            else:
                x = (x.movedim(step.axis, -1) * step.by.to(x)).movedim(-1, step.axis)
        return x

    @torch.no_grad()
    def apply_(self, model: nn.Module, rotations: Mapping[str, torch.Tensor]) -> None:
        """Change all parameters in place, in double precision."""
        for name in self.names():
            parameter = model.get_parameter(name)
            parameter.copy_(self.value(parameter, name, rotations, torch.float64))


def _rotated(x: torch.Tensor, step: Step, rotation: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with the vectors along an axis multiplied by a rotation, block by block."""
    turned = x.movedim(step.axis, -1)
    if step.positions is None:
        return rotate(turned, rotation).movedim(-1, step.axis)
    positions = step.positions.to(x.device)
    part = rotate(turned[..., positions], rotation)
    return turned.index_copy(-1, positions, part).movedim(-1, step.axis)


def rotate_stream(turns: Turns, model: nn.Module, stream: ResidualStream) -> None:
    """Rotate the residual stream by the rotation ``STREAM`` (R1), gains folded before.

    Raises:
        ValueError: The bias of a norm has nowhere to go.
    """
    for norm in stream.norms:
        _fold(turns, model, stream, norm)
    for weight in [*stream.embeddings, *stream.writers, *stream.biases, *stream.readers]:
        turns.steps[weight.parameter].append(Step(weight.axis, STREAM))


def rotate_values(turns: Turns, heads: ValueHeads, rotation: str) -> None:
    """Rotate the values of each head by the rotation of that name (R2)."""
    for parameter, axis in heads.sources:
        turns.steps[parameter].append(Step(axis, rotation, heads.rows.flatten()))
    parameter, axis = heads.output
    turns.steps[parameter].append(Step(axis, rotation, heads.columns.flatten()))


def _fold(turns: Turns, model: nn.Module, stream: ResidualStream, norm: StreamNorm) -> None:
    """Move gain and bias of a norm into what reads it.

    A bias stays in the norm, divided by the gain and rotated, where a reader has none of its own.
    """
    readers = [weight for weight in stream.readers if weight.norm == norm.module]
    biases = [_bias_beside(model, weight.parameter) for weight in readers]
    gain = None
    if norm.weight is not None:
        value = model.get_parameter(norm.weight).detach().double()
        gain = value + norm.offset
        turns.values[norm.weight] = torch.full_like(value, 1.0 - norm.offset)
    if norm.bias is not None:
        added = model.get_parameter(norm.bias).detach().double()
        if None not in biases:
            turns.values[norm.bias] = torch.zeros_like(added)
            for weight, own in zip(readers, biases, strict=True):
                assert own is not None
                matrix = model.get_parameter(weight.parameter).detach().movedim(weight.axis, -1)
                before = model.get_parameter(own).detach().double()
                turns.values[own] = before + matrix.double() @ added.to(matrix.device)
        else:
            turns.values[norm.bias] = added if gain is None else _quotient(added, gain, norm.bias)
            turns.steps[norm.bias].append(Step(0, STREAM))
    if gain is not None:
        for weight in readers:
            turns.steps[weight.parameter].append(Step(weight.axis, gain))


def _quotient(added: torch.Tensor, gain: torch.Tensor, name: str) -> torch.Tensor:
    if bool(((gain == 0) & (added != 0)).any()):
        raise ValueError(
            f"rotation: {name} cannot be moved, since the norm multiplies by zero and not all that "
            "reads it has a bias. Set r1=False."
        )
    return torch.where(gain == 0, 0.0, added / gain)


def _bias_beside(model: nn.Module, weight: str) -> str | None:
    """Return the name of the bias beside a weight, if there is one."""
    path, _, attribute = weight.rpartition(".")
    bias = getattr(model.get_submodule(path), "bias", None) if attribute == "weight" else None
    return f"{path}.bias" if isinstance(bias, nn.Parameter) else None


def untie(model: nn.Module, stream: ResidualStream) -> None:
    """Give the head a weight of its own if it shares that of an embedding."""
    if stream.tied:
        head: Any = model.get_submodule(stream.head)
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
        if hasattr(model, "config"):
            model.config.tie_word_embeddings = False  # type: ignore[union-attr]
