"""The quantizer of one tensor of a module."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import (
    ColumnRounder,
    ColumnRounding,
    codes_of,
    dequantize,
    dynamic_qparams,
    fake_quantize,
    fake_quantize_,
    quantize,
)
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.observer.observer import MinMaxObserver

PARTS = ("scale", "zero_point", "scale_2", "zero_point_2")


class State(NamedTuple):
    """A quantized tensor in full.

    Attributes:
        spec: Specification of the tensor.
        codes: Codes, None for activations.
        scale: Scale of the codes as they are multiplied, or of the first of two stages.
        zero_point: Offset of the codes.
        scale_2: Scale of the scales, or of the second of two stages.
        zero_point_2: Offset of the second stage.
        order: Input that each column of the codes is of, where these are in the order of groups
            and not of inputs.
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
        """The specification as the arithmetic takes it."""
        return self.spec.scheme

    @classmethod
    def of_values(
        cls,
        spec: QuantizationSpec,
        values: torch.Tensor,
        scale: torch.Tensor | None,
        zero_point: torch.Tensor | None,
        scale_2: torch.Tensor | None = None,
        zero_point_2: torch.Tensor | None = None,
    ) -> State:
        """Return the state of a tensor whose values are quantized already."""
        if spec.quantizes_codes:
            assert scale is not None
            second = spec.stages[1].for_parameter().scheme
            codes = codes_of(values.float() / scale, scale_2, zero_point_2, second)
        else:
            codes = codes_of(values, scale, zero_point, spec.scheme)
        return cls(spec, codes, scale, zero_point, scale_2, zero_point_2)

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of the codes in ``dtype``, in the order of the inputs."""
        assert self.codes is not None
        if not self.spec.quantizes_codes:
            found = dequantize(self.codes, self.scale, self.zero_point, self.scheme, dtype)
            if self.order is None:
                return found
            return torch.empty_like(found).index_copy_(1, self.order, found)
        second = self.spec.stages[1].for_parameter().scheme
        values = dequantize(self.codes, self.scale_2, self.zero_point_2, second)
        assert self.scale is not None
        return values.mul_(self.scale).to(dtype)


class LastStage(NamedTuple):
    """What decides on the codes of a tensor that are stored.

    Attributes:
        values: What is rounded, float32: the tensor, or what its first stage made of it.
        scale: Settled scale.
        zero_point: Settled zero point, or None.
        scheme: How the values are rounded.
        tensor_scale: Scale [] of the scales, where they have two levels.
        unit: What rounded values are multiplied by: the scale of the first stage, or 1.
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme
    tensor_scale: torch.Tensor | None
    unit: torch.Tensor | float


class _TwoRoundings(NamedTuple):
    """Rounds columns to codes and these to codes again; see ``ColumnRounding``.

    Attributes:
        scale: That of the tensor, by which values become the first codes.
        first: Rounds those.
        second: Rounds the results.
    """

    scale: torch.Tensor
    first: ColumnRounder
    second: ColumnRounder

    def __call__(self, x: torch.Tensor, column: int) -> torch.Tensor:
        """Return the rounded values of a column."""
        return self.second(self.first(x / self.scale, column), column).mul_(self.scale)

    def of_rows(self, rows: torch.Tensor) -> ColumnRounding:
        """Return what rounds some rows of every column."""
        return _TwoRoundings(self.scale, self.first.of_rows(rows), self.second.of_rows(rows))


