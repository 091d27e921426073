"""The structure of a model as data: names of modules and parameters, axes and index maps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from quark.torch.graph.parameter_writes import write_

RESCALING, ROTATION = "rescaling", "rotation"  # what ``discover`` can prove


@dataclass(frozen=True, eq=False)
class Edit:
    """The change of one parameter in a rescaling by factors.

    Position ``i`` along ``axis`` is multiplied by ``factors[index[i]] ** power``.

    Example: 4 query heads read 2 value heads of 1 channel each. The value projection is divided by
    2 factors (index [0, 1], power -1). The columns of the output projection are multiplied by the
    same (index [0, 0, 1, 1], power 1).

    Attributes:
        parameter: Full name of the parameter.
        axis: Axis of the parameter along which the factors apply.
        index: (size of the axis,) int64, number of the factor at each position, -1 for none.
        power: Exponent of the factors; a negative one divides.
        offset: The model computes with (value + offset): 1.0 for norms that multiply by (1 + w).
    """

    parameter: str
    axis: int
    index: torch.Tensor
    power: int
    offset: float = 0.0

    def to(self, device: torch.device) -> Edit:
        """Return the same edit with its indices on a device."""
        return replace(self, index=self.index.to(device))

    @torch.no_grad()
    def apply_(self, model: nn.Module, factors: torch.Tensor) -> None:
        """Rescale the parameter in place.

        The product is computed in float64; in float32 for parameters in half precision.

        Args:
            model: Model with the parameter.
            factors: (number of factors,), positive.
        """
        parameter = model.get_parameter(self.parameter)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        wide = torch.float64 if parameter.dtype == wide else wide
        one = torch.ones(1, dtype=torch.float64, device="cpu")
        # Index -1 selects the 1.0 after the factors.
        multiplier = torch.cat([factors.detach().cpu().double(), one])[self.index] ** self.power
        multiplier = multiplier.to(parameter.device, wide)
        shape = [1] * parameter.dim()
        shape[self.axis] = -1
        value = (parameter.to(wide) + self.offset) * multiplier.view(shape) - self.offset
        write_(parameter, value)


@dataclass(frozen=True, eq=False)
class RescalingGroup:
    """Parameters that can be rescaled together without changing the function of the model.

    The output of the producer is divided by positive factors. The columns of the consumers that
    read it are multiplied by them.

    Attributes:
        kind: "norm" or "linear": kind of the producer.
        producer: Module whose parameters are divided.
        consumers: Modules that read the output of the producer, in the order of execution.
        block: Decoder block of all these modules, empty if they are in none or in several.
        size: Number of factors.
        edits: Change of each parameter, those of the producer first.
        unreached: Consumers that the traced input did not reach, such as experts without tokens.
            They have the shapes of consumers that it reached.
    """

    kind: str
    producer: str
    consumers: tuple[str, ...]
    block: str
    size: int
    edits: tuple[Edit, ...]
    unreached: tuple[str, ...] = ()

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
class Rejection:
    """A module whose output cannot be rescaled, and the reason.

    Attributes:
        producer: The module.
        consumers: Modules that read its output and could be multiplied by the factors.
        reason: The operation or parameter that prevents it.
    """

    producer: str
    consumers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class StreamWeight:
    """A parameter that a vector of the residual stream runs along, on one axis.

    Attributes:
        parameter: Full name of the parameter.
        axis: The axis.
        norm: Norm between the stream and the parameter, empty if there is none.
    """

    parameter: str
    axis: int
    norm: str = ""


@dataclass(frozen=True)
class StreamNorm:
    """A norm of vectors of the residual stream.

    Attributes:
        module: Name of the norm.
        kind: "rms", or "layer" if it subtracts the mean.
        weight: Name of the gain, None if it has none.
        offset: Constant that is added to the gain: 1.0 for norms that multiply by (1 + w).
        bias: Name of the bias, None if it has none.
    """

    module: str
    kind: str
    weight: str | None
    offset: float
    bias: str | None


@dataclass(frozen=True, eq=False)
class ValueHeads:
    """Value and output projections of an attention block, whose heads can be rotated.

    Attributes:
        block: Decoder block.
        sources: Parameters of the value projection, bias included, each with its output axis.
        output: Weight of the output projection, and its input axis.
        rows: (key-value heads, head size) int64, positions of each head along the axis of sources.
        columns: (heads, head size) int64, positions of each head along the axis of output.
    """

    block: str
    sources: tuple[tuple[str, int], ...]
    output: tuple[str, int]
    rows: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """All parameters that write to or read from the residual stream.

    Attributes:
        size: Length of a vector of the stream, the hidden size.
        embeddings: Embedding tables; their rows are vectors of the stream.
        writers: Weights whose outputs are added to the stream.
        biases: Vectors that are added to the stream.
        readers: Weights that multiply vectors of the stream.
        norms: Norms between the stream and its readers.
        head: Module that computes logits from the stream.
        tied: Whether the head shares its weight with an embedding.
        value_heads: Attention heads whose values can be rotated as well.
        down_projections: Modules that end the other branches of blocks, such as ``down_proj``. An
            online rotation can be inserted before them.
    """

    size: int
    embeddings: tuple[StreamWeight, ...]
    writers: tuple[StreamWeight, ...]
    biases: tuple[StreamWeight, ...]
    readers: tuple[StreamWeight, ...]
    norms: tuple[StreamNorm, ...]
    head: str
    tied: bool
    value_heads: tuple[ValueHeads, ...]
    down_projections: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Structure:
    """The structure of a model, found and proved by `quark.torch.graph.discovery.discover`.

    Attributes:
        blocks: Decoder blocks in the order of execution.
        groups: Proved groups of parameters that can be rescaled together.
        rejected: Producers that cannot be rescaled or failed the proof, with the reasons.
        shared_inputs: Groups of modules that read the same tensor.
        stream: The residual stream if the proof of its rotation succeeded, else None.
        obstacle: Reason why the stream cannot be rotated, empty if it can.
        value_heads: Attention heads whose values can be rotated, with or without the stream.
        down_projections: Modules before which an online rotation can be inserted, with or without
            a rotation of the stream.
        units: Blocks, residual blocks and layers around them, in the order of execution; see
            `quark.torch.graph.units`.
    """

    blocks: tuple[str, ...]
    groups: tuple[RescalingGroup, ...]
    rejected: tuple[Rejection, ...]
    shared_inputs: tuple[tuple[str, ...], ...]
    stream: ResidualStream | None
    obstacle: str
    value_heads: tuple[ValueHeads, ...]
    down_projections: tuple[str, ...]
    units: tuple[str, ...]
