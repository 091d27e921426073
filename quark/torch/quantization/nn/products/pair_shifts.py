"""MX6 and MX9 as integers in groups: pairs of codes with half of the scale of their block.

A block of 16 codes of 5 or 8 bits shares a scale, and each two of them may have half of it
(Rouhani et al. 2023, "With Shared Microexponents, A Little Shifting Goes a Long Way", section 3).
In units of half the larger scale, a code is a whole number of one bit more. Example, scale 4 of a
block of codes of 5 bits::

    pair (3, -1) at 4 -> (6, -2) units of 2        pair (3, -1) at 2 -> (3, -1) units of 2
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quark.torch.numerics.formats import Format
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.quantizer import QuantizedTensor


class UnshiftedTensor(QuantizedTensor):
    """A tensor whose codes are integers of one bit more than those of its specification."""

    @property
    def scheme(self) -> Scheme:
        """Scheme of the integers: groups are the blocks of the format."""
        fmt, bits = self.spec.fmt, self.spec.fmt.bits + 1
        return replace(self.spec.scheme, fmt=Format(f"int{bits}", bits), group=fmt.block)


def without_shifts(state: QuantizedTensor) -> QuantizedTensor:
    """Return the same values as integers of one bit more, in groups of whole blocks.

    Args:
        state: Codes (outputs, inputs) and scales. It is returned unchanged if codes have no shifts
            or do not fill their blocks.
    """
    scales = _pair_scales(state)
    if scales is None:
        return state
    assert state.codes is not None
    fmt = state.scheme.fmt
    wide = state.codes if fmt.bits < 8 else state.codes.to(torch.int16)
    codes = wide << _shifts(scales, fmt.sub_block).to(wide.dtype)
    return UnshiftedTensor(state.spec, codes, scales.amax(-1) / 2, None, order=state.order)


def with_shifts(codes: torch.Tensor, state: QuantizedTensor) -> torch.Tensor:
    """Return the codes of a format with shifts, given those of ``without_shifts``.

    Args:
        codes: Codes (outputs, inputs).
        state: The scales of the weight; its codes have the shape of ``codes``.
    """
    scales = _pair_scales(state)
    if scales is None:
        return codes
    shifted = codes >> _shifts(scales, state.scheme.fmt.sub_block).to(codes.dtype)
    return shifted.to(state.scheme.fmt.code_dtype)


def _pair_scales(state: QuantizedTensor) -> torch.Tensor | None:
    """Return the scales of the pairs of each block, (outputs, blocks, pairs); None without any."""
    fmt, codes, scale = state.scheme.fmt, state.codes, state.scale
    is_in_rows = state.scheme.axis % 2 == 1
    has_shifts = fmt.sub_block and is_in_rows and not state.spec.quantizes_codes
    if not has_shifts or codes is None or codes.dim() != 2 or scale is None:
        return None
    outputs, inputs = codes.shape
    pairs = fmt.block // fmt.sub_block
    if inputs % fmt.block or scale.numel() != outputs * inputs // fmt.sub_block:
        return None
    return scale.float().reshape(outputs, -1, pairs)


def _shifts(scales: torch.Tensor, size: int) -> torch.Tensor:
    """Return for each code whether its pair has the larger scale of its block, (outputs, inputs).

    Args:
        scales: Scales of pairs, (outputs, blocks, pairs).
        size: Codes of a pair.
    """
    largest = scales == scales.amax(-1, keepdim=True)
    return largest.flatten(1).repeat_interleave(size, 1)
