"""Subclasses of ``nn.Linear`` that compute what it computes, found by trying them."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_SHAPES = ((5, 3), (4, 4))  # inputs and outputs
_DTYPES = (torch.float32, torch.bfloat16)
_LEADING = ((), (2,), (2, 3), (1, 2, 3))  # shapes of inputs before their last axis
_MAGNITUDES = (1e-3, 1.0, 1e3)
# What a subclass may define. The last two neither compute nor change what an instance has.
_ALLOWED = {"forward", "__init__", "reset_parameters", "extra_repr"}
# What Python itself puts into every class.
_OF_CLASSES = {
    *("__module__", "__doc__", "__qualname__", "__annotations__", "__firstlineno__"),
    *("__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
}


def operator_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that says how modules of a type compute: its own, or ``nn.Linear``.

    It is ``nn.Linear`` for a subclass, such as ``FalconLinear`` of Transformers, that defines no
    more than ``forward`` and ``__init__``, and whose ``forward`` reads weight, bias and widths and
    gives the product of ``nn.Linear`` on random inputs. Subclasses of torch keep their own class:
    its attention reads their weights without calling them.

    Args:
        kind: Class of a module.
    """
    if kind is nn.Linear or not issubclass(kind, nn.Linear):
        return kind
    is_product = _is_product(kind)  # type: ignore[arg-type]  # classes are hashable
    return nn.Linear if is_product else kind


@cache
def _is_product(kind: type[nn.Linear]) -> bool:
    """Whether a subclass of ``nn.Linear`` computes what it computes."""
    own = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    if type(kind) is not type or any(c.__module__.partition(".")[0] == "torch" for c in own):
        return False
    if any(not vars(c).keys() <= _ALLOWED | _OF_CLASSES for c in own):
        return False
    if kind.forward is nn.Linear.forward:
        return True
    if len(inspect.signature(kind.forward).parameters) != 2:
        return False
    draw = torch.Generator("cpu").manual_seed(0)
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(
            _gives_product(kind, shape, dtype, has_bias, draw)
            for shape in _SHAPES
            for dtype in _DTYPES
            for has_bias in (True, False)
        )


def _gives_product(
    kind: type[nn.Linear],
    shape: tuple[int, int],
    dtype: torch.dtype,
    has_bias: bool,
    draw: torch.Generator,
) -> bool:
    """Whether a class gives the product of a random matrix with random inputs."""

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=draw, device="cpu", dtype=torch.float32).to(dtype)

    inputs, outputs = shape
    weight = random(outputs, inputs)
    bias = random(outputs) if has_bias else None
    layer = kind.__new__(kind)
    # It has nothing else, so that reading another attribute fails: instances may differ in it.
    vars(layer).update(weight=weight, bias=bias, in_features=inputs, out_features=outputs)
    for leading in _LEADING:
        for magnitude in _MAGNITUDES:
            x = random(*leading, inputs) * magnitude
            try:
                y: Any = kind.forward(layer, x)
            except Exception:  # whatever the code of a model raises
                return False
            if not _is_rounded(y, x, weight, bias):
                return False
    return True


def _is_rounded(y: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether an output is the product of ``nn.Linear`` but for rounding, in the same type."""
    added = None if bias is None else bias.double()
    exact = F.linear(x.double(), weight.double(), added)
    added = None if bias is None else bias.double().abs()
    magnitudes = F.linear(x.double().abs(), weight.double().abs(), added)
    rounding = (x.shape[-1] + 2) * torch.finfo(x.dtype).eps * magnitudes
    return (
        isinstance(y, torch.Tensor)
        and (y.shape, y.dtype) == (exact.shape, x.dtype)
        and bool(((y.double() - exact).abs() <= rounding).all())
    )
