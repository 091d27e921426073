"""The operators of quantization in the graphs of ``torch.export`` and ``torch.compile``.

Each function for tensors here computes what its namesake in ``qdq``, ``stages``, ``packing``,
``hadamard`` or ``learned_scale`` does. While torch traces a model, it puts a custom operator
(``torch.ops.quark``) into the graph instead, which calls that namesake when the graph runs. So a
graph gives the bits of the model, holds codes as codes, and takes any batch and sequence length.

Importing this file registers the operators. A process that loads a graph from a file needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from quark.torch.numerics import hadamard, learned_scale, packing, qdq, stages
from quark.torch.numerics.formats import Format
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.scheme_text import format_text, read_format

_is_tracing = torch.compiler.is_compiling
F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", covariant=True)


class Operator(Protocol[R]):
    """A custom operator, as ``torch.library.custom_op`` makes it."""

    def __call__(self, *args: Any) -> R:
        """Call the operator."""
        ...

    def register_fake(self, function: F, /) -> F:
        """Add the function that computes type, shape and device of the result."""
        ...

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., None] | None = None
    ) -> None:
        """Add the function that computes gradients."""
        ...


def register_custom_operators() -> None:
    """Register the operators of quantized models, ``torch.ops.quark``, with torch.

    Call it before ``torch.export.load`` in a process that uses nothing else of this package.
    Importing this file has registered them already, so there is nothing left to do here.
    """


def define_operator(schema: str) -> Callable[[Callable[..., R]], Operator[R]]:
    """Define an operator ``torch.ops.quark`` by the decorated function, which computes it.

    Args:
        schema: Its name and signature in the language of ``torch.library``.
    """
    name, _, signature = schema.partition("(")
    decorator: Any = torch.library.custom_op(
        f"quark::{name}", mutates_args=(), schema=f"({signature}"
    )
    return decorator  # type: ignore[no-any-return]


def with_text(scheme: Scheme) -> Scheme:
    """Return the scheme after computing its text, which ``torch.compile`` cannot trace."""
    assert scheme.text
    return scheme


def rotate_by_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` times ``hadamard.largest_hadamard`` of its last axis; ONNX gets the product."""
    if _is_tracing() and not torch.onnx.is_in_onnx_export():
        return _rotate_by_hadamard(x)
    return hadamard.rotate(x, hadamard.largest_hadamard(x.shape[-1]))


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
) -> torch.Tensor:
    """Return the quantized values of ``x`` under given scales; see ``qdq.fake_quantize``.

    A tensor without elements is returned as it is, under no scales too.
    """
    if _is_tracing():
        return _fake_quantize(x, scale, zero_point, None, scheme.text)
    if x.numel() == 0:
        return x
    return qdq.fake_quantize(x, scale, zero_point, scheme)


