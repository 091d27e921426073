"""Quantized parameters as inputs of DequantizeLinear: codes, scale and zero point in ONNX types.

DequantizeLinear computes scale * (code - zero point). Integers for which ONNX has no type are
stored in the next wider one. fp6 is stored as its values in FLOAT8E4M3FN, fp4 as 4-bit indices of a
table of its values. Opset 28 has types for both, and for scales that are powers of two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quark.torch.numerics.codec import decode
from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import GROUPED, QSchemeType
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.nn.quantizer import QuantizedTensor

SUPPORTED = (
    "weights of integers up to 16 bits, of fp8, fp6 and fp4, and of blocks that share exponents; "
    "biases also of symmetric int32; inputs and outputs in the formats of weights, static per "
    "tensor or channel, or dynamic"
)
_WIDTHS = (2, 4, 8, 16, 32)  # bits of the integer types of ONNX
_WIDEST = 16  # bits of a code that float32 holds exactly, whatever the zero point
FLOAT8_OPSET = 19
NARROW_OPSET, NARROW_IR = 25, 13  # the first with 2-bit integers
_OPSETS = {
    "INT8": 18,
    "UINT8": 18,
    "INT32": 18,
    "FLOAT8E4M3FN": FLOAT8_OPSET,
    "FLOAT8E5M2": FLOAT8_OPSET,
    "INT2": NARROW_OPSET,
    "UINT2": NARROW_OPSET,
}
_NATIVE = {"float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2"}
BLOCKED_OPSET = 21  # the first with block_size, 16-bit and 4-bit integers
BYTES = ("INT8", "UINT8")
DECODED = "FLOAT8E4M3FN"  # holds all values of fp4 and fp6 exactly
PACKED_OPSET, PACKED_IR = 28, 14  # the first with 6-bit floats, and with scales in E8M0
_PACKED = {"fp4": "FLOAT4E2M1", "fp6_e2m3": "FLOAT6E2M3", "fp6_e3m2": "FLOAT6E3M2"}


class DequantizeInputs(NamedTuple):
    """A quantized parameter as inputs and attributes of DequantizeLinear.

    Attributes:
        codes: Codes in the stored shape. Here each 2-bit or 4-bit code fills a byte.
        scale: float32: [] per tensor, [channels], or of the rank of ``codes``; None for casts.
        zero_point: Shaped like ``scale``, in the type of ``codes``; or None for zero.
        code_type: Name of the ONNX type of the codes.
        axis: Axis of the channels or blocks, None per tensor.
        block: Elements of a block along ``axis``, 0 per tensor and per channel.
        table: float32 value of each code, if codes are indices; or None.
        packed_type: Name of the type that has the codes from ``PACKED_OPSET`` on; "" for
            ``code_type``.
        scale_type: Name of the ONNX type of the scale; "" for its own.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    code_type: str
    axis: int | None = None
    block: int = 0
    table: torch.Tensor | None = None
    packed_type: str = ""
    scale_type: str = ""

    @property
    def is_pairable(self) -> bool:
        """Whether the other factor of a product may be the output of a DequantizeLinear too.

        ONNX Runtime fuses such a product into an integer product, even where it has no kernel for
        it: for floats, which it then does not load, and for blocks of bytes, which fail on a run.
        """
        is_integer = "INT" in self.code_type and self.table is None
        return is_integer and not (self.block and self.code_type in BYTES)

    @property
    def opset(self) -> int:
        """Lowest opset in which DequantizeLinear accepts the inputs."""
        least = _OPSETS.get(self.code_type, BLOCKED_OPSET)
        return max(least, BLOCKED_OPSET) if self.block else least

    def in_types_of(self, opset: int) -> DequantizeInputs:
        """Return the inputs in the types that an opset has for their codes and scales."""
        if opset < PACKED_OPSET:
            return self._replace(scale_type="")
        if not self.packed_type:
            return self
        codes = self.codes.float() if self.table is None else self.table[self.codes.int()]
        return self._replace(codes=codes, code_type=self.packed_type, table=None)

    def transposed(self) -> DequantizeInputs:
        """Return a matrix with its axes exchanged."""
        scale, zero_point = self.scale, self.zero_point
        if self.block:
            assert scale is not None
            scale = scale.T.contiguous()
            zero_point = None if zero_point is None else zero_point.T.contiguous()
        axis = None if self.axis is None else 1 - self.axis
        codes = self.codes.T.contiguous()
        return self._replace(codes=codes, scale=scale, zero_point=zero_point, axis=axis)


