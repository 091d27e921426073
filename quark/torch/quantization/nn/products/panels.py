"""Values of a packed weight, panel by panel, in one buffer that all layers share.

A panel is decoded by a few passes over elements that stay in the cache, and gives the bits of
``numerics.qdq.dequantize``: (code - zero point) * scale in float32. Floats of up to 8 bits are
float16 numbers with fewer bits: they are moved to their place in 16 bits, and the difference of the
biases is a power of two, which the scale contains. Example, fp4 (1 sign, 2 exponent, 1 mantissa)::

    code 0 01 1 = 1.5     float16 0 00001 1000000000 = 1.5 * 2^-14     scale contains 2^14

Codes of a format that is a table of values are looked up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from quark.torch.numerics.formats import Format, TableFormat
from quark.torch.quantization.nn.products.arrangement import (
    Arrangement,
    Parts,
    compact,
    pack_planes,
    plane_widths,
    unpack_planes,
)
from quark.torch.quantization.nn.quantizer import QuantizedTensor

HALF_EXPONENT, HALF_BITS = 5, 16  # float16: width of the exponent, width of a number
_HALF_BIAS_STEP = 14  # -exponent of the smallest normal float16
_ORDINARY = 2.0**-80, 2.0**80  # scales of which no product is subnormal or infinite


class _Buffers(threading.local):
    """Buffers of this thread by type, as large as the largest panel so far."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of ``size`` elements, whose contents are arbitrary."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            with torch.inference_mode(False):  # whoever takes it next may be in another mode
                kept = self._kept[name] = torch.empty(size, dtype=dtype, device="cpu")
        return kept[:size]


BUFFERS = _Buffers()


