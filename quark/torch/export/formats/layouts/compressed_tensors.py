"""The layout of compressed-tensors: integer codes in dense words, scales of full rank.

``weight_packed`` is packed along the inputs, ``weight_zero_point`` along the output channels: each
column of the grid of zero points is a row of codes, packed and then transposed back. Example of a
4-bit weight of 4096 outputs and 1024 inputs in groups of 128::

    weight_packed      int32 [4096, 128]   word [n, i] holds the inputs 8i … 8i + 7 of output n
    weight_scale             [4096, 8]
    weight_zero_point  int32 [512, 8]      word [j, g] holds the outputs 8j … 8j + 7 of group g
"""

from __future__ import annotations

from math import prod

import torch

from quark.torch.export.formats.layouts.dense_words import pack_words, to_unsigned, unpack_words
from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_codec import stored_dtype
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import DeclaredParts, StoredParts


class CompressedTensorsLayout(PackedLayout):
    """Integer weights in dense 32-bit words or in bytes, other tensors as in ``PackedLayout``.

    Scales are [1] per tensor, [N, 1] per channel, [H, 1, 1] per head, and the grid of blocks
    otherwise. Symmetric schemes store no zero points.

    Args:
        uses_words: Whether integer weights are packed in words (pack-quantized), or each code is
            an int8, whatever its width (int-quantized).
    """

    def __init__(self, uses_words: bool) -> None:
        super().__init__("order")
        self.uses_words = uses_words

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of each tensor stored for a tensor of shape ``shape``."""
        if is_stored and spec.scheme.has_zero_point:
            (outputs, inputs), bits = shape, spec.fmt.bits
            grid = _integer_grid(spec, shape)
            words: DeclaredParts = {"": ((outputs, -(-inputs * bits // 32)), torch.int32)}
            stored = words if self.uses_words else {"": (shape, torch.int8)}
            stored["scale"] = grid, stored_dtype(spec.scheme)
            if not spec.scheme.symmetric:
                stored["zero_point"] = (-(-outputs * bits // 32), grid[-1]), torch.int32
            return stored
        stored = super().declare(spec, shape, is_stored)
        if spec.scheme.symmetric:
            stored.pop("zero_point", None)
        scheme = spec.scheme
        return {
            part: (_full_rank(shape, scheme) if part else shape, dtype)
            for part, (shape, dtype) in stored.items()
        }

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return the stored tensors that ``declare`` describes; ``value`` is not used."""
        if state.codes is not None and state.scheme.has_zero_point:
            assert state.scale is not None
            grid = _integer_grid(state.spec, tuple(state.codes.shape))
            stored = _words(state) if self.uses_words else {"": state.codes.to(torch.int8)}
            stored["scale"] = state.scale.reshape(grid)
        else:
            stored = super().pack(state, value)
            scheme = state.scheme
            shapes = {p: _full_rank(t.shape, scheme) if p else t.shape for p, t in stored.items()}
            stored = {part: tensor.reshape(shapes[part]) for part, tensor in stored.items()}
        if state.scheme.symmetric:
            stored.pop("zero_point", None)
        return stored

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return codes of shape ``shape``, scales and zero points: the inverse of ``pack``."""
        grid = spec.scheme.scale_shape(shape) if shape else ()
        scale = stored.get("scale")
        zeros = stored.get("zero_point")
        if "" in stored and spec.scheme.has_zero_point:
            assert scale is not None
            codes, bits = stored[""], spec.fmt.bits
            if self.uses_words:
                codes = unpack_words(codes, bits, shape[1])
            if zeros is None:
                middle = 0 if spec.fmt.signed else 1 << (bits - 1)
                zeros = torch.full_like(scale, middle, dtype=torch.int32)
            else:
                zeros = unpack_words(zeros.T, bits, shape[0]).T
            return QuantizedTensor(spec, codes, scale.reshape(grid), zeros.reshape(grid))
        parts = dict(stored)  # in the shapes of PackedLayout
        if scale is not None:
            parts["scale"] = scale.reshape(grid)
            if spec.scheme.has_zero_point:
                zeros = torch.zeros_like(scale, dtype=torch.int8) if zeros is None else zeros
                parts["zero_point"] = zeros.reshape(grid)
        if "scale_2" in parts:
            parts["scale_2"] = parts["scale_2"].reshape(())
        return super().unpack(spec, shape, parts)


def _words(state: QuantizedTensor) -> StoredParts:
    """Return codes and zero points of an integer weight in words."""
    bits, state = state.scheme.fmt.bits, to_unsigned(state)
    assert state.codes is not None and state.zero_point is not None
    zeros = state.zero_point.reshape(len(state.codes), -1).T.contiguous()
    return {
        "": pack_words(state.codes, bits).contiguous(),
        "zero_point": pack_words(zeros, bits).T.contiguous(),
    }


def _integer_grid(spec: QuantizationSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stored shape of the scales of an integer weight."""
    grid = spec.scheme.scale_shape(shape)
    return (shape[0], prod(grid) // shape[0]) if grid else (1,)


def _full_rank(shape: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    """Return the stored shape of scales.

    [] becomes [1], [N] per channel [N, 1], and [H] per head [H, 1, 1]: of (heads, tokens, values).
    """
    if scheme.qscheme is QSchemeType.per_head:
        return (*shape, 1, 1)
    return {0: (1,), 1: (*shape, 1)}.get(len(shape), tuple(shape))
