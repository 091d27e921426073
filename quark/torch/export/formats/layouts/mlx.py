"""The layout of MLX: unsigned codes in dense words of inputs, a scale and a bias for each group.

Example of a 4-bit weight of 4096 outputs and 1024 inputs in groups of 64::

    weight   uint32 [4096, 128]   word [n, i] holds the inputs 8i … 8i + 7, the first lowest
    scales          [4096, 16]
    biases          [4096, 16]    value = scale * code + bias

A bias is minus the scale times the zero point. MLX writes scales of both signs. Under a negative
scale the codes are mirrored: the values stay, and the scale becomes positive.
Example: -0.5 * (code - 3) is 0.5 * (15 - code - 12).
"""

from __future__ import annotations

import torch

from quark.torch.export.formats.layouts.dense_words import pack_words, to_unsigned, unpack_words
from quark.torch.numerics.scale_codec import stored_dtype
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import DeclaredParts, StoredParts, TensorLayout


class MlxLayout(TensorLayout):
    """Codes, scales and biases of an integer weight as MLX lays them out."""

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of codes, scales and biases."""
        outputs, inputs = shape
        grid, dtype = spec.scheme.scale_shape(shape), stored_dtype(spec.scheme)
        return {
            "": ((outputs, inputs * spec.fmt.bits // 32), torch.uint32),
            "scale": (grid, dtype),
            "zero_point": (grid, dtype),
        }

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return the stored codes, scales and biases."""
        state = state if state.scheme.float_zero_point else to_unsigned(state)
        state = _with_positive_scales(state)
        assert state.codes is not None and state.scale is not None and state.zero_point is not None
        scale = state.scale.reshape(len(state.codes), -1)
        zeros = state.zero_point.reshape(scale.shape)
        return {
            "": pack_words(state.codes, state.scheme.fmt.bits).view(torch.uint32),
            "scale": scale.contiguous(),
            "zero_point": _biases(scale, zeros),
        }

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return codes, scales and zero points: the inverse of ``pack``."""
        codes = unpack_words(stored[""].view(torch.int32), spec.fmt.bits, shape[1])
        scale, biases = stored["scale"], stored["zero_point"]
        if not spec.scheme.float_zero_point:
            zeros = integer_zero_points(scale, biases, spec.scheme)
            if zeros is None:
                raise ValueError("The biases of a weight are not those of its zero points.")
            return _with_positive_scales(QuantizedTensor(spec, codes, scale, zeros))
        # A group with scale 0 has one value, its bias: code 0, scale 1, zero point -bias.
        is_constant = scale == 0
        group = shape[1] // scale.shape[1]
        codes = torch.where(is_constant.repeat_interleave(group, 1), 0, codes)
        scale = torch.where(is_constant, 1, scale)
        zeros = -biases.float() / scale.float()
        return _with_positive_scales(QuantizedTensor(spec, codes, scale, zeros))


def _with_positive_scales(state: QuantizedTensor) -> QuantizedTensor:
    """Return the same values with mirrored codes and zero points where a scale is negative."""
    codes, scale, zeros = state.codes, state.scale, state.zero_point
    assert codes is not None and scale is not None and zeros is not None
    is_negative, top = scale < 0, state.scheme.fmt.qmax
    spread = is_negative.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return state._replace(
        codes=torch.where(spread, top - codes, codes),
        scale=scale.abs(),
        zero_point=torch.where(is_negative, top - zeros, zeros),
    )


def integer_zero_points(
    scale: torch.Tensor, biases: torch.Tensor, scheme: Scheme
) -> torch.Tensor | None:
    """Return the codes that reproduce all biases exactly, None if a group has none.

    Example: scale 0.5 and bias -4 give the zero point 8; bias -4.1 gives None.

    Args:
        scale: (N, groups).
        biases: (N, groups), in the type of the scales.
        scheme: Scheme of the weight.

    Returns:
        (N, groups) uint8.
    """
    zeros = (-biases.float() / scale.float()).round()
    is_code = (zeros >= 0) & (zeros <= scheme.fmt.qmax) & (scale != 0)
    if not is_code.all() or not _biases(scale, zeros).equal(biases):
        return None
    return zeros.to(torch.uint8)


def _biases(scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return minus scale times zero point, rounded to the type of the scales."""
    return (0 - scale.float() * zeros.float()).to(scale.dtype)
