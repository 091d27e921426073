"""Hooks that pass the inputs of layers to observers while data runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quark.torch.numerics.finite import is_finite
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.padding import without_padding

Accumulator = Callable[[torch.Tensor], None]  # takes (tokens, channels)


class InputRows(NamedTuple):
    """An input of a layer, as the rows that the matrix of the layer multiplies.

    Attributes:
        layer: The layer.
        x: The input, rotated and quantized as for the product with the weight.
        unrounded: The prepared input before it was quantized; ``x`` itself if inputs are not.
        args: Other arguments of the layer.
        kwargs: Likewise, by name.
    """

    layer: FakeQuantizedLayer
    x: torch.Tensor
    unrounded: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Iterate over the rows in pieces; see ``QuantizedLayer.input_rows``."""
        return self.layer.input_rows(self.x, *self.args, **self.kwargs)

    @property
    def is_rounded(self) -> bool:
        """Whether the input was quantized."""
        return self.x is not self.unrounded

    def before_rounding(self) -> InputRows:
        """Return the same with the input before it was quantized."""
        return self._replace(x=self.unrounded)

    def copy(self) -> InputRows:
        """Return the same with a copy of the input, which the model may write to later."""
        copied = self.x.clone()
        return self._replace(x=copied, unrounded=copied)


class InfiniteInput(FloatingPointError):
    """An input of a layer is NaN or infinite.

    Attributes:
        layer: The layer.
    """

    def __init__(self, layer: FakeQuantizedLayer, dtype: torch.dtype) -> None:
        super().__init__(layer, dtype)
        self.layer, self.dtype = layer, dtype

    def describe(self, layers: Mapping[str, FakeQuantizedLayer]) -> str:
        """Return a message with the name of the layer."""
        name = next((name for name, layer in layers.items() if layer is self.layer), "a layer")
        return (
            f"The inputs of {name} were NaN or infinite: check the data, or load the model in a "
            f"wider type than {self.dtype}."
        )


@contextmanager
def accumulate_inputs(
    observers: Iterable[tuple[FakeQuantizedLayer, Accumulator]],
) -> Iterator[None]:
    """Pass the inputs of layers to observers while data runs inside the context; see below.

    Args:
        observers: Pairs of a layer and the observer of the rows of its inputs, which is called for
            each piece of them.

    Raises:
        InfiniteInput: While data runs, an input is NaN or infinite.
    """

    def each(observe: Accumulator) -> Callable[[InputRows], None]:
        def observe_all(rows: InputRows) -> None:
            for piece in rows.pieces():
                observe(piece)

        return observe_all

    with watch_inputs((layer, each(observe)) for layer, observe in observers):
        yield


@contextmanager
def watch_inputs(
    observers: Iterable[tuple[FakeQuantizedLayer, Callable[[InputRows], None]]],
) -> Iterator[None]:
    """Pass the inputs of layers to observers while data runs inside the context.

    Inputs are rotated and quantized as they are for the product with the weight. Padding is left
    out (``nn.padding``), except by convolutions, whose windows reach into it.

    Args:
        observers: Pairs of a layer and its observer.

    Raises:
        InfiniteInput: While data runs, an input is NaN or infinite.
    """

    def watch(observe: Callable[[InputRows], None]) -> Callable[..., None]:
        def hook(layer: FakeQuantizedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rotated = layer.prepared_input((args[0] if args else kwargs["input"]).detach())
            rounded = layer.rounded_input(rotated)
            keep = (lambda x: x) if layer.is_convolution else without_padding
            x = unrounded = keep(rotated)
            if rounded is not rotated:
                x = keep(rounded)
            if not is_finite(x):
                raise InfiniteInput(layer, x.dtype)
            others = {name: value for name, value in kwargs.items() if name != "input"}
            observe(InputRows(layer, x, unrounded, args[1:], others))

        return hook

    handles = [
        layer.register_forward_pre_hook(watch(o), with_kwargs=True) for layer, o in observers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
