"""MX6 as integers in groups: pairs of codes with half of the scale of their block.

A block of 16 codes of 5 bits shares a scale, and each two of them may have half of it (Rouhani et
al. 2023, "With Shared Microexponents, A Little Shifting Goes a Long Way", section 3). In units of
half the larger scale, a code of 5 bits is a whole number of 6 bits. Example, scale 4 of a block::

    pair (3, -1) at 4 -> (6, -2) units of 2        pair (3, -1) at 2 -> (3, -1) units of 2

Codes of MX9 would take 9 bits, which no panel holds.
"""

from __future__ import annotations

import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.quantization.nn.quantizer import QuantizedTensor

_PANEL_BITS = 8  # of codes that panels hold


def without_shifts(state: QuantizedTensor) -> QuantizedTensor:
    """Return the same values as integers of one bit more, in groups of whole blocks.

    Args:
        state: Codes (outputs, inputs) and scales. It is returned unchanged if codes have no shifts,
            would be too wide, or do not fill their blocks.
    """
    scales = _pair_scales(state)
    if scales is None or state.scheme.fmt.bits >= _PANEL_BITS:
        return state
    assert state.codes is not None
    fmt = state.scheme.fmt
    spec = QuantizationSpec(
        Dtype(f"int{fmt.bits + 1}"),
        qscheme=QSchemeType.per_group,
        ch_axis=-1,
        group_size=fmt.block,
        symmetric=True,
    )
    scale = scales.amax(-1, keepdim=True) / 2
    codes = state.codes << _shifts(scales, fmt.sub_block).to(state.codes.dtype)
    return QuantizedTensor(spec, codes, scale.squeeze(-1), None, order=state.order)


def with_shifts(codes: torch.Tensor, state: QuantizedTensor) -> torch.Tensor:
    """Return the codes of a format with shifts, given those of ``without_shifts``.

    Args:
        codes: Codes (outputs, inputs).
        state: The scales of the weight; its codes have the shape of ``codes``.
    """
    scales = _pair_scales(state)
    if scales is None or state.scheme.fmt.bits >= _PANEL_BITS:
        return codes
    return codes >> _shifts(scales, state.scheme.fmt.sub_block).to(codes.dtype)


def _pair_scales(state: QuantizedTensor) -> torch.Tensor | None:
    """Return the scales of the pairs of each block, (outputs, blocks, pairs); None without any."""
    fmt, codes, scale = state.scheme.fmt, state.codes, state.scale
    has_shifts = fmt.sub_block and not state.spec.quantizes_codes
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
