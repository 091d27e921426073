"""The layouts of Quark's own checkpoints: packed codes, or values with scales beside them."""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch

from quark.torch.numerics.custom_operators import unpack
from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack, packed_size
from quark.torch.numerics.qdq import dynamic_qparams
from quark.torch.numerics.scale_codec import decode_scale, encode_scale, stored_dtype, stored_shape
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import PARTS, QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import DeclaredParts, StoredParts, TensorLayout

P = TypeVar("P")


class PackedLayout(TensorLayout):
    """Packed codes with scales and zero points.

    Integer weights per group are stored transposed, with codes packed along the output channels.
    Example of an int4 weight of 4096 outputs and 1024 inputs in groups of 128: codes [1024, 512],
    scales [8, 4096], zero points [8, 512]. All other codes are packed along the last axis.

    Args:
        pack_method: Order of 4-bit codes in a 32-bit word, a key of ``packing.ORDERS``.
    """

    def __init__(self, pack_method: str) -> None:
        self.pack_method = pack_method

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of each tensor stored for a tensor of shape ``shape``."""
        if spec.quantizes_codes:
            first, second = (stage.for_parameter() for stage in spec.stages)
            stored = self._declare(second, shape, is_stored)
            outer = self._declare(first, shape, is_stored)
            return _join_stages({p: entry for p, entry in outer.items() if p}, stored)
        stored = self._declare(spec, shape, is_stored)
        if spec.second_stage is not None and not spec.second_stage.is_dynamic:
            stored["scale_2"] = (), torch.float32
        return stored

    def _declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        scheme = spec.scheme
        stored: DeclaredParts = {}
        fmt = self._format(scheme)
        if is_stored:
            *rows, last = _stored_shape(shape, scheme)
            stored[""] = (*rows, packed_size(last, fmt)), fmt.storage_dtype
        if not fmt.scaled or (spec.is_dynamic and not is_stored):
            return stored
        grid = _stored_shape(scheme.scale_shape(shape), scheme)
        stored["scale"] = stored_shape(grid, scheme), stored_dtype(scheme)
        if not scheme.has_zero_point:
            return stored
        if scheme.float_zero_point:
            stored["zero_point"] = grid, torch.float32
        elif not grid:
            stored["zero_point"] = (), _scalar_zero_dtype(fmt)
        else:
            packed = (*grid[:-1], packed_size(grid[-1], fmt))
            stored["zero_point"] = packed, fmt.storage_dtype
        return stored

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return the stored tensors that ``declare`` describes; ``value`` is not used."""
        spec, codes, scale, zero_point, scale_2, zero_point_2, _ = state
        if spec.quantizes_codes:
            first, second = (stage.for_parameter() for stage in spec.stages)
            inner = self._pack_stage(QuantizedTensor(second, codes, scale_2, zero_point_2))
            outer = self._pack_stage(QuantizedTensor(first, None, scale, zero_point))
            return _join_stages(outer, inner)
        stored = self._pack_stage(state)
        if spec.second_stage is not None and scale_2 is not None:
            stored["scale_2"] = scale_2
        return stored

    def _pack_stage(self, state: QuantizedTensor) -> StoredParts:
        spec, codes, scale, zero_point, scale_2, *_ = state
        scheme = spec.scheme
        stored: StoredParts = {}
        fmt = self._format(scheme)
        if codes is not None:
            stored[""] = self._pack(codes, scheme)
        if scale is None:
            return stored
        stored["scale"] = encode_scale(_to_stored_axes(scale, scheme), scheme, scale_2).contiguous()
        if not scheme.has_zero_point or zero_point is None:
            return stored
        if scheme.float_zero_point:
            stored["zero_point"] = _to_stored_axes(zero_point, scheme).contiguous()
        elif zero_point.dim() == 0:
            stored["zero_point"] = zero_point.to(_scalar_zero_dtype(fmt))
        else:
            stored["zero_point"] = self._pack(zero_point, scheme)
        return stored

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return codes of shape ``shape``, scales and zero points: the inverse of ``pack``."""
        if not spec.quantizes_codes:
            state = self._unpack_stage(spec, shape, stored)
            return state._replace(scale_2=stored.get("scale_2"))
        first, second = (stage.for_parameter() for stage in spec.stages)
        parts = {part.removesuffix("_2"): t for part, t in stored.items() if part.endswith("_2")}
        inner = self._unpack_stage(second, shape, {"": stored[""], **parts})
        outer = self._unpack_stage(
            first, shape, {part: stored[part] for part in ("scale", "zero_point") if part in stored}
        )
        return QuantizedTensor(
            spec, inner.codes, outer.scale, outer.zero_point, inner.scale, inner.zero_point
        )

    def _unpack_stage(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        scheme = spec.scheme
        codes = None
        if "" in stored:
            codes = self._unpack(stored[""], shape, scheme)
        scale, zero_point = stored.get("scale"), stored.get("zero_point")
        if zero_point is not None and zero_point.dim() and not scheme.float_zero_point:
            zero_point = self._unpack(zero_point, scheme.scale_shape(shape), scheme)
        elif zero_point is not None:
            zero_point = _to_stored_axes(zero_point, scheme)
        if scale is not None:
            scale = self.biased_exponents(spec, scale)
            scale = _to_stored_axes(
                decode_scale(scale, scheme, shape, stored.get("scale_2")), scheme
            )
        return QuantizedTensor(spec, codes, scale, zero_point)

    def biased_exponents(self, spec: QuantizationSpec, stored: torch.Tensor) -> torch.Tensor:
        """Return stored scales, those that are exponents with the bias of 127."""
        return stored

    def _pack(self, codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """Pack along the axis that is stored last; transposing words is cheaper than codes."""
        fmt = self._format(scheme)
        words = pack(codes.to(fmt.code_dtype), fmt, self.pack_method, _packed_axis(scheme))
        return _to_stored_axes(words, scheme).contiguous()

    def _unpack(self, words: torch.Tensor, shape: tuple[int, ...], scheme: Scheme) -> torch.Tensor:
        """Return codes of shape ``shape``: the inverse of ``_pack``."""
        fmt, axis = self._format(scheme), _packed_axis(scheme)
        words = _to_stored_axes(words, scheme).contiguous()
        return unpack(words, fmt, shape[axis], self.pack_method, axis)

    def _format(self, scheme: Scheme) -> Format:
        """Return the format of the codes, with the words that they are packed into."""
        return scheme.fmt


def _join_stages(first: dict[str, P], second: dict[str, P]) -> dict[str, P]:
    """Return the parts of a tensor in two stages, such as int4 over fp8.

    Codes ("") are those of the second stage. Its scale is stored as ``scale_2``.
    """
    return {**{part and f"{part}_2": value for part, value in second.items()}, **first}


def _scalar_zero_dtype(fmt: Format) -> torch.dtype:
    """Return the type of a zero point per tensor: a single code is not packed."""
    return torch.int32 if fmt.word_codes > 1 else fmt.code_dtype


def _is_transposed(scheme: Scheme) -> bool:
    """Whether codes, scales and zero points are stored transposed: integers per group."""
    return scheme.qscheme is QSchemeType.per_group and scheme.has_zero_point


def _packed_axis(scheme: Scheme) -> int:
    return 0 if _is_transposed(scheme) else -1


def _stored_shape(shape: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    return tuple(reversed(shape)) if _is_transposed(scheme) else shape


def _to_stored_axes(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Transpose a tensor to or from the order of axes in which it is stored."""
    return x.permute(*reversed(range(x.dim()))) if _is_transposed(scheme) and x.dim() > 1 else x


