"""What must be true of a checkpoint before it takes its place.

Tensors are looked at on their way to the disk, so that nothing is read twice; the files are looked
at once they are written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import assign
from quark.torch.quantization.nn.experts import LinearExperts
from quark.torch.quantization.nn.operators import is_operator
from quark.torch.quantization.nn.quantizer import State

FEW = 0.1  # of the median of a layer: experts with fewer tokens are told

logger = logging.getLogger(__name__)


def check_state(state: State, what: str) -> None:
    """Raise if a quantized tensor has numbers that no reader can make sense of.

    Args:
        state: The tensor in full.
        what: Its name for messages, such as ``weight``.

    Raises:
        ValueError: A scale is NaN, infinite or negative, or 0 where codes are not; a zero point is
            no code; a code is NaN.
    """
    codes, scale, offset = state.codes, state.scale, state.zero_point
    for name, found in (("scale", scale), ("scale_2", state.scale_2)):
        if found is None:
            continue
        numbers = found.float()
        if not numbers.isfinite().all():
            raise ValueError(f"the {name} of its {what} is NaN or infinite{_hint(numbers)}.")
        if (numbers < 0).any():
            raise ValueError(f"the {name} of its {what} is negative{_hint(numbers)}.")
        if codes is None and (numbers == 0).any():
            raise ValueError(
                f"the {name} of its {what} is 0, which everything is divided by: calibrate with "
                "data that reaches it, or exclude the layer."
            )
    if offset is not None and not state.spec.quantizes_codes:
        _check_offset(state, offset, what)
    if codes is not None and codes.is_floating_point() and codes.float().isnan().any():
        raise ValueError(f"its {what} has NaN among its codes.")
    lost = codes is not None and scale is not None and bool((scale == 0).any())
    if lost and not state.spec.quantizes_codes:
        assert scale is not None and codes is not None
        where = dequantize(codes, (scale == 0).float(), offset, state.scheme)
        if where.any():
            raise ValueError(
                f"{int((where != 0).sum())} codes of its {what} have the scale 0 and lose their "
                "value: give scale_type float32, or check the layer for vanishing values."
            )


def _check_offset(state: State, offset: torch.Tensor, what: str) -> None:
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


def check_rest(model: nn.Module, config: Config, quantized: Mapping[str, Any]) -> None:
    """Raise if what stays in float is broken, or should not have stayed there.

    Args:
        model: The model that will be written.
        config: How it is quantized.
        quantized: Its quantized layers by name.

    Raises:
        ValueError: A parameter is NaN or infinite, or a layer is in float although the
            configuration names it.
    """
    kinds = {n: type(m) for n, m in model.named_modules() if is_operator(type(m))}
    left = {n: c for n, c in assign(kinds, config).items() if n not in quantized}
    if left:
        raise ValueError(
            f"{next(iter(left))} and {len(left) - 1} more layers are in float, but the "
            "configuration quantizes them: quantize the model again, or exclude them."
        )
    for name, value in model.named_parameters():
        inside = {name.rsplit(".", 1)[0], name.rsplit(".", 2)[0]} & set(quantized)
        if not inside and value.is_floating_point() and not value.isfinite().all():
            raise ValueError(
                f"{name} is NaN or infinite in {int((~value.isfinite()).sum())} of "
                f"{value.numel()} places: the model is broken before it is written."
            )


def check_written(tensors: Mapping[str, torch.Tensor], reader: Any) -> None:
    """Raise if files hold something other than what was given to be written.

    Args:
        tensors: What was given.
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


class ExpertTokens(NamedTuple):
    """How many tokens calibration sent to the experts of a model.

    Attributes:
        experts: Number of experts.
        least: Tokens of the expert with the fewest.
        median: Median over all experts.
        unseen: Names of those that saw none.
        scarce: Names of those that saw less than a tenth of the median of their layer.
    """

    experts: int
    least: int
    median: float
    unseen: list[str]
    scarce: list[str]

    def __str__(self) -> str:
        text = f"{self.least} at least, median {self.median:g}"
        return text + (f", none for {len(self.unseen)} of {self.experts}" * bool(self.unseen))


def expert_tokens(model: nn.Module) -> ExpertTokens | None:
    """Return how many tokens calibration sent to experts; None without experts or data."""
    layers = {n: m.tokens for n, m in model.named_modules() if isinstance(m, LinearExperts)}
    seen = {
        f"{name}.{index}": (count, FEW * median(tokens))
        for name, tokens in layers.items()
        if tokens
        for index, count in enumerate(tokens)
    }
    if not seen:
        return None
    counts = [count for count, _ in seen.values()]
    return ExpertTokens(
        len(seen),
        min(counts),
        median(counts),
        [name for name, (count, _) in seen.items() if not count],
        [name for name, (count, few) in seen.items() if 0 < count < few],
    )


def report_experts(model: nn.Module) -> None:
    """Warn of experts that calibration sent no tokens to, or few."""
    found = expert_tokens(model)
    if found is None:
        return
    for names, what in (
        (found.unseen, "no token at all"),
        (found.scarce, "less than a tenth of the tokens that others beside them got"),
    ):
        if names:
            logger.warning(
                "%d of %d experts got %s in calibration: %s%s. Calibrate with more data.",
                len(names),
                found.experts,
                what,
                ", ".join(names[:5]),
                " …" * (len(names) > 5),
            )