def fake_quantize_dynamic(
    x: torch.Tensor, scheme: Scheme, tensor_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the quantized values of ``x`` under scales for its range; see ``dynamic_qparams``."""
    if _is_tracing():
        return _fake_quantize(x, None, None, tensor_scale, scheme.text)
    if x.numel() == 0:
        return x
    return qdq.fake_quantize(x, *qdq.dynamic_qparams(x, scheme, tensor_scale), scheme)


def fake_quantize_codes(
    x: torch.Tensor,
    first: Scheme,
    second: Scheme,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scale_2: torch.Tensor | None,
    zero_point_2: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``x`` quantized in two stages; see ``stages.fake_quantize_codes``."""
    scales = scale, zero_point, scale_2, zero_point_2
    if _is_tracing():
        return _fake_quantize_codes(x.detach(), *scales, first.text, second.text)
    return stages.fake_quantize_codes(x, first, second, *scales)


def fake_quantize_learned(
    x: torch.Tensor,
    parameter: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    slope: torch.Tensor | float,
) -> torch.Tensor:
    """Return ``x`` quantized under a scale that trains; see ``learned_scale``."""
    if not _is_tracing():
        return learned_scale.fake_quantize_learned(x, parameter, scale, zero_point, scheme, slope)
    if not torch.is_grad_enabled():
        return _fake_quantize(x, scale, zero_point, None, scheme.text)
    if not isinstance(slope, torch.Tensor):
        slope = torch.full((), slope, dtype=torch.float32, device=x.device)
    return _fake_quantize_learned(x, parameter, scale, zero_point, slope, scheme.text)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the values of ``codes``; see ``qdq.dequantize``."""
    if _is_tracing():
        return _dequantize(codes, scale, zero_point, scheme.text, dtype)
    return qdq.dequantize(codes, scale, zero_point, scheme, dtype)


def unpack(
    words: torch.Tensor, fmt: Format, count: int, pack_method: str = "reorder", axis: int = -1
) -> torch.Tensor:
    """Return the codes in ``words``; see ``packing.unpack``."""
    if _is_tracing() and fmt.word_codes > 1:
        return _unpack(words, format_text(fmt), count, pack_method, axis)
    return packing.unpack(words, fmt, count, pack_method, axis)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return ``x`` times a rotation; see ``hadamard.rotate``."""
    if _is_tracing() and not rotation.is_floating_point():
        return _rotate(x, rotation)
    return hadamard.rotate(x, rotation)  # plain products, if the rotation is not one of +-1


def _qparams(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    scheme: Scheme,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return given scales, or those for the range of ``x``."""
    if scale is not None or not scheme.fmt.scaled or x.numel() == 0:
        return scale, zero_point
    return qdq.dynamic_qparams(x, scheme, tensor_scale)


# Operators return new tensors that are contiguous, whatever the strides of their inputs.


@define_operator(
    "fake_quantize(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? tensor_scale, str scheme)"
    " -> Tensor"
)
def _fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    scheme: str,
) -> torch.Tensor:
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    parsed = Scheme.from_text(scheme)
    scale, zero_point = _qparams(x, scale, zero_point, tensor_scale, parsed)
    return qdq.fake_quantize(x, scale, zero_point, parsed).contiguous()


@_fake_quantize.register_fake
def _(x: Any, scale: Any, zero_point: Any, tensor_scale: Any, scheme: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define_operator(
    "is_inside(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? tensor_scale, str scheme)"
    " -> Tensor"
)
def _is_inside(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    scheme: str,
) -> torch.Tensor:
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.bool, device=x.device)
    parsed = Scheme.from_text(scheme)
    scale, zero_point = _qparams(x, scale, zero_point, tensor_scale, parsed)
    return qdq.is_inside(x, scale, zero_point, parsed).contiguous()


@_is_inside.register_fake
def _(x: Any, scale: Any, zero_point: Any, tensor_scale: Any, scheme: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.scheme = inputs
    ctx.save_for_backward(*tensors)


def _pass_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Pass the gradient of values inside the range of the codes; see ``qdq.fake_quantize``."""
    if Scheme.from_text(ctx.scheme).fmt.scaled:
        grad = grad * _is_inside(*ctx.saved_tensors, ctx.scheme)
    return grad, None, None, None, None


_fake_quantize.register_autograd(_pass_gradient, setup_context=_keep_inputs)


@define_operator(
    "fake_quantize_codes(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? scale_2,"
    " Tensor? zero_point_2, str first, str second) -> Tensor"
)
def _fake_quantize_codes(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scale_2: torch.Tensor | None,
    zero_point_2: torch.Tensor | None,
    first: str,
    second: str,
) -> torch.Tensor:
    schemes, scales = (
        (Scheme.from_text(first), Scheme.from_text(second)),
        (scale, zero_point, scale_2, zero_point_2),
    )
    return stages.fake_quantize_codes(x, *schemes, *scales).contiguous()


@_fake_quantize_codes.register_fake
def _(x: Any, *scales_and_schemes: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define_operator(
    "fake_quantize_learned(Tensor x, Tensor parameter, Tensor scale, Tensor? zero_point,"
    " Tensor slope, str scheme) -> Tensor"
)
def _fake_quantize_learned(
    x: torch.Tensor,
    parameter: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    slope: torch.Tensor,
    scheme: str,
) -> torch.Tensor:
    return qdq.fake_quantize(x, scale, zero_point, Scheme.from_text(scheme)).contiguous()


@_fake_quantize_learned.register_fake
def _(x: Any, *others: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define_operator(
    "learned_gradients(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, str scheme)"
    " -> (Tensor, Tensor)"
)
def _learned_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    by_x, by_scale = learned_scale.gradients(grad, x, scale, zero_point, Scheme.from_text(scheme))
    return by_x.contiguous(), by_scale.contiguous()


@_learned_gradients.register_fake
def _(grad: Any, x: Any, scale: Any, zero_point: Any, scheme: str) -> tuple[Any, Any]:
    by_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return by_x, torch.empty(scale.shape, dtype=torch.float32, device=scale.device)


def _keep_learned(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, _, scale, zero_point, slope, ctx.scheme = inputs
    ctx.save_for_backward(x, scale, zero_point, slope)


def _pass_learned(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, scale, zero_point, slope = ctx.saved_tensors
    by_x, by_scale = _learned_gradients(grad, x, scale, zero_point, ctx.scheme)
    return by_x, by_scale * slope, None, None, None, None


_fake_quantize_learned.register_autograd(_pass_learned, setup_context=_keep_learned)


@define_operator(
    "dequantize(Tensor codes, Tensor? scale, Tensor? zero_point, str scheme, ScalarType dtype)"
    " -> Tensor"
)
def _dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    values = qdq.dequantize(codes, scale, zero_point, Scheme.from_text(scheme), dtype)
    return values.contiguous()


@_dequantize.register_fake
def _(codes: Any, scale: Any, zero_point: Any, scheme: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@define_operator("unpack(Tensor words, str fmt, int count, str pack_method, int axis) -> Tensor")
def _unpack(words: torch.Tensor, fmt: str, count: int, pack_method: str, axis: int) -> torch.Tensor:
    return packing.unpack(words, read_format(fmt), count, pack_method, axis)


@_unpack.register_fake
def _(words: Any, fmt: str, count: int, pack_method: str, axis: int) -> torch.Tensor:
    shape = [*words.shape]
    shape[axis] = count
    dtype = read_format(fmt).code_dtype
    return torch.empty(shape, dtype=dtype, device=words.device)


@define_operator("rotate(Tensor x, Tensor rotation) -> Tensor")
def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    return hadamard.rotate(x, rotation).contiguous()


@_rotate.register_fake
def _(x: Any, rotation: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_rotation(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _rotate_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _rotate(grad, ctx.saved_tensors[0].T), None


_rotate.register_autograd(_rotate_back, setup_context=_keep_rotation)


@define_operator("rotate_by_hadamard(Tensor x) -> Tensor")
def _rotate_by_hadamard(x: torch.Tensor) -> torch.Tensor:
    return hadamard.rotate(x, hadamard.largest_hadamard(x.shape[-1])).contiguous()


@_rotate_by_hadamard.register_fake
def _(x: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rotate_back_by_hadamard(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    rotation = hadamard.largest_hadamard(grad.shape[-1])
    return _rotate(grad, rotation.T.to(grad.device))


_rotate_by_hadamard.register_autograd(_rotate_back_by_hadamard)
