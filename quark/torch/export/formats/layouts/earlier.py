"""The layouts of checkpoints of versions before 1.0, which AMD Quark 0.13 writes too.

They are the current ones but for a few schemes. Which of these schemes lost values when they were
written, and cannot be read, is in ``earlier_versions.py``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quark.torch.export.formats.layouts.packed import PackedLayout, ValueLayout
from quark.torch.numerics.custom_operators import (
    fake_quantize,
    fake_quantize_codes,
    fake_quantize_dynamic,
)
from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_codec import BIAS
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.nn.quantizer import PARTS, QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import DeclaredParts, StoredParts


class EarlierPackedLayout(PackedLayout):
    """Packed codes of versions before 1.0.

    Each code of int2 takes a 32-bit word. The exponents of ``dtype: mx`` are int8 without a bias:
    the scale 2^-4 is the byte 252, which is 123 elsewhere. Its 6-bit codes are split, see
    ``_join_planes``.
    """

    def _format(self, scheme: Scheme) -> Format:
        if scheme.fmt.name == "int2":
            return replace(scheme.fmt, word_codes=1, word_dtype="int32")
        return scheme.fmt

    def biased_exponents(self, spec: QuantizationSpec, stored: torch.Tensor) -> torch.Tensor:
        """Return stored scales, those that are exponents with the bias of 127."""
        if spec.dtype is not Dtype.mx:
            return stored
        return (stored.to(torch.int16) + BIAS).to(torch.uint8)  # modulo 256: 252 + 127 is 123

    def _unpack_stage(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        if spec.dtype is not Dtype.mx or spec.fmt.bits != 6 or "" not in stored:
            return super()._unpack_stage(spec, shape, stored)
        scales = {part: tensor for part, tensor in stored.items() if part}
        state = super()._unpack_stage(spec, shape, scales)
        return state._replace(codes=_join_planes(stored[""])[..., : shape[-1]])


def _join_planes(stored: torch.Tensor) -> torch.Tensor:
    """Return 6-bit codes that were split into their high two and their low four bits.

    Four codes take three bytes, the first code in the highest bits of each. Example, the codes
    0x12 0x3E 0x34 0x17: their high bits 1 3 3 1 are the byte 0b01111101, their low ones the bytes
    0x2E 0x47.

    Args:
        stored: (…, 3 n) uint8.

    Returns:
        (…, 4 n) uint8.
    """
    high, first, second = torch.unflatten(stored, -1, (-1, 3)).unbind(-1)
    low = torch.stack([first >> 4, first & 15, second >> 4, second & 15], -1)
    shifts = torch.tensor([6, 4, 2, 0], dtype=torch.uint8, device=stored.device)
    codes: torch.Tensor = (high.unsqueeze(-1) >> shifts & 3) << 4 | low
    return codes.flatten(-2)


class EarlierValueLayout(ValueLayout):
    """Values of versions before 1.0.

    There are no scales of formats with fixed blocks. In scales of groups, the axis of the groups is
    the last. Tensors of ``dtype: mx`` and of two stages may be stored before they were quantized,
    so they are quantized again: that changes nothing in those that were.
    """

    def _has_scale(self, spec: QuantizationSpec) -> bool:
        return spec.fmt.scaled and not spec.fixes_blocks

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of the scales and zero points."""
        declared = super().declare(spec, shape, is_stored)
        for part, (grid, dtype) in declared.items():
            stage = spec.stages[-1] if part.endswith("_2") else spec.stages[0]
            declared[part] = _axis_last(torch.empty(grid, device="meta"), stage).shape, dtype
        return declared

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return the codes of the values, scales and zero points."""
        stored = dict(stored)
        for part in stored.keys() - {""}:
            stage = spec.stages[-1] if part.endswith("_2") else spec.stages[0]
            stored[part] = _axis_last(stored[part], stage, back=True)
        if "" in stored:
            stored[""] = _quantized_again(spec, stored)
        return super().unpack(spec, shape, stored)

    def value(
        self,
        spec: QuantizationSpec,
        shape: tuple[int, ...],
        stored: StoredParts,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the quantized values in ``dtype``."""
        return _quantized_again(spec, stored).to(dtype)


def _axis_last(scale: torch.Tensor, spec: QuantizationSpec, back: bool = False) -> torch.Tensor:
    """Move the axis of the groups of scales to the end, or back."""
    scheme = spec.scheme
    if scheme.qscheme is not QSchemeType.per_group or scale.dim() < 2:
        return scale
    return scale.movedim(-1, scheme.axis) if back else scale.movedim(scheme.axis, -1)


def _quantized_again(spec: QuantizationSpec, stored: StoredParts) -> torch.Tensor:
    values = stored[""]
    if spec.dtype is Dtype.mx:
        return fake_quantize_dynamic(values, spec.scheme)
    if spec.second_stage is not None and spec.second_stage.is_scale_quant:
        scale = _axis_last(stored["scale"], spec.stages[0], back=True)
        return fake_quantize(values, scale, None, spec.scheme)
    if spec.quantizes_codes:
        first, second = (stage.scheme for stage in spec.for_parameter().stages)
        scales = (stored.get(part) for part in PARTS)
        return fake_quantize_codes(values, first, second, *scales)
    return values
