"""How a packed weight multiplies: what all ways have in common."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.products.arrangement import Parts
from quark.torch.quantization.nn.products.panels import Panels

Multiplication = Callable[[torch.Tensor], torch.Tensor]
Kind = tuple[Hashable, ...]


class Use(NamedTuple):
    """How a layer uses the product of its weight.

    Attributes:
        dtype: Type of its inputs.
        inputs: How it quantizes inputs, None if it does not.
        input_scale: Scale of static inputs, or None.
        rounds_inputs: Whether a kernel may round inputs to bfloat16.
        compiles: Whether products may be compiled.
    """

    dtype: torch.dtype
    inputs: Scheme | None = None
    input_scale: torch.Tensor | None = None
    rounds_inputs: bool = False
    compiles: bool = False


@dataclass(frozen=True)
class Method(ABC):
    """How a packed weight multiplies. The tensors of the weight are given to each call.

    Beside those of ``Panels``, they are ``order``, the input of each column of the codes, and
    ``unit``, the scale of the first of two stages.

    Attributes:
        panels: Order and format of the codes.
    """

    panels: Panels

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the product of few rows; see ``describe_runtime``."""

    @property
    def quantizes_inputs(self) -> bool:
        """Whether it takes inputs that are not quantized yet, and quantizes them itself."""
        return False

    @abstractmethod
    def multiply_rows(self, parts: Parts, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (rows, inputs), in the order of the codes, and the codes.

        Returns:
            (rows, outputs or more), in any float type.
        """

    @abstractmethod
    def decode(self, parts: Parts) -> torch.Tensor:
        """Return the values of the codes in float32, (outputs, inputs), in their order."""

    @abstractmethod
    def codes(self, parts: Parts) -> torch.Tensor:
        """Return the codes of the weight, (outputs, inputs), in their order."""

    def kind(self, parts: Parts, use: Use) -> Kind | None:
        """Return all that the values of a weight depend on, except its codes and scales.

        The proof of one weight holds for all of its kind; None if each weight is proved.
        """
        return None

    def gives(self, parts: Parts, values: torch.Tensor, use: Use) -> bool:
        """Whether it is right for a weight with these values, float32 (outputs, inputs)."""
        return torch.equal(self.values(parts), values)

    def multiply(self, parts: Parts, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (…, inputs) and the weight: (…, outputs), type of ``x``."""
        return self.bind(parts)(x)

    def bind(self, parts: Parts) -> Multiplication:
        """Return ``multiply`` for one weight, with all that no input changes done already."""
        inputs, outputs = self.panels.arrangement.inputs, self.panels.arrangement.outputs
        order, unit, multiply_rows = parts.get("order"), parts.get("unit"), self.bind_rows(parts)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, inputs)
            if order is not None:
                rows = rows.index_select(1, order)
            y = multiply_rows(rows)
            if unit is not None:
                y = y * unit
            if y.shape[1] != outputs:
                y = y[:, :outputs]
            return y.to(x.dtype).reshape(*x.shape[:-1], outputs)

        return multiply

    def bind_rows(self, parts: Parts) -> Multiplication:
        """Return ``multiply_rows`` for one weight; see ``bind``."""
        return partial(self.multiply_rows, parts)

    def values(self, parts: Parts) -> torch.Tensor:
        """Return the values of the weight in float32, (outputs, inputs)."""
        values = self.decode(parts)
        if "unit" in parts:
            values = values * parts["unit"]
        if "order" not in parts:
            return values.contiguous()
        return torch.empty_like(values).index_copy_(1, parts["order"], values)

    @property
    def key(self) -> str:
        """A digest, equal for equal methods, in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]