def code_type(fmt: Format) -> str | None:
    """Return the name of the ONNX type that holds the codes of a format exactly, or None.

    Examples: int4 -> INT4, int3 -> INT4, fp8_e4m3 -> FLOAT8E4M3FN, fp4 -> UINT4 (indices).
    """
    if fmt.native is not None:
        return _NATIVE.get(fmt.native)
    if not fmt.has_rule or (fmt.is_float and (fmt.bits == 8 or not fmt.signed)):
        return None
    if fmt.is_float and fmt.bits in _WIDTHS:
        return f"UINT{fmt.bits}"
    if fmt.is_float:
        values = decode(torch.arange(1 << fmt.bits, device="cpu"), fmt)
        return DECODED if values.equal(values.to(torch.float8_e4m3fn).to(values.dtype)) else None
    bits = fmt.bits + (fmt.sub_block > 0)  # codes are doubled where sub-blocks have a larger step
    width = next((w for w in _WIDTHS if w >= bits), None)
    return width and f"{'' if fmt.signed else 'U'}INT{width}"  # type: ignore[return-value]


def weight_problem(spec: QuantizationSpec) -> str | None:
    """Return why ONNX cannot hold a weight quantized this way, or None."""
    scheme = spec.coded.scheme
    fmt = scheme.fmt
    if not fmt.scaled:
        return None
    if code_type(fmt) is None or fmt.bits > _WIDEST:
        return f"has no type for {spec.coded.dtype.name}"
    if scheme.float_zero_point:
        return "has no float zero points"
    if spec.quantizes_codes and spec.scheme.qscheme is not QSchemeType.per_tensor:
        return "has one scale per code, but both stages have several"
    return None


def bias_problem(spec: QuantizationSpec) -> str | None:
    """Return why ONNX cannot hold a bias quantized this way, or None.

    Unlike a weight, a bias may be int32, the type in which integer products are summed.
    """
    scheme = spec.scheme
    is_sum = spec.dtype is Dtype.int32 and scheme.symmetric and scheme.qscheme not in GROUPED
    return None if is_sum and not spec.quantizes_codes else weight_problem(spec)


def to_dequantize_inputs(state: QuantizedTensor) -> DequantizeInputs:
    """Return a parameter as inputs of DequantizeLinear. Its values do not change.

    A scale per block of rows and columns is repeated for each row. The scales of two stages are
    multiplied.

    Args:
        state: A weight for which ``weight_problem`` is None, or a bias for which ``bias_problem``
            is None.
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
        return DequantizeInputs(codes, None, None, fmt.name.upper())
    kind = code_type(fmt)
    assert kind is not None and scale is not None
    table = None
    if fmt.is_encoded and kind == DECODED:
        codes = decode(codes, fmt).to(torch.float8_e4m3fn)
    elif fmt.is_encoded:
        table = decode(torch.arange(1 << fmt.bits, device="cpu"), fmt)
    if scheme.flat and scheme.qscheme in GROUPED and codes.dim() > 2:
        codes = codes.flatten(1)
    if fmt.sub_block:
        codes, scale, scheme = _merge_sub_blocks(codes, scale, scheme)
    if scheme.symmetric and fmt.signed:
        # ONNX Runtime uses a wrong default where the zero point of bytes is left out.
        zeros = torch.zeros_like(scale) if kind in BYTES else None
    scale = _to_onnx_shape(scale.float(), scheme, codes.shape)
    zeros = None if zeros is None else _to_onnx_shape(zeros, scheme, codes.shape).to(codes.dtype)
    axis, block = _axis_and_block(scheme, codes.shape)
    packed, power = _PACKED.get(fmt.name, ""), "FLOAT8E8M0" if scheme.scale == E8M0 else ""
    return DequantizeInputs(
        codes.contiguous(), scale, zeros, kind, axis, block, table, packed, power
    )


def _merge_sub_blocks(
    codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, Scheme]:
    """Give the sub-blocks of a block (MX6, MX9) one step: the smallest.

    The steps of a block are s and 2s. Codes of sub-blocks with the step 2s are doubled: the code 5
    with the step 2s becomes the code 10 with the step s, in a type that is one bit wider.
    """
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


def _axis_and_block(scheme: Scheme, shape: torch.Size) -> tuple[int | None, int]:
    """Return the attributes ``axis`` and ``block_size`` of DequantizeLinear."""
    if scheme.qscheme is QSchemeType.per_tensor:
        return None, 0
    if scheme.block is not None:
        columns = scheme.block[1]
        return len(shape) - 1, shape[-1] if columns == -1 else columns
    axis = scheme.axis % len(shape)
    if scheme.qscheme is QSchemeType.per_channel:
        return axis, 0
    return axis, shape[axis] if scheme.group == -1 else scheme.group


def _to_onnx_shape(parts: torch.Tensor, scheme: Scheme, shape: torch.Size) -> torch.Tensor:
    """Return scales or zero points in the shape that DequantizeLinear expects."""
    if scheme.qscheme not in GROUPED:
        return parts.reshape(scheme.scale_shape(shape))
    parts = parts.reshape(scheme.blocks(shape).grid)
    if scheme.block is not None and scheme.block[0] != 1:
        # DequantizeLinear has blocks along one axis. Weight 4 x 6 in blocks of 2 x 3: the grid
        # of scales [2, 2] becomes [4, 2], each row of scales twice.
        rows = shape[-2] if scheme.block[0] == -1 else scheme.block[0]
        parts = parts.repeat_interleave(rows, -2).narrow(-2, 0, shape[-2])
    return parts.contiguous()
