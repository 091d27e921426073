"""Quantized tensors as DequantizeLinear takes them: codes, scale and zero point of ONNX types."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quark.torch.numerics.codec import decode
from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import GROUPED, Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import State

HOLDS = (
    "weights of integers up to 16 bits, of fp8, fp6 and fp4, and of blocks that share exponents; "
    "inputs and outputs in the same formats, static per tensor or channel, or dynamic"
)
_WIDTHS = (2, 4, 8, 16)  # of integers that ONNX has types for
FLOAT8_OPSET = 19
NARROW_OPSET, NARROW_IR = 25, 13  # the first with integers of two bits
_OPSETS = {
    "INT8": 18,
    "UINT8": 18,
    "FLOAT8E4M3FN": FLOAT8_OPSET,
    "FLOAT8E5M2": FLOAT8_OPSET,
    "INT2": NARROW_OPSET,
    "UINT2": NARROW_OPSET,
}
_NATIVE = {torch.float8_e4m3fn: "FLOAT8E4M3FN", torch.float8_e5m2: "FLOAT8E5M2"}
BLOCKED_OPSET = 21
BYTES = ("INT8", "UINT8")
LOOKED_UP = "FLOAT8E4M3FN"  # type of the values in a table


class Held(NamedTuple):
    """A quantized parameter as it is stored.

    Attributes:
        codes: Codes in the shape that is stored; 2-bit and 4-bit ones fill a byte each here.
        scale: float32: [] per tensor, [channels], or of the rank of ``codes``; None for casts.
        zero_point: Like ``scale``, in the type of ``codes``; or None for zero.
        kind: Name of the ONNX type of the codes.
        axis: Axis of the channels or blocks, None per tensor.
        block: Elements of a block along ``axis``, 0 per tensor and per channel.
        table: float32 value of each code, where these are no numbers; or None.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    kind: str
    axis: int | None = None
    block: int = 0
    table: torch.Tensor | None = None

    @property
    def is_pairable(self) -> bool:
        """Whether ONNX Runtime loads a product of two DequantizeLinear of which this is one.

        It makes an integer product of them even where it has none: for floats and, once it runs,
        for blocks of bytes.
        """
        is_integer = "INT" in self.kind and self.table is None
        return is_integer and not (self.block and self.kind in BYTES)

    @property
    def opset(self) -> int:
        """Lowest opset in which DequantizeLinear takes them."""
        least = _OPSETS.get(self.kind, BLOCKED_OPSET)
        return max(least, BLOCKED_OPSET) if self.block else least

    def transposed(self) -> Held:
        """Return a matrix with its axes exchanged."""
        scale, zero_point = self.scale, self.zero_point
        if self.block:
            assert scale is not None
            scale = scale.T.contiguous()
            zero_point = None if zero_point is None else zero_point.T.contiguous()
        axis = None if self.axis is None else 1 - self.axis
        codes = self.codes.T.contiguous()
        return self._replace(codes=codes, scale=scale, zero_point=zero_point, axis=axis)


def kind_of(fmt: Format) -> str | None:
    """Return the name of the ONNX type that holds the codes of a format exactly, or None."""
    if fmt.native is not None:
        return _NATIVE.get(fmt.native)
    if fmt.is_float and (fmt.bits == 8 or not fmt.signed):
        return None
    if fmt.is_float:
        return f"UINT{fmt.bits}" if fmt.bits in _WIDTHS else LOOKED_UP
    bits = fmt.bits + (fmt.sub_block > 0)  # codes are doubled where sub-blocks have a larger step
    width = next((w for w in _WIDTHS if w >= bits), None)
    return width and f"{'' if fmt.signed else 'U'}INT{width}"  # type: ignore[return-value]


def weight_problem(spec: QuantizationSpec) -> str | None:
    """Return why no type of ONNX holds a parameter, or None."""
    scheme = spec.coded.scheme
    fmt = scheme.fmt
    if not fmt.scaled:
        return None
    if kind_of(fmt) is None:
        return f"has no type for {spec.coded.dtype.name}"
    if scheme.float_zero_point:
        return "has no float zero points"
    if spec.quantizes_codes and spec.scheme.qscheme is not QSchemeType.per_tensor:
        return "has one scale per code, but both stages have several"
    return None


