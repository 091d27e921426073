"""Fake quantization of inputs in one pass, which Inductor compiles for a scheme.

The plain path takes 9 to 49 operations for an input, most of them for the scale. For a few rows
that is as long as the product takes. Here the same functions of ``numerics`` are one compiled
function. It is used only if it gives the bits of the plain path for a sample with values of every
magnitude.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from quark.torch.numerics import qdq
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scales import largest_value, qparams_from_range
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.products import compiled

logger = logging.getLogger(__name__)

MOST_ELEMENTS = 1 << 20  # beyond, the plain path works in pieces
_SCALE = 0.0371  # in samples

Numbers = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return ``x`` fake-quantized by a compiled function; None if there is none for it.

    Args:
        x: Values, any shape.
        scale: Scale of the whole tensor; None computes scales from the ranges of the blocks.
        zero_point: Like ``scale``, or None.
        scheme: How the tensor is quantized.
        tensor_scale: Tensor scale of two-level scales, or None.
    """
    shape = block_rows(x, scheme, scale)
    if shape is None or x.device.type != "cpu" or x.numel() > MOST_ELEMENTS:
        return None
    given = (scale, zero_point, tensor_scale)
    has = tuple(t is not None for t in given)
    with compiled.one_state():
        function = _function(scheme, x.dtype, has, shape[0] == 1)
        if function is None:
            return None
        rows = torch.empty(shape, dtype=x.dtype, device=x.device)
        rows.copy_(x.reshape(shape))
        numbers = [None if t is None else t.detach().clone().reshape(()) for t in given]
        return function(rows, *numbers).view(x.shape)


def block_rows(
    x: torch.Tensor, scheme: Scheme, scale: torch.Tensor | None
) -> tuple[int, int] | None:
    """Return the number of blocks and of their elements, if elements of a block are neighbors.

    None also stands for schemes with shared microexponents, for several given scales, and for
    scales that depend on more than the range of a block.
    """
    is_simple = scheme.fmt.scaled and not scheme.fmt.block and scheme.fmt.bits <= 24
    if scheme.four_over_six and scale is None:
        return None
    if not is_simple or x.numel() <= 1 or (scale is not None and scale.numel() != 1):
        return None
    blocks = scheme.blocks(x.shape)
    rows, columns = (1, *blocks.view)[-2:]
    ends_inside = blocks.reduced == (len(blocks.view) - 1,)
    is_whole = blocks.padded == blocks.shape and len(blocks.view) <= 2
    return (rows, columns) if is_whole and ends_inside and columns > 1 else None


@lru_cache(maxsize=256)
def _function(
    scheme: Scheme, dtype: torch.dtype, has: tuple[bool, bool, bool], is_one_block: bool
) -> Callable[..., torch.Tensor] | None:
    """Compile the function of a scheme and prove it with a sample.

    The first answer is kept for this process; a refusal is logged.

    Args:
        scheme: How inputs are quantized.
        dtype: Type of the inputs.
        has: Whether scale, zero point and tensor scale are given.
        is_one_block: Whether an input is one block.

    Returns:
        (x (blocks, elements), scale, zero point, tensor scale) to the values in the type of x;
        None if it cannot be compiled or computes the sample wrong.
    """
    numbers = sample_numbers(scheme, has)
    problem = "its values for a sample differ from those of the plain path"
    try:
        function = compiled.compile_function(_make(scheme))
        samples = sample_inputs(dtype, is_one_block)
        if all(
            equal_bits(function(x, *numbers), plain_values(x, scheme, *numbers)) for x in samples
        ):
            return function
    except Exception as error:  # compilers, caches and code generators fail in many ways
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    logger.warning("Inputs in %s are not quantized by compiled code: %s.", scheme.fmt.name, problem)
    return None


def _make(scheme: Scheme) -> Callable[..., torch.Tensor]:
    """Return the function of a scheme, not yet compiled."""

    def fake_quantize_rows(
        x: torch.Tensor,
        scale: torch.Tensor | None,
        zero_point: torch.Tensor | None,
        tensor_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        if scale is None:
            lo, hi = x.amin(1, True).float(), x.amax(1, True).float()
            largest = largest_value(x.dtype)
            scale, zero_point = qparams_from_range(lo, hi, scheme, tensor_scale, largest)
        factors = qdq.Factors.of(scale, zero_point, scheme)
        y = qdq.round_trip(x.to(torch.float32, copy=True), factors, scheme)
        if x.dtype == torch.float16:
            y = y.clamp(-qdq.FLOAT16_MAX, qdq.FLOAT16_MAX)  # as the plain path stores them
        return y.to(x.dtype)

    return fake_quantize_rows


def plain_values(
    x: torch.Tensor,
    scheme: Scheme,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return what the plain path gives for rows that are the blocks."""
    rows = scheme_of_rows(scheme, scale)
    if scale is None:
        scale, zero_point = qdq.dynamic_qparams(x, rows, tensor_scale)
    return qdq.fake_quantize(x, scale, zero_point, rows)


def scheme_of_rows(scheme: Scheme, scale: torch.Tensor | None) -> Scheme:
    """Return the scheme of a matrix with blocks as rows; a given scale is that of the matrix.

    Formats that fix their blocks may have several in a row.
    """
    if scheme.fmt.block:
        return scheme
    if scale is not None:
        return replace(scheme, qscheme=QSchemeType.per_tensor, per_token=False)
    return replace(scheme, qscheme=QSchemeType.per_channel, axis=0, per_token=False, block=None)


def sample_inputs(dtype: torch.dtype, is_one_block: bool) -> list[torch.Tensor]:
    """Return ordinary values, zeros, ties, all magnitudes, infinity and NaN, (blocks, elements).

    Torch compiles a function for one block, and another one for several.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn(13, 48, generator=random, dtype=torch.float32, device="cpu")
    x[1] = 0.0
    x[2] = torch.arange(-24, 24, device="cpu") / 4  # ties, under scales that are powers of two
    x[2, 0] = 6.0
    magnitudes = torch.exp2(torch.linspace(-149, 127, 48, dtype=torch.float32, device="cpu"))
    x[3], x[4] = magnitudes * x[3].sign(), magnitudes.flip(0) * 2.0**-60
    x[5:7] *= 2.0**100
    x[7] = x[7].abs()
    x[8], x[10, 3], x[11, 4] = 2.0**-140, float("inf"), float("nan")
    x = x.to(dtype)
    return [rows.reshape(1, -1) for rows in torch.split(x[:12], 3)] if is_one_block else [x]


def sample_numbers(scheme: Scheme, has: tuple[bool, ...]) -> Numbers:
    """Return a scale, a zero point and a tensor scale, [] each; None for those that are not given.

    Args:
        scheme: How inputs are quantized.
        has: Whether each of them is given.
    """
    kind = torch.float32 if scheme.float_zero_point else torch.int64
    scale = torch.tensor(_SCALE, dtype=torch.float32, device="cpu")
    values = scale, torch.tensor(3, dtype=kind, device="cpu"), scale.clone()
    one, zero, other = (x if given else None for x, given in zip(values, has, strict=True))
    return one, zero, other


def equal_bits(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all values are equal in bits, or NaN in both."""
    nan = y.isnan() & expected.isnan()
    words = torch.int32 if y.dtype == torch.float32 else torch.int16
    return bool((nan | (y.view(words) == expected.view(words))).all())