class ValueLayout(TensorLayout):
    """Fake-quantized weights as float values, with scales and zero points unpacked beside them.

    MX6 and MX9 store no scales: they are computed from the values.
    """

    stores_values: ClassVar[bool] = True

    def _has_scale(self, spec: QuantizationSpec) -> bool:
        return spec.fmt.scaled and not spec.fmt.sub_block

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of the scales and zero points."""
        stored: DeclaredParts = {}
        for stage, suffix in zip(spec.stages, ("", "_2"), strict=False):
            scheme = stage.scheme
            if stage.is_scale_quant:
                stored["scale_2"] = (), torch.float32
            elif self._has_scale(stage) and (is_stored or not spec.is_dynamic):
                grid = scheme.scale_shape(shape)
                stored[f"scale{suffix}"] = grid, scheme.scale.held_dtype
                if scheme.has_zero_point:
                    dtype = torch.float32 if scheme.float_zero_point else torch.int32
                    stored[f"zero_point{suffix}"] = grid, dtype
        return stored

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return values, scales and zero points unchanged."""
        parts = {"": value, **{name: getattr(state, name) for name in PARTS}}
        if not self._has_scale(state.spec):
            parts = {"": value}
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return the codes of the values, scales and zero points."""
        parts = [stored.get(name) for name in PARTS]
        if "" not in stored:
            return QuantizedTensor(spec, None, *parts)
        if spec.fixes_blocks and not self._has_scale(spec):
            parts[0], parts[1] = dynamic_qparams(stored[""], spec.scheme)
        return QuantizedTensor.from_values(spec, stored[""], *parts)

    def value(
        self,
        spec: QuantizationSpec,
        shape: tuple[int, ...],
        stored: StoredParts,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the stored values in ``dtype``."""
        return stored[""].to(dtype)