class TensorQuantizer(nn.Module):
    """Quantizes and dequantizes a tensor by its specification.

    Its state is data: while ``observing`` it looks at tensors and returns them as they are;
    afterwards it uses ``scale`` and ``zero_point``, or those of each tensor if the specification
    is dynamic.

    Attributes:
        spec: Specification of the tensor.
        observing: Whether tensors are observed instead of quantized.
        enabled: Whether anything is done at all.
        scale: Settled scale, [] per tensor, [channels] per channel, a grid per group; or None.
        zero_point: Settled zero point in the same shape, or None.
        scale_2: Settled scale [] of the scales, or that of a second stage over the codes.
        zero_point_2: Settled zero point of a second stage.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    scale_2: torch.Tensor | None
    zero_point_2: torch.Tensor | None

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__()
        self.spec = spec
        self.scheme = spec.scheme
        # Block scales of a dynamic tensor are relative to a settled range of the whole.
        observed = _whole(spec) if spec.is_dynamic and spec.needs_data else spec
        self.observer = observed.make_observer()
        self.observing = False
        self.enabled = True
        for name in PARTS:
            self.register_buffer(name, None)

    @property
    def is_dynamic(self) -> bool:
        """Whether scales are those of each tensor as it passes."""
        return bool(self.spec.is_dynamic) and self.scheme.fmt.scaled

    @property
    def needs_data(self) -> bool:
        """Whether anything has to be settled before the quantizer can work."""
        return self.spec.needs_data

    def settle(self, x: torch.Tensor | None = None) -> None:
        """Derive the scales from what was observed and stop observing.

        Args:
            x: The tensor itself, where it does not change: a weight or bias.

        Raises:
            RuntimeError: Nothing was observed.
            FloatingPointError: NaN or infinity was observed.
        """
        self.observing = False
        if not self.needs_data:
            return
        if self.scheme.scale.two_level and isinstance(self.observer, MinMaxObserver):
            self.scale_2 = self.observer.tensor_scale(self.scheme)
        if self.is_dynamic:
            return
        self.scale, self.zero_point = self.observer.calculate_qparams()
        if self.spec.quantizes_codes and x is not None:
            second = self._second()
            observer = second.make_observer()
            observer(self._values(x))
            self.scale_2, self.zero_point_2 = observer.calculate_qparams()

    def resettle(self, scale_2: torch.Tensor, x: torch.Tensor | None = None) -> None:
        """Take another scale of the scales, as tensors that share one do.

        Args:
            scale_2: Scale [] of the scales.
            x: The tensor itself, where the ranges of its blocks are needed again.
        """
        assert isinstance(self.observer, MinMaxObserver)
        self.scale_2 = scale_2
        if not self.is_dynamic and x is not None:
            self.observer(x)
            self.scale, self.zero_point = self.observer.qparams(scale_2)
            self.observer.reset()

    def narrow(self, x: torch.Tensor) -> None:
        """Take the ranges of another weight than the one that is rounded.

        Args:
            x: A weight of the same shape. The scale of its scales stays as it was settled.
        """
        if self.scheme.scale.two_level and self.scale_2 is not None:
            self.resettle(self.scale_2, x)
        else:
            self.observer(x)
            self.settle(x)
            self.observer.reset()

    def qparams(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scale and zero point that apply to ``x``.

        Raises:
            RuntimeError: The specification is static and nothing was settled.
        """
        if not self.scheme.fmt.scaled:
            return None, None
        settled = self.scale_2 if self.is_dynamic else self.scale
        if self.needs_data and settled is None:
            raise RuntimeError(
                "A static quantizer has no scale yet: run ModelQuantizer.quantize_model with a "
                "dataloader first."
            )
        if self.is_dynamic:
            return dynamic_qparams(x, self.scheme, self.scale_2)
        return self.scale, self.zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Observe ``x`` or quantize and dequantize it."""
        if not self.enabled or x.numel() == 0:
            return x
        if self.observing:
            result: torch.Tensor = self.observer(x)
            return result
        if self.spec.quantizes_codes:
            return x + (self._through_codes(x) - x).detach()  # straight through
        return fake_quantize(x, *self.qparams(x), self.scheme)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a weight or bias would become, without settling anything."""
        other = TensorQuantizer(self.spec)
        other.observer(x)
        other.settle(x)
        return other.bake_(x.clone())

    def column_rounder(self, shape: tuple[int, ...], axis: int) -> ColumnRounding:
        """Return what rounds a column of a weight of this shape, under the settled scales.

        Args:
            shape: Shape of the weight.
            axis: Axis of its inputs; a column holds the weights of one input.
        """
        assert self.scale is not None
        if not self.spec.quantizes_codes:
            return ColumnRounder.of(self.scale, self.zero_point, self.scheme, shape, axis)
        assert self.scale_2 is not None
        of, second = ColumnRounder.of, self._second().scheme
        return _TwoRoundings(
            self.scale,
            of(torch.ones_like(self.scale), None, self.scheme, shape, axis),
            of(self.scale_2, self.zero_point_2, second, shape, axis),
        )

    def last_stage(self, x: torch.Tensor) -> LastStage:
        """Return what rounds a weight, under the settled scales."""
        assert self.scale is not None
        if not self.spec.quantizes_codes:
            values = x.detach().float()
            return LastStage(values, self.scale, self.zero_point, self.scheme, self.scale_2, 1.0)
        assert self.scale_2 is not None
        second = self._second().scheme
        return LastStage(self._values(x), self.scale_2, self.zero_point_2, second, None, self.scale)

    def settle_last_stage(self, scale: torch.Tensor, zero_point: torch.Tensor | None) -> None:
        """Take another scale and zero point of the last stage."""
        if self.spec.quantizes_codes:
            self.scale_2, self.zero_point_2 = scale, zero_point
        else:
            self.scale, self.zero_point = scale, zero_point

    def bake_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace the values of ``x`` by what ``forward`` returns for them, without a copy."""
        if self.spec.quantizes_codes:
            return x.copy_(self._through_codes(x))
        return fake_quantize_(x, *self.qparams(x), self.scheme)

    def state(self, x: torch.Tensor | None, is_baked: bool) -> State:
        """Return the tensor in full.

        Args:
            x: Its values, None for activations.
            is_baked: Whether these are quantized values already.
        """
        settled = self.scale, self.zero_point, self.scale_2, self.zero_point_2
        if x is None:
            return State(self.spec, None, *settled)
        if is_baked:
            return State.of_values(self.spec, x, *settled)
        if self.spec.quantizes_codes:
            second = self._second().scheme
            codes = quantize(self._values(x), self.scale_2, self.zero_point_2, second)
        else:
            codes = quantize(x, self.scale, self.zero_point, self.scheme)
        return State(self.spec, codes, *settled)

    def _second(self) -> QuantizationSpec:
        assert self.spec.second_stage is not None
        return self.spec.second_stage.for_parameter()

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the codes of the first stage, without its scale."""
        codes = quantize(x.detach(), self.scale, self.zero_point, self.scheme)
        return dequantize(codes, torch.ones_like(self.scale), None, self.scheme)  # type: ignore[arg-type]

    def _through_codes(self, x: torch.Tensor) -> torch.Tensor:
        values = fake_quantize_(
            self._values(x), self.scale_2, self.zero_point_2, self._second().scheme
        )
        assert self.scale is not None
        return values.mul_(self.scale).to(x.dtype)

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


def _whole(spec: QuantizationSpec) -> QuantizationSpec:
    """Return a specification whose observer sees the range of a whole tensor."""
    return replace(
        spec,
        qscheme=QSchemeType.per_tensor,
        observer_cls=None,
        is_dynamic=False,
        group_size=None,
        second_stage=None,
        scale_format=None,
    )
