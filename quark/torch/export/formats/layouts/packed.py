"""How the tensors of a quantized layer lie in a checkpoint: their shapes, order and packing."""

from __future__ import annotations

from dataclasses import replace

import torch

from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack, packed_size, unpack
from quark.torch.numerics.qdq import dynamic_qparams
from quark.torch.numerics.scale_codec import decode_scale, encode_scale, stored_dtype, stored_shape
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.packed import Declared, Stored
from quark.torch.quantization.nn.quantizer import PARTS, State


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
        if spec.quantizes_codes:
            first, second = (stage.for_parameter() for stage in spec.stages)
            stored = self._declare(second, shape, is_stored)
            stored = {part if part == "" else f"{part}_2": what for part, what in stored.items()}
            below = self._declare(first, shape, is_stored)
            return {**stored, **{part: what for part, what in below.items() if part}}
        stored = self._declare(spec, shape, is_stored)
        if spec.second_stage is not None and not spec.second_stage.is_dynamic:
            stored["scale_2"] = (), torch.float32
        return stored

    def _declare(self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool) -> Declared:
        scheme = spec.scheme
        stored: Declared = {}
        fmt = self._format(scheme)
        if is_stored:
            placed = _turned(shape, scheme)
            stored[""] = (*placed[:-1], packed_size(placed[-1], fmt)), fmt.storage_dtype
        if not fmt.scaled or (spec.is_dynamic and not is_stored):
            return stored
        grid = _turned(scheme.scale_shape(shape), scheme)
        stored["scale"] = stored_shape(grid, scheme), stored_dtype(scheme)
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
        spec, codes, scale, zero_point, scale_2, zero_point_2, _ = state
        if spec.quantizes_codes:
            first, second = (stage.for_parameter() for stage in spec.stages)
            above = self._pack_stage(State(second, codes, scale_2, zero_point_2))
            below = self._pack_stage(State(first, None, scale, zero_point))
            renamed = {part if part == "" else f"{part}_2": t for part, t in above.items()}
            return {**renamed, **below}
        stored = self._pack_stage(state)
        if spec.second_stage is not None and scale_2 is not None:
            stored["scale_2"] = scale_2
        return stored

    def _pack_stage(self, state: State) -> Stored:
        spec, codes, scale, zero_point, scale_2, *_ = state
        scheme = spec.scheme
        stored: Stored = {}
        fmt = self._format(scheme)
        if codes is not None:
            stored[""] = self._pack(codes, scheme)
        if scale is None:
            return stored
        stored["scale"] = encode_scale(_turn(scale, scheme), scheme, scale_2).contiguous()
        if not scheme.has_zero_point or zero_point is None:
            return stored
        if scheme.float_zero_point:
            stored["zero_point"] = _turn(zero_point, scheme).contiguous()
        elif zero_point.dim() == 0:
            kind = torch.int32 if fmt.word_codes > 1 else fmt.code_dtype
            stored["zero_point"] = zero_point.to(kind)
        else:
            stored["zero_point"] = self._pack(zero_point, scheme)
        return stored

    def unpack(self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored) -> State:
        """Return codes of shape ``shape``, scales and zero points: the inverse of ``pack``."""
        if not spec.quantizes_codes:
            state = self._unpack_stage(spec, shape, stored)
            return state._replace(scale_2=stored.get("scale_2"))
        first, second = (stage.for_parameter() for stage in spec.stages)
        parts = {part.removesuffix("_2"): t for part, t in stored.items() if part.endswith("_2")}
        above = self._unpack_stage(second, shape, {"": stored[""], **parts})
        below = self._unpack_stage(
            first, shape, {part: stored[part] for part in ("scale", "zero_point") if part in stored}
        )
        return State(
            spec, above.codes, below.scale, below.zero_point, above.scale, above.zero_point
        )

    def _unpack_stage(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored
    ) -> State:
        scheme = spec.scheme
        codes = None
        if "" in stored:
            codes = self._unpack(stored[""], shape, scheme)
        scale, zero_point = stored.get("scale"), stored.get("zero_point")
        if zero_point is not None and zero_point.dim() and not scheme.float_zero_point:
            zero_point = self._unpack(zero_point, scheme.scale_shape(shape), scheme)
        elif zero_point is not None:
            zero_point = _turn(zero_point, scheme)
        if scale is not None:
            scale = _turn(decode_scale(scale, scheme, shape, stored.get("scale_2")), scheme)
        return State(spec, codes, scale, zero_point)

    def value(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the values of the codes in ``dtype``."""
        return self.unpack(spec, shape, stored).value(dtype)

    def _pack(self, codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """Pack along the axis that is stored last: turning few words is cheaper than many codes."""
        fmt = self._format(scheme)
        words = pack(codes.to(fmt.code_dtype), fmt, self.pack_method, _packed_axis(scheme))
        return _turn(words, scheme).contiguous()

    def _unpack(self, words: torch.Tensor, shape: tuple[int, ...], scheme: Scheme) -> torch.Tensor:
        """Return codes of shape ``shape``: the inverse of ``_pack``."""
        fmt, axis = self._format(scheme), _packed_axis(scheme)
        words = _turn(words, scheme).contiguous()
        return unpack(words, fmt, shape[axis], self.pack_method, axis)

    def _format(self, scheme: Scheme) -> Format:
        if scheme.fmt.bits == 2 and not self.packs_int2:
            return replace(scheme.fmt, word_codes=1, word_dtype=torch.int32)
        return scheme.fmt


def _is_turned(scheme: Scheme) -> bool:
    return scheme.qscheme is QSchemeType.per_group and scheme.has_zero_point


def _packed_axis(scheme: Scheme) -> int:
    return 0 if _is_turned(scheme) else -1


def _turned(shape: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    return tuple(reversed(shape)) if _is_turned(scheme) else shape


def _turn(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return x.permute(*reversed(range(x.dim()))) if _is_turned(scheme) and x.dim() > 1 else x


class ValueLayout:
    """Weights as values of their own type, scales beside them as they are used.

    Args:
        has_block_scales: False for files of versions before 1.0, which stored values alone for
            formats that are blocks by themselves; the scales of MX6 and MX9 always follow from
            the values.
    """

    def __init__(self, has_block_scales: bool = True) -> None:
        self.has_block_scales = has_block_scales

    def _has_scale(self, spec: QuantizationSpec) -> bool:
        if spec.fixes_blocks:
            return self.has_block_scales and not spec.fmt.sub_block
        return spec.fmt.scaled

    def declare(self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool) -> Declared:
        """Return shape and type of the scales and zero points."""
        stored: Declared = {}
        for stage, suffix in zip(spec.stages, ("", "_2"), strict=False):
            scheme = stage.scheme
            if stage.is_scale_quant:
                stored["scale_2"] = (), torch.float32
            elif self._has_scale(stage) and (is_stored or not spec.is_dynamic):
                grid = scheme.scale_shape(shape)
                stored[f"scale{suffix}"] = grid, scheme.scale.held_dtype
                if scheme.has_zero_point:
                    kind = torch.float32 if scheme.float_zero_point else torch.int32
                    stored[f"zero_point{suffix}"] = grid, kind
        return stored

    def pack(self, state: State, value: torch.Tensor | None) -> Stored:
        """Return value, scales and zero points as they are."""
        parts = {"": value, **{name: getattr(state, name) for name in PARTS}}
        if not self._has_scale(state.spec):
            parts = {"": value}
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def unpack(self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored) -> State:
        """Return the codes of the values, scales and zero points."""
        parts = [stored.get(name) for name in PARTS]
        if "" not in stored:
            return State(spec, None, *parts)
        if spec.fixes_blocks and not self._has_scale(spec):
            parts[0], parts[1] = dynamic_qparams(stored[""], spec.scheme)
        return State.of_values(spec, stored[""], *parts)

    def value(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the stored values in ``dtype``."""
        return stored[""].to(dtype)
