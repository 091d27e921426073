"""Options of graph mode: rewrites of the graph, places of quantizers, and limits of shifts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from quark.torch.quantization.config.bounds import Bounds
from quark.torch.quantization.config.value_types import check_options


@dataclass(frozen=True)
class PassOptions:
    """Rewrites, and places of quantizers, that are chosen only if they are asked for.

    Attributes:
        hard_activations: Whether SiLU and GELU become piecewise polynomials. This changes the
            function of the model.
        largest_pool: Largest number of elements that a pooling window may have; larger ones are
            split in two. None for no limit.
        channel_caps: Whether ReLU6 becomes ReLU and a cap for each channel, which cross-layer
            equalization can rescale. Cross-layer equalization asks for it itself.
        fused_activations: Whether a layer or sum that nothing reads but an activation such as PReLU
            or GELU is quantized after the activation alone, as it always is before ReLU. For
            devices that compute both in one operation. It rewrites nothing.
        float_outputs: Whether values that the graph returns stay in float. No output is cut then
            that is beyond those of the calibration data. It rewrites nothing.

    Raises:
        TypeError: An option has a value of another type.
        ValueError: ``largest_pool`` is less than 2.
    """

    hard_activations: bool = False
    largest_pool: Annotated[int, Bounds(least=2)] | None = None
    channel_caps: bool = False
    fused_activations: bool = False
    float_outputs: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ShiftLimits:
    """Limits of the shifts by which an integer-only device moves from scale to scale.

    A tensor with the scale 2**-p has the position p. An operator with positions i of its inputs,
    w of its weight, b of its bias and o of its output shifts its integers by the numbers below. The
    defaults suit devices that shift 32-bit sums by up to 16 bits; give the limits of yours. Each
    limit is a pair: smallest, largest.

    Attributes:
        cut: w + i - o of layers: the sum of products is shifted to the output by it. Products of
            two activations have the position of the second one in place of w.
        bias: w + i - b of layers: the bias is shifted to the sum by it. The cut is added to the
            first number: with (-16, 15), a cut of 10 needs at least -6.
        read: largest i - smallest i of sums.
        write: smallest i - o of sums.
        product: sum of all i - o of elementwise products.
        pool: i - o of average pooling; (0, 0) gives input and output one scale.

    Raises:
        ValueError: A limit is not a pair of integers in order, or ``read`` excludes 0.
    """

    cut: tuple[int, int] = (0, 16)
    bias: tuple[int, int] = (-16, 15)
    read: tuple[int, int] = (0, 15)
    write: tuple[int, int] = (-15, 15)
    product: tuple[int, int] = (0, 32)
    pool: tuple[int, int] = (-15, 15)

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _pair(field.name, getattr(self, field.name)))
        if self.read[0] > 0:
            raise ValueError(f"read: inputs with one scale have 0, got the limits {self.read}.")


def _pair(name: str, value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if not is_pair or not all(type(n) is int for n in value) or value[0] > value[1]:
        raise ValueError(f"{name}: expected two integers, the smallest shift first, got {value!r}.")
    return value[0], value[1]