@dataclass(frozen=True)
class Panels:
    """A packed weight in panels.

    Attributes:
        fmt: Format of the codes.
        arrangement: Order of the elements.
        offset: What is added to a code before it is stored: integers but those of 8 bits are
            unsigned.
        zero_point: Integer zero point that all groups share, plus ``offset``; this alone, if zero
            points differ. The part ``zero_point`` contains ``offset`` if it is int8.
    """

    fmt: Format
    arrangement: Arrangement
    offset: int
    zero_point: int

    @classmethod
    def pack(cls, state: QuantizedTensor, arrangement: Arrangement) -> tuple[Panels, Parts]:
        """Return the panels of a weight and their tensors.

        Args:
            state: Codes (outputs, inputs) and scales.
            arrangement: Order of the elements.
        """
        fmt, codes = state.scheme.fmt, state.codes
        assert codes is not None and state.scale is not None
        offset = -fmt.qmin if not fmt.is_float and fmt.bits != 8 else 0
        bits = codes.view(torch.uint8) if fmt.bits <= 8 else codes
        parts = pack_planes(arrangement.arrange(bits), fmt, offset)
        zero = 0 if fmt.is_float else offset
        stored = _stored_zero_points(state, arrangement)
        if stored is not None:
            first = stored.flatten()[0].item()
            if torch.all(stored == first) and first == int(first):
                zero = offset + int(first)
            else:
                zeros = arrangement.arrange_factors(stored)
                parts["zero_point"] = _small_zero_points(zeros + offset, fmt)
                if parts["zero_point"].dtype != torch.int8:
                    parts["zero_point"] = compact(zeros)
        scale = _per_group(state.scale.float(), state, arrangement)
        if state.scale_2 is not None:
            ratio = (scale / state.scale_2).bfloat16()
            if torch.equal(ratio.float() * state.scale_2, scale):
                parts["tensor_scale"] = state.scale_2.float().reshape(())
                scale = ratio.float()
        parts["scale"] = compact(arrangement.arrange_factors(scale * _scale_factor(fmt)))
        return cls(fmt, arrangement, offset, zero), parts

    def decode(self, parts: Parts, scaled: bool = True) -> Iterator[torch.Tensor]:
        """Iterate over the values of the panels: float32 (elements,), overwritten by the next.

        Args:
            parts: Tensors of the weight.
            scaled: Whether values are multiplied by their scales.
        """
        size, shape = self.arrangement.size, self.arrangement.grouped
        values = BUFFERS.take("values", size, torch.float32)
        grouped = values.view(shape)
        read = self._reader(parts, values)
        scales = self.scale(parts).unbind()
        for index, bits in enumerate(self._bits(parts)):
            read(bits, index)
            if scaled:
                grouped.mul_(scales[index])
            yield values

    def scale(self, parts: Parts) -> torch.Tensor:
        """Return the scales of the panels in float32, in shapes that broadcast over ``grouped``."""
        scale = parts["scale"].float()
        return scale * parts["tensor_scale"] if "tensor_scale" in parts else scale

    def holds_factors(self, parts: Parts, state: QuantizedTensor) -> bool:
        """Whether scales and zero points are those of a weight, and scales are ordinary numbers."""
        assert state.scale is not None
        to, (low, high) = self.arrangement, _ORDINARY
        scale = _per_group(state.scale.float(), state, to)
        size = scale.abs()
        if not torch.all(((size >= low) & (size <= high)) | (size == 0)):
            return False
        held = to.restore_factors(self.scale(parts))[: to.outputs]
        if not torch.equal(held, scale * _scale_factor(self.fmt)):
            return False
        zeros, own = _stored_zero_points(state, to), self.zero_points(parts)
        if isinstance(own, torch.Tensor):
            own = to.restore_factors(own)[: to.outputs]
        offset = 0 if self.fmt.is_float else self.offset
        expected = torch.zeros_like(scale) if zeros is None else zeros
        return bool(torch.all(expected + offset == own))

    def zero_points(self, parts: Parts) -> torch.Tensor | int:
        """Return the zero points of the stored codes, with ``offset``, in the shape of scales."""
        zeros = parts.get("zero_point")
        if zeros is None:
            return self.zero_point
        return zeros.float() + (0 if zeros.dtype == torch.int8 else self.offset)

    def codes(self, parts: Parts) -> torch.Tensor:
        """Return the codes (outputs, inputs): the inverse of ``pack``."""
        codes = unpack_planes(parts, self.fmt, self.offset)
        return self.arrangement.restore(codes).contiguous().view(self.fmt.code_dtype)

    def _bits(self, parts: Parts) -> Iterator[torch.Tensor]:
        """Iterate over the stored bits of the panels: uint8, int16 of over 8 bits, (elements,)."""
        widths = plane_widths(self.fmt)
        if self.fmt.bits > 8:
            for index in range(self.arrangement.panels):
                held = {f"plane_{w}": parts[f"plane_{w}"][index : index + 1] for w in widths}
                yield unpack_planes(held, self.fmt).flatten()
            return
        planes = [parts[f"plane_{width}"].flatten(1).unbind() for width in widths]
        if widths == [8]:
            yield from planes[0]
            return
        size = self.arrangement.size
        bits, extra = (BUFFERS.take(n, size, torch.uint8) for n in ("bits", "extra"))
        for panel in zip(*planes, strict=True):
            below = 0
            for width, plane in zip(widths, panel, strict=True):
                _read_plane(plane, width, extra if below else bits)
                if below:
                    words = extra.view(torch.int32).bitwise_left_shift_(below)
                    bits.view(torch.int32).bitwise_or_(words)
                below += width
            yield bits

    def _reader(self, parts: Parts, values: torch.Tensor) -> Callable[[torch.Tensor, int], object]:
        """Return a function that writes what scales multiply, given the bits of a panel."""
        if isinstance(self.fmt, TableFormat):
            table = torch.tensor(self.fmt.values, dtype=torch.float32, device=values.device)
            return lambda bits, index: torch.index_select(table, 0, bits.int(), out=values)
        return self._floats(values) if self.fmt.is_float else self._integers(parts, values)

    def _integers(self, parts: Parts, values: torch.Tensor) -> Callable[[torch.Tensor, int], None]:
        """Return a function that writes (code - zero point) of a panel to ``values``."""
        zeros, shape = parts.get("zero_point"), self.arrangement.grouped
        grouped = values.view(shape)

        def read(bits: torch.Tensor, index: int) -> None:
            if self.fmt.bits < 8:
                codes = bits.view(torch.int8)  # at most 127
                if zeros is not None and zeros.dtype == torch.int8:
                    codes.view(shape).sub_(zeros[index])
                elif self.zero_point:
                    codes.sub_(self.zero_point)
                values.copy_(codes)
            else:
                values.copy_(bits.view(self.fmt.code_dtype))
                if self.zero_point:
                    values.sub_(self.zero_point)
            if zeros is not None and zeros.dtype != torch.int8:
                grouped.sub_(zeros[index])

        return read

    def _floats(self, values: torch.Tensor) -> Callable[[torch.Tensor, int], None]:
        """Return a function that writes the floats of a panel to ``values``."""
        fmt = self.fmt
        halves = BUFFERS.take("halves", self.arrangement.size, torch.int16)
        top = HALF_BITS - fmt.bits - (not fmt.signed)  # the sign bit comes first
        down = HALF_EXPONENT - fmt.exponent_bits
        copies_sign = fmt.signed and fmt.bits == 8  # in the conversion from int8

        def read(bits: torch.Tensor, index: int) -> None:
            if copies_sign:
                halves.copy_(bits.view(torch.int8)).mul_(1 << (top - down))
            else:
                halves.copy_(bits).mul_(1 << top)
            if down:
                # The shift copies the sign, which stands in one bit alone: fp4 keeps 0x8FFF.
                if not copies_sign:
                    halves.bitwise_right_shift_(down)
                halves.bitwise_and_((0x7FFF >> down) - 0x8000)
            values.copy_(halves.view(torch.float16))

        return read


