"""The layout of torchao: a byte for each code, with scales in the shape of a grid of blocks.

Example of an int4 weight of 4096 outputs and 1024 inputs in groups of 128::

    _weight_qdata       int8 [4096, 1024]   codes -8 … 7, one in each byte
    _weight_scale            [4096, 8]
    _weight_zero_point  int8 [4096, 8]      value = scale * (code - zero point)

Codes in fp8 have no zero point. One scale per output is [4096, 1], one per tensor [1, 1].
"""

from __future__ import annotations

import torch

from quark.torch.export.formats.layouts.dense_words import to_unsigned
from quark.torch.numerics.custom_operators import unpack
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack
from quark.torch.numerics.scale_codec import stored_dtype
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import DeclaredParts, StoredParts, TensorLayout


class TorchaoLayout(TensorLayout):
    """Codes, scales and zero points of a weight as torchao lays them out."""

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of codes, scales and zero points; inputs store nothing."""
        if not is_stored:
            return {}
        grid = _grid(spec.scheme, shape)
        dtype = spec.fmt.storage_dtype if spec.fmt.is_float else torch.int8
        parts: DeclaredParts = {"": (shape, dtype), "scale": (grid, stored_dtype(spec.scheme))}
        return parts if spec.fmt.is_float else {**parts, "zero_point": (grid, torch.int8)}

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return codes as signed integers or fp8, scales and zero points; nothing for inputs."""
        if state.codes is None or state.scale is None:
            return {}
        grid = _grid(state.scheme, tuple(state.codes.shape))
        scale = state.scale.reshape(grid).contiguous()
        fmt = state.spec.fmt
        if fmt.is_float:
            return {"": pack(state.codes.to(fmt.code_dtype), fmt), "scale": scale}
        unsigned, middle = to_unsigned(state), 1 << (fmt.bits - 1)
        assert unsigned.codes is not None and unsigned.zero_point is not None
        return {
            "": _lowered(unsigned.codes, middle),
            "scale": scale,
            "zero_point": _lowered(unsigned.zero_point, middle).reshape(grid),
        }

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return codes, scales and zero points: the inverse of ``pack``."""
        if not stored:  # dynamic inputs
            return QuantizedTensor(spec, None, None, None)
        fmt, grid = spec.fmt, spec.scheme.scale_shape(shape)
        scale = stored["scale"].reshape(grid)
        if fmt.is_float:
            codes = unpack(stored[""], fmt, shape[-1], "order", -1)
            return QuantizedTensor(spec, codes, scale, None)
        return QuantizedTensor(spec, stored[""], scale, stored["zero_point"].reshape(grid))


def _grid(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of blocks along outputs and inputs."""
    rows = shape[0]
    if scheme.qscheme is QSchemeType.per_tensor:
        return 1, 1
    if scheme.qscheme is QSchemeType.per_channel:
        return rows, 1
    return rows, scheme.scale_shape(shape)[-1]


def _lowered(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """Return unsigned codes as signed ones: 0 … 15 become -8 … 7."""
    return (codes.to(torch.int16) - middle).to(torch.int8)
