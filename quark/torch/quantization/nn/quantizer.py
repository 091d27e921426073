"""The quantizer of one tensor of a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from quark.torch.numerics.code_recovery import recovers_codes
from quark.torch.numerics.column_rounder import ColumnRounder, ColumnRounding
from quark.torch.numerics.custom_operators import (
    dequantize,
    fake_quantize,
    fake_quantize_codes,
    fake_quantize_dynamic,
    with_text,
)
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import (
    dynamic_qparams,
    fake_quantize_,
    quantize,
    recover_codes,
)
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.stages import LastStage, TwoRoundings, first_codes, per_value
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.following_range import FollowingRange, is_recomputing
from quark.torch.quantization.nn.padding import without_padding
from quark.torch.quantization.observer.observer import MinMaxObserver

PARTS = ("scale", "zero_point", "scale_2", "zero_point_2")


class QuantizedTensor(NamedTuple):
    """Codes, scales and zero points of a quantized tensor, unpacked.

    Attributes:
        spec: Specification of the tensor.
        codes: Codes, None for activations.
        scale: Scale that codes are multiplied by; in two stages, scale of the first.
        zero_point: Zero point of the codes.
        scale_2: Tensor scale of two-level scales, or scale of the second of two stages.
        zero_point_2: Zero point of the second stage.
        order: Input of each column of the codes, if columns are in the order of groups; else None.
    """

    spec: QuantizationSpec
    codes: torch.Tensor | None
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    scale_2: torch.Tensor | None = None
    zero_point_2: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def scheme(self) -> Scheme:
        """Quantization scheme of the codes, or of the first stage."""
        return self.spec.scheme

    @classmethod
    def from_values(
        cls,
        spec: QuantizationSpec,
        values: torch.Tensor,
        scale: torch.Tensor | None,
        zero_point: torch.Tensor | None,
        scale_2: torch.Tensor | None = None,
        zero_point_2: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Return a tensor whose values are quantized already, with the codes of these values."""
        if spec.quantizes_codes:
            assert scale is not None
            second = spec.stages[1].for_parameter().scheme
            first = values.float() / per_value(scale, spec.scheme, values.shape)
            codes = recover_codes(first, scale_2, zero_point_2, second)
        else:
            codes = recover_codes(values, scale, zero_point, spec.scheme)
        return cls(spec, codes, scale, zero_point, scale_2, zero_point_2)

    @property
    def last_stage(self) -> QuantizedTensor:
        """The second stage alone, whose values are codes of the first; itself if it has one."""
        if not self.spec.quantizes_codes:
            return self
        second = self.spec.stages[1].for_parameter()
        scales = self.scale_2, self.zero_point_2
        return QuantizedTensor(second, self.codes, *scales, order=self.order)

    @property
    def transposed(self) -> QuantizedTensor:
        """A matrix with its axes exchanged; scales and zero points have a shape of two axes."""
        assert self.codes is not None
        grid = self.scheme.blocks(self.codes.shape).grid

        def exchange(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.reshape(grid).T.contiguous()

        scales = exchange(self.scale), exchange(self.zero_point)
        spec = self.spec.for_parameter(is_transposed=True)
        return QuantizedTensor(spec, self.codes.T.contiguous(), *scales, self.scale_2)

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized values in ``dtype``, in the order of the inputs."""
        assert self.codes is not None
        if not self.spec.quantizes_codes:
            values = dequantize(self.codes, self.scale, self.zero_point, self.scheme, dtype)
            if self.order is None:
                return values
            return torch.empty_like(values).index_copy_(1, self.order, values)
        second = self.spec.stages[1].for_parameter().scheme
        values = dequantize(self.codes, self.scale_2, self.zero_point_2, second)
        assert self.scale is not None
        return values.mul_(per_value(self.scale, self.scheme, values.shape)).to(dtype)


class TensorQuantizer(FollowingRange):
    """Fake-quantizes a tensor by its specification.

    While ``is_observing`` is set, the quantizer records statistics and returns tensors unchanged.
    Afterwards it uses ``scale`` and ``zero_point``; a dynamic specification computes them for each
    tensor. In training mode they follow the tensor; see ``FollowingRange``.

    Attributes:
        spec: Specification of the tensor.
        is_observing: Whether tensors are observed instead of quantized.
        enabled: Whether the quantizer does anything.
        scale: Scale, [] per tensor, [channels] per channel, a grid per group; or None.
        zero_point: Zero point in the same shape, or None.
        scale_2: Tensor scale [] of two-level scales, or scale of a second stage over the codes.
        zero_point_2: Zero point of a second stage.
    """

    def __init__(self, spec: QuantizationSpec) -> None:
        # Dynamic two-level scales: only the range of the whole tensor is calibrated.
        observed = _per_tensor(spec) if spec.is_dynamic and spec.needs_data else spec
        super().__init__(spec, observed.make_observer())
        self.scheme = with_text(spec.scheme)
        self._second_scheme = with_text(self._second().scheme) if spec.quantizes_codes else None
        self.is_observing = False
        self.enabled = True
        for name in self._buffer_names():
            self.register_buffer(name, None)

    def _buffer_names(self) -> tuple[str, ...]:
        return PARTS

    def compute_scales(self, x: torch.Tensor | None = None, is_finite: bool = False) -> None:
        """Compute the scales from the observed statistics and stop observing.

        Args:
            x: The tensor itself if it is constant (a weight or bias): a second stage needs it.
            is_finite: Whether the tensor is known to be finite. Then the statistics are not
                checked, and the CPU does not wait for the device.

        Raises:
            RuntimeError: Nothing was observed.
            FloatingPointError: NaN or infinity was observed.
        """
        self.is_observing = False
        if not self.needs_data:
            return
        if self.scheme.scale.two_level and isinstance(self.observer, MinMaxObserver):
            self.scale_2 = self.observer.tensor_scale(self.scheme)
        if self.is_dynamic:
            return
        if is_finite and isinstance(self.observer, MinMaxObserver):
            self.scale, self.zero_point = self.observer.qparams()
        else:
            self.scale, self.zero_point = self.observer.calculate_qparams()
        if self.spec.quantizes_codes and x is not None:
            # The second stage may exceed the codes of the first by a third: -2 / 1.5 in int2.
            largest = self.observer.largest / (
                1.5 * (self.scheme.fmt.max_value or self.scheme.fmt.qmax)
            )
            self.scale = self.scale.clamp(max=largest)  # type: ignore[union-attr]
            second = self._second()
            observer = second.make_observer()
            observer(self._values(x))
            self.scale_2, self.zero_point_2 = observer.calculate_qparams()

    def set_tensor_scale(self, scale_2: torch.Tensor, x: torch.Tensor | None = None) -> None:
        """Set the tensor scale of two-level scales, and compute the block scales again.

        Args:
            scale_2: Tensor scale [].
            x: The tensor itself if it is constant; None leaves the block scales unchanged.
        """
        assert isinstance(self.observer, MinMaxObserver)
        self.scale_2 = scale_2
        if not self.is_dynamic and x is not None:
            self.observer(x)
            self.scale, self.zero_point = self.observer.qparams(scale_2)
            self.observer.reset()

    def compute_block_scales(self, x: torch.Tensor) -> None:
        """Compute the scales of another tensor, such as a clipped weight.

        Args:
            x: A finite tensor of the same shape. The tensor scale of two-level scales does not
                change.
        """
        if self.scheme.scale.two_level and self.scale_2 is not None:
            self.set_tensor_scale(self.scale_2, x)
        else:
            self.observer(x)
            self.compute_scales(x, is_finite=True)
            self.observer.reset()

    def qparams(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scale and zero point that apply to ``x``.

        Raises:
            RuntimeError: The specification is static and no scale has been computed.
        """
        if not self.scheme.fmt.scaled:
            return None, None
        self._check_calibrated(x)
        if self.is_dynamic:
            return dynamic_qparams(x, self.scheme, self.scale_2)
        return self.scale, self.zero_point

    def _check_calibrated(self, x: torch.Tensor) -> None:
        calibrated = self.scale_2 if self.is_dynamic else self.scale
        if calibrated is None and self.needs_data and x.numel():
            raise RuntimeError(
                "A static quantizer has no scale yet: run ModelQuantizer.quantize_model with a "
                "dataloader first."
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Observe or fake-quantize ``x``."""
        if not self.enabled:
            return x
        if self.is_observing:
            if x.numel():
                self.observer(without_padding(x) if self._has_scales_by_channel(x) else x)
            return x
        has_own_range = not (self.is_fixed or self.is_derived)
        if has_own_range and (self.is_following or self.has_updates) and not is_recomputing():
            self.follow(x.detach())
        return self.fake_quantized(x)

    def fake_quantized(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` fake-quantized under the present scales, with its gradient."""
        if self.spec.quantizes_codes:
            return x + (self._through_codes(x) - x).detach()  # straight-through gradient
        if self.is_dynamic:
            self._check_calibrated(x)
            return fake_quantize_dynamic(x, self.scheme, self.scale_2)
        return fake_quantize(x, *self.qparams(x), self.scheme)

    def _has_scales_by_channel(self, x: torch.Tensor) -> bool:
        """Whether scales do not belong to single tokens, so that tokens may be left out."""
        is_per_channel = self.scheme.qscheme is QSchemeType.per_channel
        return not is_per_channel or self.scheme.axis % x.dim() == x.dim() - 1

    def fake_quantize_copy(
        self, x: torch.Tensor, ranges: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a fake-quantized copy of ``x``, under scales computed from ``ranges``.

        The scales of the quantizer do not change. Values that are not finite give others of that
        kind.

        Args:
            x: The values.
            ranges: Values in the shape of ``x``; None for ``x`` itself.
        """
        return self.fake_quantize_(x.clone(), x if ranges is None else ranges)

    def fake_quantize_(
        self, x: torch.Tensor, ranges: torch.Tensor, tensor_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Replace the values of ``x`` as ``fake_quantize_copy`` does, in place, and return it.

        Args:
            x: The values.
            ranges: Values in the shape of ``x``; may be ``x`` itself.
            tensor_scale: Tensor scale [] of two-level scales; None for that of ``ranges``.
        """
        other = TensorQuantizer(self.spec)
        other.scale_2 = tensor_scale
        other.compute_block_scales(ranges)
        return other.freeze_(x)

    def column_rounder(
        self, shape: tuple[int, ...], to_matrix: Callable[[torch.Tensor], torch.Tensor]
    ) -> ColumnRounding:
        """Return the rounding of the columns of a weight, under the scales of the quantizer.

        Args:
            shape: Shape of the weight.
            to_matrix: Returns a tensor of this shape as a matrix (outputs, inputs); a column holds
                the weights of one input.
        """
        assert self.scale is not None
        from_scale = partial(ColumnRounder.from_scale, shape=shape, to_matrix=to_matrix)
        if not self.spec.quantizes_codes:
            return from_scale(self.scale, self.zero_point, self.scheme)
        assert self.scale_2 is not None
        return TwoRoundings(
            self.scale,
            from_scale(torch.ones_like(self.scale), None, self.scheme),
            from_scale(self.scale_2, self.zero_point_2, self._second().scheme),
        )

    def last_stage(self, x: torch.Tensor) -> LastStage:
        """Return input and scales of the last stage for a weight."""
        assert self.scale is not None
        if not self.spec.quantizes_codes:
            values = x.detach().float()
            return LastStage(values, self.scale, self.zero_point, self.scheme, self.scale_2, 1.0)
        assert self.scale_2 is not None
        second = self._second().scheme
        return LastStage(self._values(x), self.scale_2, self.zero_point_2, second, None, self.scale)

    def set_last_stage_scale(self, scale: torch.Tensor, zero_point: torch.Tensor | None) -> None:
        """Set the scale and zero point of the last stage."""
        if self.spec.quantizes_codes:
            self.scale_2, self.zero_point_2 = scale, zero_point
        else:
            self.scale, self.zero_point = scale, zero_point

    def freeze_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace the values of ``x`` by their fake-quantized values in place and return it."""
        if self.spec.quantizes_codes:
            return x.copy_(self._through_codes(x))
        return fake_quantize_(x, *self.qparams(x), self.scheme)

    def keeps_codes(self, dtype: torch.dtype) -> bool:
        """Whether freezing a tensor of a type changes no code; see ``recovers_codes``."""
        return not self.spec.quantizes_codes and recovers_codes(self.scale, self.scheme, dtype)

    def quantized_tensor(self, x: torch.Tensor | None, is_frozen: bool) -> QuantizedTensor:
        """Return codes, scales and zero points of a tensor.

        Args:
            x: Values of the tensor, None for activations.
            is_frozen: Whether the values are quantized already.
        """
        scales = self.scale, self.zero_point, self.scale_2, self.zero_point_2
        if x is None:
            return QuantizedTensor(self.spec, None, *scales)
        if is_frozen:
            return QuantizedTensor.from_values(self.spec, x, *scales)
        if self.spec.quantizes_codes:
            second = self._second().scheme
            codes = quantize(self._values(x), self.scale_2, self.zero_point_2, second)
        else:
            codes = quantize(x, self.scale, self.zero_point, self.scheme)
        return QuantizedTensor(self.spec, codes, *scales)

    def _second(self) -> QuantizationSpec:
        assert self.spec.second_stage is not None
        return self.spec.second_stage.for_parameter()

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale is not None
        return first_codes(x, self.scale, self.zero_point, self.scheme)

    def _through_codes(self, x: torch.Tensor) -> torch.Tensor:
        scales = self.scale, self.zero_point, self.scale_2, self.zero_point_2
        assert self._second_scheme is not None
        return fake_quantize_codes(x, self.scheme, self._second_scheme, *scales)

    def extra_repr(self) -> str:
        """Return format and granularity."""
        spec = self.spec
        parts = [spec.dtype.name]
        if spec.qscheme is not None:
            parts.append(spec.qscheme.name)
        if spec.group_size is not None:
            parts.append(f"group_size={spec.group_size}")
        if self.is_dynamic:
            parts.append("dynamic")
        if spec.second_stage is not None:
            parts.append(f"then {spec.second_stage.dtype.name}")
        return ", ".join(parts)


def _per_tensor(spec: QuantizationSpec) -> QuantizationSpec:
    """Return a specification whose observer records the range of the whole tensor."""
    return replace(
        spec,
        qscheme=QSchemeType.per_tensor,
        observer_cls=None,
        is_dynamic=False,
        group_size=None,
        second_stage=None,
        scale_format=None,
        four_over_six=False,
    )