def _read_plane(plane: torch.Tensor, width: int, out: torch.Tensor) -> None:
    """Write the slots of a plane to ``out``, four bytes at a time.

    A shift of four bytes moves bits from one to the next, which the mask takes away.
    """
    words = plane.view(torch.int32)
    mask = ((1 << width) - 1) * 0x01010101
    for slot, run in enumerate(out.view(torch.int32).chunk(8 // width)):
        if slot:
            torch.bitwise_right_shift(words, width * slot, out=run)
            run.bitwise_and_(mask)
        else:
            torch.bitwise_and(words, mask, out=run)


def _scale_factor(fmt: Format) -> float:
    """Return what scales contain beside themselves: the difference of the biases of floats."""
    is_half = fmt.is_float and fmt.has_rule
    return 2.0 ** (fmt.min_exponent + _HALF_BIAS_STEP) if is_half else 1.0


def _per_group(x: torch.Tensor, state: QuantizedTensor, to: Arrangement) -> torch.Tensor:
    """Return scales or zero points as one number per group of each row, (outputs, groups)."""
    grid = state.scheme.blocks((to.outputs, to.inputs)).grid
    rows = x.reshape(grid).repeat_interleave(-(-to.outputs // grid[0]), 0)[: to.outputs]
    return rows.repeat_interleave(to.inputs // to.group // grid[1], 1)


def _stored_zero_points(state: QuantizedTensor, to: Arrangement) -> torch.Tensor | None:
    """Return the zero points of groups, (outputs, groups); None if they are none."""
    if state.zero_point is None or (state.scheme.symmetric and state.scheme.fmt.signed):
        return None
    return _per_group(state.zero_point.float(), state, to)


def _small_zero_points(zeros: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return zero points as int8 if they and all differences from codes fit it, else unchanged."""
    if fmt.bits >= 8 or not zeros.isfinite().all():
        return zeros
    low, high = (int(z) for z in zeros.aminmax())
    small = zeros.to(torch.int8)
    is_small = (1 << fmt.bits) - 1 - low <= 127 and low >= -128 and high <= 127
    return small if is_small and torch.equal(small.float(), zeros) else zeros
