"""Products of 16-bit floats in float32, on CPUs that have no instructions for them.

Such a CPU multiplies bfloat16 5 to 8 times slower than float32. So layers convert their operands,
multiply in float32 and round the result, which is also more accurate: sums are rounded once.

``QUARK_PRODUCTS`` chooses: ``auto`` (by the CPU, the default), ``float32``, or ``native``, which
keeps the bits of the operators of torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

SWITCH = "QUARK_PRODUCTS"
CHOICES = ("auto", "float32", "native")
ROWS = 16  # fewer rows are multiplied as they are: converting the weight would take longer
PIECE = 1 << 21  # elements of a weight that are in float32 at a time

# How products are computed in the innermost context: "float32" or "native"; "" outside of contexts.
_products: ContextVar[str] = ContextVar("products", default="")

# Operators -> position of the operand whose rows count.
_OPERATORS: dict[Callable[..., Any], int] = {
    F.linear: 0,
    F.scaled_dot_product_attention: 0,
    F.conv1d: 0,
    F.conv2d: 0,
    F.conv3d: 0,
    torch.matmul: 0,
    torch.Tensor.matmul: 0,
    torch.Tensor.__matmul__: 0,
    torch.mm: 0,
    torch.Tensor.mm: 0,
    torch.bmm: 0,
    torch.Tensor.bmm: 0,
    torch.addmm: 1,
    torch.Tensor.addmm: 1,
    torch.baddbmm: 1,
    torch.Tensor.baddbmm: 1,
}
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def float_products() -> AbstractContextManager[None]:
    """Return a context in which slow products on the CPU are computed in float32.

    It holds for linear layers, convolutions, attention and matrix products with at least ``ROWS``
    rows. Contexts may be nested.

    Raises:
        ValueError: ``QUARK_PRODUCTS`` has none of its values.
    """
    types = _widened_types(_choice())
    return _open(types) if types and not _products.get() else nullcontext()


@contextmanager
def native_products() -> Iterator[None]:
    """Switch ``float_products`` off inside the context, so that a trace has no casts."""
    with _set_products("native"):
        yield


@contextmanager
def _set_products(how: str) -> Iterator[None]:
    token = _products.set(how)
    try:
        yield
    finally:
        _products.reset(token)


def widens_products(model: nn.Module) -> bool:
    """Whether ``float_products`` changes how a model computes."""
    types = _widened_types(_choice())
    return bool(types) and any(
        p.device.type in ("cpu", "meta") and p.dtype in types for p in model.parameters()
    )


def _choice() -> str:
    choice = os.environ.get(SWITCH, CHOICES[0])
    if choice not in CHOICES:
        raise ValueError(f"{SWITCH}={choice!r} is unknown: give {', '.join(CHOICES)}.")
    return choice


@cache
def _widened_types(choice: str) -> frozenset[torch.dtype]:
    """Return the types whose products are computed in float32."""
    slow = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if choice == "native":
        return frozenset()
    return frozenset(t for t, name in slow.items() if choice == "float32" or not _has(name))


def _has(name: str) -> bool:
    """Whether a question of torch about instructions of the CPU is answered by yes."""
    question = getattr(torch.ops.mkldnn, name, None)
    return question is not None and bool(question())


@contextmanager
def _open(types: frozenset[torch.dtype]) -> Iterator[None]:
    with _set_products("float32"), _FloatProducts(types):
        yield


class _FloatProducts(TorchFunctionMode):
    """Computes products of some types in float32."""

    def __init__(self, types: frozenset[torch.dtype]) -> None:
        super().__init__()
        self._types = types

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator, or its like in float32."""
        kwargs = kwargs or {}
        place = _OPERATORS.get(func)
        is_native = _products.get() == "native"
        if place is None or is_native or len(args) <= place or "out" in kwargs:
            return func(*args, **kwargs)
        x = args[place]
        if x.dtype not in self._types or x.device.type != "cpu" or _rows(func, x) < ROWS:
            return func(*args, **kwargs)
        if func is F.linear:
            return _linear(*args, **kwargs)

        def widen(value: Any) -> Any:
            is_narrow = isinstance(value, torch.Tensor) and value.dtype == x.dtype
            return value.float() if is_narrow else value

        wide = {name: widen(value) for name, value in kwargs.items()}
        return func(*map(widen, args), **wide).to(x.dtype)


def _rows(func: Callable[..., Any], x: torch.Tensor) -> int:
    """Return how many rows the weight of an operator is multiplied by, or places of its kernel."""
    channels = x.shape[1 - x.dim()] if func in _CONVOLUTIONS else x.shape[-1] if x.dim() else 1
    return x.numel() // max(channels, 1)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the outputs of a linear layer, computed in float32 by parts of the weight."""
    step = max(1, PIECE // weight.shape[1])
    weights = torch.split(weight, step)
    biases = [None] * len(weights) if bias is None else torch.split(bias, step)
    wide = x.float()
    parts = [
        F.linear(wide, part.float(), None if own is None else own.float()).to(x.dtype)
        for part, own in zip(weights, biases, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
