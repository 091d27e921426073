"""Quantizers whose scale is trained with the model: step sizes (LSQ) and thresholds (TQT)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed
from torch import nn

from quark.torch.numerics.custom_operators import fake_quantize_learned
from quark.torch.numerics.scales import EPS, largest_scale, round_scale
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import PARTS, TensorQuantizer
from quark.torch.quantization.observer.tqt_observer import threshold_scale


class LearnedRangeQuantizer(TensorQuantizer):
    """A quantizer whose scale is a function of a parameter.

    The parameter starts from calibration, from the weight, or from the first tensor that passes in
    training mode. Until then it is NaN, and there is no scale. Zero points stay where they start.

    Args:
        spec: Specification of the tensor.
        shape: Shape of the scale.
        device: Device of the parameter.

    Attributes:
        learned_range: What is trained, float32, in the shape of the scale.
        has_range: Whether the parameter has a value.
    """

    def __init__(
        self, spec: QuantizationSpec, shape: tuple[int, ...], device: torch.device
    ) -> None:
        super().__init__(spec)
        self.learned_range = nn.Parameter(
            torch.full(shape, torch.nan, device=device, dtype=torch.float32)
        )
        self.has_range = False

    def _buffer_names(self) -> tuple[str, ...]:
        return PARTS[1:]

    @property
    def scale(self) -> torch.Tensor | None:
        """The present scale, without gradient; None before it has started."""
        if not self.has_range:
            return None
        how = self.observer.scheme
        scale = self._to_scale(self.learned_range.detach().float())
        return round_scale(scale, how.scale).clamp(max=largest_scale(how, self.observer.largest))

    @scale.setter
    def scale(self, value: torch.Tensor | None) -> None:
        with torch.no_grad():
            parameter = torch.nan if value is None else self._to_parameter(value.float())
            self.learned_range.copy_(torch.as_tensor(parameter))
        self.has_range = value is not None

    def _to_scale(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the scale of a value of the parameter."""
        raise NotImplementedError

    def _to_parameter(self, scale: torch.Tensor) -> torch.Tensor:
        """Return a value of the parameter for a scale."""
        raise NotImplementedError

    def _slope(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of the scale by the parameter, times a factor for its gradient."""
        raise NotImplementedError

    def follow(self, x: torch.Tensor) -> None:
        """Start the range from the first tensor that passes in training mode.

        Raises:
            RuntimeError: Several processes train: each would start from a tensor of its own.
        """
        if not self.is_following:
            return
        self._count_update()
        if self.has_range:
            return
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            raise RuntimeError(
                "A trained range has no start, and every process would start from its own data: "
                "pass a dataloader to ModelQuantizer.quantize_model, or run a batch in training "
                "mode before torch.distributed.init_process_group."
            )
        self.observer(x)
        self.compute_scales()
        self.observer.reset()

    def fake_quantized(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` fake-quantized under the present scale, with gradients of both.

        Raises:
            RuntimeError: The range has not started.
        """
        scale, zero_point = self.scale, self.zero_point
        if scale is None:
            raise RuntimeError(
                "A trained range has no value yet: call model.train() and run a batch, or pass a "
                "dataloader to ModelQuantizer.quantize_model."
            )
        slope = self._slope(x, scale) if torch.is_grad_enabled() else 0.0
        return fake_quantize_learned(x, self.learned_range, scale, zero_point, self.scheme, slope)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self.has_range = not self.learned_range.is_meta and not bool(
            self.learned_range.isnan().any()
        )


class StepSizeQuantizer(LearnedRangeQuantizer):
    """Trains the scale itself (LSQ, Esser et al. 2020).

    The gradient is multiplied by 1 / sqrt(n * largest code), with n the number of values of a
    weight, or of an activation of one sample, that share a scale.
    """

    def _to_scale(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.clamp(min=EPS)

    def _to_parameter(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def _slope(self, x: torch.Tensor, scale: torch.Tensor) -> float:
        fmt = self.scheme.fmt
        largest_code = fmt.max_value if fmt.is_float else (fmt.qmax - fmt.qmin) // 2
        samples = 1 if self.spec.is_parameter else max(1, x.shape[0] if x.dim() > 1 else 1)
        values = max(1.0, x.numel() / scale.numel() / samples)
        return 1 / math.sqrt(values * max(1.0, largest_code))


class ThresholdQuantizer(LearnedRangeQuantizer):
    """Trains the logarithm of a threshold; the scale is a power of two (TQT, Jain et al. 2020).

    The scale is 2**ceil(log2(threshold)) / 2**(bits - 1), with the gradient as if there were no
    ceil. A threshold starts in the middle of those that have its scale.
    """

    def _to_scale(self, parameter: torch.Tensor) -> torch.Tensor:
        return threshold_scale(parameter.ceil().clamp(-100, 127), self.scheme)

    def _to_parameter(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.log2().ceil() + (self.scheme.fmt.bits - 1) - 0.5

    def _slope(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scale.float() * math.log(2)


_KINDS: dict[str | None, type[LearnedRangeQuantizer]] = {
    "lsq": StepSizeQuantizer,
    "tqt": ThresholdQuantizer,
}


def make_quantizer(
    spec: QuantizationSpec, shape: tuple[int, ...], device: torch.device
) -> TensorQuantizer:
    """Return the quantizer of a tensor.

    Args:
        spec: Specification of the tensor.
        shape: Shape of the scale; used if the scale is trained.
        device: Device of the scale, likewise.
    """
    if spec.range_training is None:
        return TensorQuantizer(spec)
    return _KINDS[spec.range_training](spec, shape, device)
