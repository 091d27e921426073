"""The operators that can be quantized, and the classes that replace them.

========================  =========================  =============================
float class               with fake quantization     with packed weights
========================  =========================  =============================
``Linear``                ``QuantLinear``            ``QParamsLinear``
``Conv1d``                ``QuantConv1d``            ``QParamsConv1d``
``Conv2d``                ``QuantConv2d``            ``QParamsConv2d``
``Conv3d``                ``QuantConv3d``            ``QParamsConv3d``
``ConvTranspose2d``       ``QuantConvTranspose2d``   ``QParamsConvTranspose2d``
``Embedding``             ``QuantEmbedding``         ``QParamsEmbedding``
``EmbeddingBag``          ``QuantEmbeddingBag``      ``QParamsEmbeddingBag``
``Conv1D`` (Transformers) ``QuantConv1D``            ``QParamsConv1D``
========================  =========================  =============================

A new operator is a function for its product, two classes and a line of ``OPERATORS``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.quantization.config.linear_classes import operator_class
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.runtime_layer import RuntimeLayer


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


def _owned(self: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that torch may rescale in place, as it does if ``max_norm`` is set."""
    return weight if self.max_norm is None else weight.clone()


def _embedding(self: Any, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    return F.embedding(
        x,
        _owned(self, weight),
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
        _owned(self, weight),
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


class QuantLinear(FakeQuantizedLayer, nn.Linear):
    """``nn.Linear`` with fake quantization."""

    float_class, product = nn.Linear, _linear


class QParamsLinear(RuntimeLayer, nn.Linear):
    """``nn.Linear`` with a packed weight."""

    float_class, product = nn.Linear, _linear


class QuantConv1d(FakeQuantizedLayer, nn.Conv1d):
    """``nn.Conv1d`` with fake quantization."""

    float_class, product = nn.Conv1d, _conv


class QParamsConv1d(RuntimeLayer, nn.Conv1d):
    """``nn.Conv1d`` with a packed weight."""

    float_class, product = nn.Conv1d, _conv


class QuantConv2d(FakeQuantizedLayer, nn.Conv2d):
    """``nn.Conv2d`` with fake quantization."""

    float_class, product = nn.Conv2d, _conv


class QParamsConv2d(RuntimeLayer, nn.Conv2d):
    """``nn.Conv2d`` with a packed weight."""

    float_class, product = nn.Conv2d, _conv


class QuantConv3d(FakeQuantizedLayer, nn.Conv3d):
    """``nn.Conv3d`` with fake quantization."""

    float_class, product = nn.Conv3d, _conv


class QParamsConv3d(RuntimeLayer, nn.Conv3d):
    """``nn.Conv3d`` with a packed weight."""

    float_class, product = nn.Conv3d, _conv


class QuantConvTranspose2d(FakeQuantizedLayer, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` with fake quantization."""

    float_class, product = nn.ConvTranspose2d, _conv_transpose


class QParamsConvTranspose2d(RuntimeLayer, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` with a packed weight."""

    float_class, product = nn.ConvTranspose2d, _conv_transpose


class QuantEmbedding(FakeQuantizedLayer, nn.Embedding):
    """``nn.Embedding`` with fake quantization."""

    float_class, product = nn.Embedding, _embedding


class QParamsEmbedding(RuntimeLayer, nn.Embedding):
    """``nn.Embedding`` with a packed weight."""

    float_class, product = nn.Embedding, _embedding


class QuantEmbeddingBag(FakeQuantizedLayer, nn.EmbeddingBag):
    """``nn.EmbeddingBag`` with fake quantization."""

    float_class, product = nn.EmbeddingBag, _embedding_bag


class QParamsEmbeddingBag(RuntimeLayer, nn.EmbeddingBag):
    """``nn.EmbeddingBag`` with a packed weight."""

    float_class, product = nn.EmbeddingBag, _embedding_bag


class Operator(NamedTuple):
    """The classes that replace a float operator."""

    quantized: type[FakeQuantizedLayer]
    packed: type[RuntimeLayer]


OPERATORS: dict[type[nn.Module], Operator] = {
    nn.Linear: Operator(QuantLinear, QParamsLinear),
    nn.Conv1d: Operator(QuantConv1d, QParamsConv1d),
    nn.Conv2d: Operator(QuantConv2d, QParamsConv2d),
    nn.Conv3d: Operator(QuantConv3d, QParamsConv3d),
    nn.ConvTranspose2d: Operator(QuantConvTranspose2d, QParamsConvTranspose2d),
    nn.Embedding: Operator(QuantEmbedding, QParamsEmbedding),
    nn.EmbeddingBag: Operator(QuantEmbeddingBag, QParamsEmbeddingBag),
}
_CONV1D = "transformers.pytorch_utils.Conv1D"


def is_operator(kind: type[nn.Module]) -> bool:
    """Whether modules of this type can be quantized; see ``operator_class`` for subclasses."""
    return operator_class(kind) in OPERATORS or _is_conv1d(kind)


def is_operator_module(module: nn.Module) -> bool:
    """Whether a module can be quantized: an operator whose weight is a parameter with elements.

    ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune`` compute the weight from other
    parameters before each pass; it is a plain attribute then.
    """
    return (
        is_operator(type(module))
        and not has_empty_weight(module)
        and all(
            name in module._parameters or getattr(module, name, None) is None for name in PARAMETERS
        )
    )


def has_empty_weight(module: nn.Module) -> bool:
    """Whether the weight of a module has no elements, such as one of a layer without outputs.

    A head of MobileBERT has as many outputs as hidden states have more channels than embeddings.
    """
    weight = module._parameters.get("weight")
    return weight is not None and weight.numel() == 0


def operator_names() -> str:
    """Return the names of the operators, for messages."""
    return ", ".join([*(kind.__name__ for kind in OPERATORS), "Conv1D"])


def operator(kind: type[nn.Module]) -> Operator:
    """Return the classes that replace an operator, such as QuantLinear and QParamsLinear."""
    return _conv1d_operator() if _is_conv1d(kind) else OPERATORS[operator_class(kind)]


def _is_conv1d(kind: type[nn.Module]) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" == _CONV1D


def _transposed_linear(self: Any, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], self.nf)


@cache
def _conv1d_operator() -> Operator:
    """Define the classes for ``Conv1D`` on first use, because they import Transformers."""
    from transformers.pytorch_utils import Conv1D

    class QuantConv1D(FakeQuantizedLayer, Conv1D):  # type: ignore[misc]
        """``Conv1D`` with fake quantization."""

        __qualname__ = "QuantConv1D"  # pickling looks the class up in this module
        float_class, product = Conv1D, _transposed_linear

    class QParamsConv1D(RuntimeLayer, Conv1D):  # type: ignore[misc]
        """``Conv1D`` with a packed weight."""

        __qualname__ = "QParamsConv1D"
        float_class, product = Conv1D, _transposed_linear

    return Operator(QuantConv1D, QParamsConv1D)


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Return a class for ``Conv1D``, as when a pickle names it."""
        if name == "QuantConv1D":
            return _conv1d_operator().quantized
        if name == "QParamsConv1D":
            return _conv1d_operator().packed
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
