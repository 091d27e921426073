"""What is known of a model after looking at it: names of modules and parameters, and maps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Edit:
    """How one parameter takes part in a rescaling by factors.

    Position ``i`` along ``axis`` is multiplied by ``factors[index[i]] ** power``.

    Attributes:
        parameter: Full name of the parameter.
        axis: Axis of the parameter that the factors belong to.
        index: (size of the axis,) int64: which factor, -1 for untouched.
        power: Exponent of the factors; negative divides.
        offset: The parameter acts as (value + offset): 1.0 for norms that multiply by (1 + w).
    """

    parameter: str
    axis: int
    index: torch.Tensor
    power: int
    offset: float = 0.0

    @torch.no_grad()
    def apply_(self, model: nn.Module, factors: torch.Tensor) -> None:
        """Rescale the parameter in place, in double precision, in single for half precision.

        Args:
            model: Model that has the parameter.
            factors: (number of factors,), positive.
        """
        parameter = model.get_parameter(self.parameter)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        wide = torch.float64 if parameter.dtype == wide else wide
        one = torch.ones(1, dtype=torch.float64)
        by = torch.cat([factors.detach().cpu().double(), one])[self.index] ** self.power
        by = by.to(parameter.device, wide)
        shape = [1] * parameter.dim()
        shape[self.axis] = -1
        value = (parameter.to(wide) + self.offset) * by.view(shape) - self.offset
        parameter.data.copy_(value)


@dataclass(frozen=True, eq=False)
class ScaleGroup:
    """Parameters that can be rescaled together, and the model computes the same.

    Whatever positive factors are taken: the producer is divided by them, the columns of the
    consumers that read it are multiplied.

    Attributes:
        kind: "norm" or "linear", what the producer is.
        producer: Module of the parameters that are divided.
        consumers: Modules that read what the producer gives, in the order of execution.
        block: Decoder block they lie in, empty if they lie in none or in several.
        size: Number of factors.
        edits: What happens to each parameter, first those of the producer.
        unseen: Consumers that the input did not reach. They are alike to others that it did.
    """

    kind: str
    producer: str
    consumers: tuple[str, ...]
    block: str
    size: int
    edits: tuple[Edit, ...]
    unseen: tuple[str, ...] = ()

    def apply_(self, model: nn.Module, factors: torch.Tensor) -> None:
        """Rescale all parameters in place.

        Args:
            model: The model.
            factors: (size,), positive and finite.

        Raises:
            ValueError: The factors are not ``size`` positive finite numbers.
        """
        if factors.shape != (self.size,) or not bool(((factors > 0) & factors.isfinite()).all()):
            raise ValueError(
                f"Rescaling {self.producer} takes {self.size} positive finite factors, got a "
                f"tensor of shape {tuple(factors.shape)}"
                f"{'' if factors.shape != (self.size,) else ' with others among them'}."
            )
        for edit in self.edits:
            edit.apply_(model, factors)


@dataclass(frozen=True)
class Rejected:
    """A module whose output cannot be rescaled, and why.

    Attributes:
        producer: The module.
        consumers: Modules that do read its output in a way that could absorb factors.
        reason: What stands in the way.
    """

    producer: str
    consumers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class StreamWeight:
    """A parameter with an axis along which vectors of the residual stream lie.

    Attributes:
        parameter: Full name of the parameter.
        axis: The axis.
        norm: Norm that the vectors pass before they meet the parameter, if they pass one.
    """

    parameter: str
    axis: int
    norm: str = ""


@dataclass(frozen=True)
class StreamNorm:
    """A norm of vectors of the residual stream.

    Attributes:
        module: Name of the norm.
        kind: "rms", or "layer" if it takes the mean away.
        weight: Parameter that it multiplies by, if any.
        offset: What it adds to the parameter before: 1.0 for (1 + w).
        bias: Parameter that it adds, if any.
    """

    module: str
    kind: str
    weight: str | None
    offset: float
    bias: str | None


@dataclass(frozen=True, eq=False)
class ValueHeads:
    """Values and the projection of the attention output, whose heads may be rotated.

    Attributes:
        block: Decoder block.
        sources: Parameters that give values, biases included, and the axis: rows.
        output: Parameter that the attention output is multiplied with, and its axis: columns.
        rows: (key-value heads, head size) int64: where the entries of each head are in the rows.
        columns: (heads, head size) int64: where they are in the columns.
    """

    block: str
    sources: tuple[tuple[str, int], ...]
    output: tuple[str, int]
    rows: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """Everything that touches the vectors which decoder blocks read and add to.

    Attributes:
        size: Entries of a vector.
        embeddings: Tables whose rows are vectors of the stream.
        writers: Weights whose outputs are added to the stream.
        biases: Vectors that are added to the stream.
        readers: Weights that vectors of the stream are multiplied with.
        norms: What vectors pass before they meet a reader.
        head: Module that makes logits of the stream.
        tied: Whether the weight of the head is an embedding too.
        values: Heads of values that may be rotated besides.
        downs: Modules that end other branches: an online rotation may be put before them.
    """

    size: int
    embeddings: tuple[StreamWeight, ...]
    writers: tuple[StreamWeight, ...]
    biases: tuple[StreamWeight, ...]
    readers: tuple[StreamWeight, ...]
    norms: tuple[StreamNorm, ...]
    head: str
    tied: bool
    values: tuple[ValueHeads, ...]
    downs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Structure:
    """What was found in a model.

    Attributes:
        blocks: Decoder blocks in the order of execution.
        groups: What can be rescaled, proved.
        rejected: What cannot, or could not be proved, with the reasons.
        shared_inputs: Modules whose weights multiply the very same tensor.
        stream: The residual stream, if it may be rotated, proved.
        obstacle: What stands in the way of rotating it, empty if nothing does.
        values: Heads of values that may be rotated whatever becomes of the stream, proved.
        downs: Modules before which an online rotation may be put, whatever becomes of the stream.
    """

    blocks: tuple[str, ...]
    groups: tuple[ScaleGroup, ...]
    rejected: tuple[Rejected, ...]
    shared_inputs: tuple[tuple[str, ...], ...]
    stream: ResidualStream | None
    obstacle: str
    values: tuple[ValueHeads, ...]
    downs: tuple[str, ...]