def held(state: State) -> Held:
    """Return a parameter as ONNX stores it. Its values do not change.

    A scale per block of rows and columns is repeated for each row. Where a second stage quantizes
    the codes of a first one, the scales are multiplied.

    Args:
        state: A parameter that ``weight_problem`` has nothing against.
    """
    codes, scale, zeros = state.codes, state.scale, state.zero_point
    scheme = state.scheme
    if state.spec.quantizes_codes:
        assert scale is not None and state.scale_2 is not None
        scheme = state.spec.stages[1].for_parameter().scheme
        scale, zeros = scale * state.scale_2, state.zero_point_2
    assert codes is not None
    fmt = scheme.fmt
    if not fmt.scaled:
        return Held(codes, None, None, fmt.name.upper())
    kind = kind_of(fmt)
    assert kind is not None and scale is not None
    table = None
    if fmt.is_encoded and kind == LOOKED_UP:
        codes = decode(codes, fmt).to(torch.float8_e4m3fn)
    elif fmt.is_encoded:
        table = decode(torch.arange(1 << fmt.bits), fmt)
    if scheme.flat and scheme.qscheme in GROUPED and codes.dim() > 2:
        codes = codes.flatten(1)
    if fmt.sub_block:
        codes, scale, scheme = _merged(codes, scale, scheme)
    if scheme.symmetric and fmt.signed:  # ONNX Runtime makes up wrong ones for bytes without
        zeros = torch.zeros_like(scale) if kind in BYTES else None
    scale = _placed(scale.float(), scheme, codes.shape)
    zeros = None if zeros is None else _placed(zeros, scheme, codes.shape).to(codes.dtype)
    axis, block = _where(scheme, codes.shape)
    return Held(codes.contiguous(), scale, zeros, kind, axis, block, table)


def _merged(
    codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, Scheme]:
    """Give all sub-blocks of a block the smaller of their two steps, and double the other codes."""
    fmt, axis = scheme.fmt, scheme.axis % codes.dim()
    per_block = fmt.block // fmt.sub_block
    steps = scale.reshape(scheme.blocks(codes.shape).grid).movedim(axis, -1)
    count = steps.shape[-1]
    steps = F.pad(steps, (0, -count % per_block), value=torch.inf)
    steps = torch.unflatten(steps, -1, (-1, per_block))
    step = steps.amin(-1, keepdim=True)
    factor = (steps / step).flatten(-2)[..., :count].repeat_interleave(fmt.sub_block, -1)
    factor = factor.movedim(-1, axis).narrow(axis, 0, codes.shape[axis])
    merged = replace(scheme, fmt=replace(fmt, sub_block=0), group=fmt.block)
    wider = (codes.float() * factor).to(torch.int8 if fmt.bits < 8 else torch.int16)
    return wider, step.squeeze(-1).movedim(-1, axis), merged


def _where(scheme: Scheme, shape: torch.Size) -> tuple[int | None, int]:
    """Return the axis of channels or blocks, and the elements of a block along it."""
    if scheme.qscheme is QSchemeType.per_tensor:
        return None, 0
    if scheme.block is not None:
        columns = scheme.block[1]
        return len(shape) - 1, shape[-1] if columns == -1 else columns
    axis = scheme.axis % len(shape)
    if scheme.qscheme is QSchemeType.per_channel:
        return axis, 0
    return axis, shape[axis] if scheme.group == -1 else scheme.group


def _placed(parts: torch.Tensor, scheme: Scheme, shape: torch.Size) -> torch.Tensor:
    """Return scales or zero points in the shape that DequantizeLinear takes."""
    if scheme.qscheme not in GROUPED:
        return parts.reshape(scheme.scale_shape(shape))
    parts = parts.reshape(scheme.blocks(shape).grid)
    if scheme.block is not None and scheme.block[0] != 1:
        rows = shape[-2] if scheme.block[0] == -1 else scheme.block[0]
        parts = parts.repeat_interleave(rows, -2).narrow(-2, 0, shape[-2])
    return parts.contiguous()
