"""The operators that can be quantized: a line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.quantization.config.config import LAYER_TYPES
from quark.torch.quantization.nn.layer import QuantMixin
from quark.torch.quantization.nn.packed import PackedMixin

_Product = Callable[..., torch.Tensor]


def _linear(self: Any, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _conv(self: Any, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    result: torch.Tensor = self._conv_forward(x, weight, bias)
    return result


def _conv_transpose(
    self: Any, x: Any, weight: Any, bias: Any, output_size: list[int] | None = None
) -> torch.Tensor:
    padding = self._output_padding(
        x, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation
    )
    return F.conv_transpose2d(
        x, weight, bias, self.stride, self.padding, padding, self.groups, self.dilation
    )


def _own(self: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that torch may rescale in place, as it does where ``max_norm`` is set."""
    return weight if self.max_norm is None else weight.clone()


def _embedding(self: Any, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    return F.embedding(
        x,
        _own(self, weight),
        self.padding_idx,
        self.max_norm,
        self.norm_type,
        self.scale_grad_by_freq,
        self.sparse,
    )


def _embedding_bag(
    self: Any, x: Any, weight: Any, bias: Any, offsets: Any = None, per_sample_weights: Any = None
) -> torch.Tensor:
    return F.embedding_bag(
        x,
        _own(self, weight),
        offsets,
        self.max_norm,
        self.norm_type,
        self.scale_grad_by_freq,
        self.mode,
        self.sparse,
        per_sample_weights,
        self.include_last_offset,
        self.padding_idx,
    )


def _transposed_linear(self: Any, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], self.nf)


# Full name of the float class -> its product.
_OPERATORS: dict[str, _Product] = {
    "torch.nn.modules.linear.Linear": _linear,
    "torch.nn.modules.conv.Conv1d": _conv,
    "torch.nn.modules.conv.Conv2d": _conv,
    "torch.nn.modules.conv.Conv3d": _conv,
    "torch.nn.modules.conv.ConvTranspose2d": _conv_transpose,
    "torch.nn.modules.sparse.Embedding": _embedding,
    "torch.nn.modules.sparse.EmbeddingBag": _embedding_bag,
    "transformers.pytorch_utils.Conv1D": _transposed_linear,
}


class Operator(NamedTuple):
    """The classes an operator becomes: quantized, and packed."""

    quantized: type[QuantMixin]
    packed: type[PackedMixin]


def is_operator(kind: type[nn.Module]) -> bool:
    """Whether modules of exactly this type can be quantized."""
    return _name(kind) in _OPERATORS


def operator_names() -> str:
    """Return the names of the operators, for messages."""
    return ", ".join(name.rpartition(".")[2] for name in _OPERATORS)


_MADE: dict[type[nn.Module], Operator] = {}


def operator(kind: type[nn.Module]) -> Operator:
    """Return the classes of an operator, such as QuantLinear and QParamsLinear."""
    if kind not in _MADE:
        _MADE[kind] = _make(kind)
    return _MADE[kind]


def _make(kind: type[nn.Module]) -> Operator:
    product = _OPERATORS[_name(kind)]
    made = []
    for prefix, base in (("Quant", QuantMixin), ("QParams", PackedMixin)):
        name = f"{prefix}{kind.__name__}"
        members = {
            "__doc__": f"``{kind.__name__}`` with quantized tensors.",
            "__module__": __name__,
            "product": product,
            "float_class": kind,
        }
        # Pickling and copying look a class up by its name.
        globals()[name] = type(name, (base, kind), members)
        made.append(globals()[name])
    return Operator(*made)


def _name(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def __getattr__(name: str) -> Any:
    """Make the classes of an operator of Transformers when a pickle names them."""
    if name not in ("QuantConv1D", "QParamsConv1D"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers.pytorch_utils import Conv1D

    operator(Conv1D)
    return globals()[name]


for _kind in LAYER_TYPES.values():
    operator(_kind)
