"""How the tensors of a quantized layer lie in a checkpoint: their shapes, order and packing."""

from __future__ import annotations

from dataclasses import replace

import torch

from quark.torch.numerics.blocks import QSchemeType
from quark.torch.numerics.formats import Format
from quark.torch.numerics.packing import pack, packed_size, unpack
from quark.torch.numerics.qdq import codes_of, dequantize
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.packed import Declared, Stored
from quark.torch.quantization.nn.quantizer import State


class PackedLayout:
    """Shapes, order and packing of the stored tensors.

    Args:
        pack_method: How 4-bit codes lie in a 32-bit word.
        packs_int2: False for files of versions before 1.0, which stored 2-bit codes in 32 bits.
    """

    def __init__(self, pack_method: str, packs_int2: bool = True) -> None:
        self.pack_method = pack_method
        self.packs_int2 = packs_int2

    def declare(self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool) -> Declared:
        """Return shape and type of each tensor stored for a tensor of shape ``shape``."""
        scheme = spec.scheme
        stored: Declared = {}
        fmt = self._format(scheme)
        if is_stored:
            placed = _turned(shape, scheme)
            stored[""] = (*placed[:-1], packed_size(placed[-1], fmt)), fmt.storage_dtype
        if not fmt.scaled or (spec.is_dynamic and not is_stored):
            return stored
        grid = _turned(scheme.scale_shape(shape), scheme)
        stored["scale"] = grid, scheme.scale_dtype
        if not scheme.has_zero_point:
            return stored
        if scheme.float_zero_point:
            stored["zero_point"] = grid, torch.float32
        elif not grid:
            stored["zero_point"] = (), torch.int32 if fmt.word_codes > 1 else fmt.code_dtype
        else:
            packed = (*grid[:-1], packed_size(grid[-1], fmt))
            stored["zero_point"] = packed, fmt.storage_dtype
        return stored

    def pack(self, state: State, value: torch.Tensor | None) -> Stored:
        """Return the tensors that ``declare`` describes; ``value`` is not used."""
        spec, codes, scale, zero_point = state
        scheme = spec.scheme
        stored: Stored = {}
        fmt = self._format(scheme)
        if codes is not None:
            stored[""] = pack(_turn(codes, scheme).to(fmt.code_dtype), fmt, self.pack_method)
        if scale is None:
            return stored
        stored["scale"] = _turn(scale, scheme).contiguous()
        if not scheme.has_zero_point or zero_point is None:
            return stored
        if scheme.float_zero_point:
            stored["zero_point"] = _turn(zero_point, scheme).contiguous()
        elif zero_point.dim() == 0:
            kind = torch.int32 if fmt.word_codes > 1 else fmt.code_dtype
            stored["zero_point"] = zero_point.to(kind)
        else:
            offsets = _turn(zero_point, scheme).to(fmt.code_dtype)
            stored["zero_point"] = pack(offsets, fmt, self.pack_method)
        return stored

    def unpack(self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored) -> State:
        """Return codes of shape ``shape``, scale and zero point: the inverse of ``pack``."""
        scheme = spec.scheme
        fmt = self._format(scheme)
        codes = None
        if "" in stored:
            count = _turned(shape, scheme)[-1]
            codes = _turn(unpack(stored[""], fmt, count, self.pack_method), scheme)
        scale, zero_point = stored.get("scale"), stored.get("zero_point")
        if zero_point is not None and zero_point.dim() and not scheme.float_zero_point:
            grid = _turned(scheme.scale_shape(shape), scheme)
            zero_point = unpack(zero_point, fmt, grid[-1], self.pack_method)
        scale = None if scale is None else _turn(scale, scheme)
        return State(spec, codes, scale, None if zero_point is None else _turn(zero_point, scheme))

    def value(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the values of the codes in ``dtype``."""
        _, codes, scale, zero_point = self.unpack(spec, shape, stored)
        assert codes is not None
        return dequantize(codes, scale, zero_point, spec.scheme, dtype)

    def _format(self, scheme: Scheme) -> Format:
        if scheme.fmt.bits == 2 and not self.packs_int2:
            return replace(scheme.fmt, word_codes=1, word_dtype=torch.int32)
        return scheme.fmt


def _is_turned(scheme: Scheme) -> bool:
    return scheme.qscheme is QSchemeType.per_group and not scheme.fmt.is_float


def _turned(shape: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    return tuple(reversed(shape)) if _is_turned(scheme) else shape


def _turn(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return x.permute(*reversed(range(x.dim()))) if _is_turned(scheme) and x.dim() > 1 else x


class ValueLayout:
    """Weights as values of their own type, scales beside them as they are used."""

    def declare(self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool) -> Declared:
        """Return shape and type of the scale and zero point."""
        scheme = spec.scheme
        if not scheme.fmt.scaled or (spec.is_dynamic and not is_stored):
            return {}
        grid = scheme.scale_shape(shape)
        stored: Declared = {"scale": (grid, scheme.scale_dtype)}
        if scheme.has_zero_point:
            stored["zero_point"] = grid, _offset_dtype(scheme)
        return stored

    def pack(self, state: State, value: torch.Tensor | None) -> Stored:
        """Return value, scale and zero point as they are."""
        parts = {"": value, "scale": state.scale, "zero_point": state.zero_point}
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def unpack(self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored) -> State:
        """Return the codes of the values, scale and zero point."""
        scale, zero_point = stored.get("scale"), stored.get("zero_point")
        codes = None
        if "" in stored:
            codes = codes_of(stored[""], scale, zero_point, spec.scheme)
        return State(spec, codes, scale, zero_point)

    def value(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the stored values in ``dtype``."""
        return stored[""].to(dtype)


def _offset_dtype(scheme: Scheme) -> torch.dtype:
    return torch.float32 if scheme.float_zero_point else torch.int32
