"""Checks of a checkpoint before it is kept: of tensors before they are written, then of the files.

Tensors are checked in memory, so that nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quark.torch.numerics.finite import is_finite
from quark.torch.numerics.formats import Format
from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import assign
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.operators import is_operator_module
from quark.torch.quantization.nn.quantizer import QuantizedTensor


def check_state(state: QuantizedTensor, what: str) -> None:
    """Check that the scales, zero points and codes of a quantized tensor are usable.

    Args:
        state: The quantized tensor.
        what: Its name for messages, such as ``weight``.

    Raises:
        ValueError: A scale is NaN or infinite, or negative where none may be, or 0 where codes are
            not; a zero point is no code; a code is NaN or infinite, or outside of its format.
    """
    codes, scale, offset = state.codes, state.scale, state.zero_point
    for name, found in (("scale", scale), ("scale_2", state.scale_2)):
        if found is None:
            continue
        numbers = found.float()
        if not numbers.numel():
            continue
        least, most = numbers.aminmax()  # NaN is both
        if not bool(least.isfinite() & most.isfinite()):
            raise ValueError(f"the {name} of its {what} is NaN or infinite{_hint(numbers)}.")
        may_be_negative = what in PARAMETERS and state.spec.fmt.takes_signed_scales
        if least < 0 and not may_be_negative:
            raise ValueError(
                f"the {name} of its {what} is negative{_hint(numbers)}. Only weights in integers "
                "and tables have such scales: quantize the values again."
            )
        if codes is None and least == 0:
            raise ValueError(
                f"the {name} of its {what} is 0, which everything is divided by: calibrate with "
                "data that reaches it, or exclude the layer."
            )
    if offset is not None and not state.spec.quantizes_codes:
        _check_offset(state, offset, what)
    if codes is not None and not is_finite(codes):
        raise ValueError(f"its {what} has NaN or infinity among its codes.")
    if codes is not None:
        _check_codes(codes, state.spec.coded.fmt, what)
    lost = codes is not None and scale is not None and bool((scale == 0).any())
    if lost and not state.spec.quantizes_codes:
        assert scale is not None and codes is not None
        where = dequantize(codes, (scale == 0).float(), offset, state.scheme)
        if where.any():
            raise ValueError(
                f"{int((where != 0).sum())} codes of its {what} have the scale 0 and lose their "
                "value: give scale_type float32, or check the layer for vanishing values."
            )


def _check_codes(codes: torch.Tensor, fmt: Format, what: str) -> None:
    """Check integer codes that a file stored in a wider type than they need."""
    if fmt.is_float or fmt.bits == 8 * codes.dtype.itemsize or not codes.numel():
        return
    least, most = map(int, codes.aminmax())
    if not (fmt.qmin <= least and most <= fmt.qmax):
        raise ValueError(
            f"codes of its {what} reach from {least} to {most}, those of {fmt.name} only from "
            f"{fmt.qmin} to {fmt.qmax}: the checkpoint is damaged."
        )


def _check_offset(state: QuantizedTensor, offset: torch.Tensor, what: str) -> None:
    if state.scheme.float_zero_point:
        if not offset.isfinite().all():
            raise ValueError(f"a zero point of its {what} is NaN or infinite.")
        return
    least, most = state.scheme.fmt.qmin, state.scheme.fmt.qmax
    if offset.numel() and not (least <= int(offset.min()) and int(offset.max()) <= most):
        raise ValueError(
            f"zero points of its {what} reach from {int(offset.min())} to {int(offset.max())}, "
            f"codes only from {least} to {most}."
        )


def _hint(numbers: torch.Tensor) -> str:
    bad = ~numbers.isfinite() | (numbers < 0)
    return f" in {int(bad.sum())} of {numbers.numel()} places"


def check_configured(model: nn.Module, config: Config, quantized: Mapping[str, Any]) -> None:
    """Check that every configured layer is quantized.

    Args:
        model: The model that will be written.
        config: Its configuration.
        quantized: Its quantized layers by name.

    Raises:
        ValueError: A layer is in float although the configuration names it.
    """
    kinds = {n: type(m) for n, m in model.named_modules() if is_operator_module(m)}
    left = {n: c for n, c in assign(kinds, config).items() if n not in quantized}
    if left:
        raise ValueError(
            f"{next(iter(left))} and {len(left) - 1} more layers are in float, but the "
            "configuration quantizes them: quantize the model again, or exclude them."
        )


def check_float(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that tensors that are written in float are finite.

    Args:
        tensors: Tensors by name.

    Raises:
        ValueError: A value is NaN or infinite.
    """
    for name, value in tensors.items():
        if value.is_floating_point() and not is_finite(value):
            raise ValueError(
                f"{name} is NaN or infinite in {int((~value.isfinite()).sum())} of "
                f"{value.numel()} places: the model is broken before it is written."
            )


def check_written(tensors: Mapping[str, torch.Tensor], reader: Any) -> None:
    """Check that files hold the tensors that were written, by name, shape and type.

    Args:
        tensors: The tensors that were written.
        reader: The files, opened again.

    Raises:
        OSError: A tensor is missing, or has another shape or type.
    """
    for name, tensor in tensors.items():
        entry = reader.entries.get(name)
        if entry is None or (entry.shape, entry.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise OSError(
                f"{name} is not in the files as it was written: check the disk, and export again."
            )
