"""How compressed-tensors lays tensors out: scales of full rank, integers in dense words."""

from __future__ import annotations

from math import prod

import torch

from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.export.formats.third_party import from_words, to_words, unsigned
from quark.torch.numerics.scale_codec import stored_dtype
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.packed import Declared, Stored
from quark.torch.quantization.nn.quantizer import State


class CompressedLayout(PackedLayout):
    """Integer weights as rows of bits in 32-bit words, all else as it is.

    Scales are [1] per tensor, [N, 1] per channel, else the grid of the blocks. Symmetric schemes
    store no zero points.

    Args:
        packs_bytes: Whether 8-bit integer weights are packed as well.
    """

    def __init__(self, packs_bytes: bool) -> None:
        super().__init__("order")
        self.packs_bytes = packs_bytes

    def packs(self, spec: QuantizationSpec) -> bool:
        """Whether a weight of this specification is packed in 32-bit words."""
        return spec.scheme.has_zero_point and (self.packs_bytes or spec.fmt.bits != 8)

    def declare(self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool) -> Declared:
        """Return shape and type of each tensor stored for a tensor of shape ``shape``."""
        if is_stored and self.packs(spec):
            (outputs, inputs), bits = shape, spec.fmt.bits
            groups = prod(spec.scheme.scale_shape(shape)) // outputs
            stored: Declared = {
                "": ((outputs, -(-inputs * bits // 32)), torch.int32),
                "scale": ((outputs, groups), stored_dtype(spec.scheme)),
            }
            if not spec.scheme.symmetric:
                stored["zero_point"] = (-(-outputs * bits // 32), groups), torch.int32
            return stored
        stored = super().declare(spec, shape, is_stored)
        if spec.scheme.symmetric:
            stored.pop("zero_point", None)
        return {part: (_full(at) if part else at, kind) for part, (at, kind) in stored.items()}

    def pack(self, state: State, value: torch.Tensor | None) -> Stored:
        """Return the tensors that ``declare`` describes; ``value`` is not used."""
        if state.codes is not None and self.packs(state.spec):
            bits, state = state.scheme.fmt.bits, unsigned(state)
            assert state.codes is not None and state.scale is not None
            assert state.zero_point is not None
            outputs = len(state.codes)
            zeros = to_words(state.zero_point.reshape(outputs, -1).T.contiguous(), bits)
            stored = {
                "": to_words(state.codes, bits).contiguous(),
                "scale": state.scale.reshape(outputs, -1),
                "zero_point": zeros.T.contiguous(),
            }
        else:
            stored = super().pack(state, value)
            stored = {p: t.reshape(_full(t.shape)) if p else t for p, t in stored.items()}
        if state.scheme.symmetric:
            stored.pop("zero_point", None)
        return stored

    def unpack(self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored) -> State:
        """Return codes of shape ``shape``, scales and zero points: the inverse of ``pack``."""
        grid = spec.scheme.scale_shape(shape) if shape else ()
        scale = stored.get("scale")
        zeros = stored.get("zero_point")
        if "" in stored and self.packs(spec):
            assert scale is not None
            bits = spec.fmt.bits
            codes = from_words(stored[""], bits, shape[1])
            if zeros is None:
                zeros = torch.full_like(scale, 1 << (bits - 1), dtype=torch.int32)
            else:
                zeros = from_words(zeros.T, bits, shape[0]).T
            return State(spec, codes, scale.reshape(grid), zeros.reshape(grid))
        natural = dict(stored)
        if scale is not None:
            natural["scale"] = scale.reshape(grid)
            if spec.scheme.has_zero_point:
                zeros = torch.zeros_like(scale, dtype=torch.int8) if zeros is None else zeros
                natural["zero_point"] = zeros.reshape(grid)
        if "scale_2" in natural:
            natural["scale_2"] = natural["scale_2"].reshape(())
        return super().unpack(spec, shape, natural)


def _full(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of scales with as many axes as compressed-tensors gives them."""
    return {0: (1,), 1: (*shape, 1)}.get(len(shape), tuple(shape))
