"""Specification of a quantized tensor: format, granularity, scales."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from quark.torch.numerics.formats import Format
from quark.torch.numerics.scale_formats import E8M0, SCALE_FORMATS, ScaleFormat
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.four_over_six import four_over_six_problem
from quark.torch.quantization.config.granularity import granularity_problem
from quark.torch.quantization.config.mx_elements import mx_element_problem
from quark.torch.quantization.config.name_lookup import member, one_of, unknown
from quark.torch.quantization.config.per_head import per_head_problem
from quark.torch.quantization.config.qat import (
    QATSpec,
    default_training_observer,
    qat_spec_from_dict,
    range_training,
    training_problem,
)
from quark.torch.quantization.config.second_stage import second_stage_problem
from quark.torch.quantization.config.serialize import known, path_of, plain
from quark.torch.quantization.config.signed_scales import signed_scales_problem
from quark.torch.quantization.config.super_blocks import super_block_problem
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
    ZeroPointType,
)
from quark.torch.quantization.config.value_types import check_fields, check_options, check_types
from quark.torch.quantization.observer.registry import (
    OBSERVERS,
    ObserverField,
    default_observer,
    observer_problem,
)

if TYPE_CHECKING:
    from quark.torch.quantization.observer.observer import ObserverBase

MX_BLOCK = 32
SCALE_MODES = ("even", "floor", "ceil")

_OBSERVER = ObserverField()


@dataclass(eq=True)
class QuantizationSpec:
    """Quantization of one tensor. ``QTensorConfig`` is the same class.

    Enumerations are given as members or by name. Only fields that the format uses are required:
    integers and 8-bit floats need ``qscheme``; per channel and per group need ``ch_axis``; per
    group also needs ``group_size``.

    Attributes:
        dtype: Number format.
        observer_cls: Class of the observer that records ranges. Defaults to minimum and maximum.
        is_dynamic: Whether scales are computed from each tensor that passes, without calibration.
            Defaults to True for formats that fix their blocks.
        qscheme: Granularity.
        ch_axis: Axis of channels, or axis that is divided into groups.
        group_size: Elements per group, -1 = one group per row; for ``per_head``, of a head.
        symmetric: Whether ranges are symmetric around zero, without a zero point.
        round_method: Rounding of values between two codes.
        scale_type: Type in which scales are stored.
        zero_point_type: Type of zero points: integers, or floats that keep their fraction.
        block_size: (rows, columns) of a block for ``per_block``; -1 = the whole axis.
        scale_format: Number format of the scales: float32, e8m0, e4m3 (relative to a tensor
            scale), e5m3, or one of ``SUPER_BLOCKS``. It overrides ``scale_type``.
        scale_calculation_mode: Rounding of shared exponents: even, floor or ceil.
        signed_scales: Whether scales of symmetric integers may be negative, so that the value
            farthest from zero has the smallest code, whatever its sign. For weights.
        four_over_six: Whether the largest value of a block of fp4 is 4 instead of 6 where that has
            less squared error. For dynamic inputs and outputs in groups.
        qat_spec: Options of scales that are trained: ``QATSpec()`` or ``TQTSpec()``. The observers
            ``LSQObserver`` and ``TQTObserver`` imply them.
        mx_element_dtype: Format of the elements if ``dtype`` is mx.
        is_scale_quant: Whether this specification quantizes the scales of a first stage.
        second_stage: Specification of the second stage, which quantizes the scales of this one if
            ``is_scale_quant`` is set there, else its codes. Configurations store a list of stages.
        enable_buffer_reuse, max_input_numel: No effect.

    Raises:
        TypeError: A field has a value of another type.
        ValueError: A name is unknown, or fields contradict each other.
    """

    dtype: Dtype
    observer_cls: ObserverField = _OBSERVER
    is_dynamic: bool | None = None
    qscheme: QSchemeType | None = None
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    round_method: RoundType | None = None
    scale_type: ScaleType | None = None
    scale_format: str | None = None
    scale_calculation_mode: str | None = None
    qat_spec: QATSpec | None = None
    mx_element_dtype: Dtype | None = None
    zero_point_type: ZeroPointType | None = ZeroPointType.int32
    is_scale_quant: bool = False
    block_size: tuple[int, int] | None = None
    enable_buffer_reuse: bool = False
    max_input_numel: int = 4194304
    signed_scales: bool = False
    four_over_six: bool = False
    second_stage: QuantizationSpec | None = None

    is_parameter = False  # not a field: set by for_parameter

    def __post_init__(self) -> None:
        self.dtype = _required(member(Dtype, self.dtype, "dtype"), "dtype")
        self.qscheme = member(QSchemeType, self.qscheme, "qscheme")
        self.round_method = member(RoundType, self.round_method, "round_method")
        self.scale_type = member(ScaleType, self.scale_type, "scale_type")
        self.zero_point_type = member(ZeroPointType, self.zero_point_type, "zero_point_type")
        self.mx_element_dtype = member(Dtype, self.mx_element_dtype, "mx_element_dtype")
        if isinstance(self.given_observer, str):
            self.observer_cls = one_of(self.given_observer, OBSERVERS, "observer_cls")
        check_options(self)
        if self.block_size is not None:
            self.block_size = tuple(self.block_size)  # type: ignore[assignment]
        if self.fixes_blocks and self.is_dynamic is None:
            self.is_dynamic = True  # scales come from each tensor
        if self.given_observer is None:
            self.observer_cls = default_training_observer(self.qat_spec)
        for broken, message in RULES:
            if broken(self):
                raise ValueError(f"QuantizationSpec(dtype={self.dtype.name}): {message(self)}")
        if self.given_observer is None:
            self.observer_cls = default_observer(self.scheme)

    @property
    def given_observer(self) -> type[ObserverBase] | str | None:
        """Class of the observer, or its name if the class has not been imported for this."""
        return _OBSERVER.given(self)

    def changed(self, **changes: Any) -> QuantizationSpec:
        """Return a specification with other values of some fields; no observer is imported."""
        return replace(self, **{"observer_cls": self.given_observer, **changes})

    @property
    def fixes_blocks(self) -> bool:
        """Whether the format fixes the blocks that share a scale, as MX formats do."""
        return self.dtype is Dtype.mx or self.dtype.value.block > 0

    @property
    def fmt(self) -> Format:
        """Number format of the elements."""
        element = self.mx_element_dtype
        if self.dtype is Dtype.mx and element is not None and element is not Dtype.int8:
            fmt: Format = element.value
            return fmt
        fmt = self.dtype.value
        if fmt.block and self.group_size:
            return replace(fmt, block=self.group_size)
        return fmt

    @property
    def scheme(self) -> Scheme:
        """The specification in terms of ``quark.torch.numerics``."""
        fmt = self.fmt
        qscheme = self.qscheme or QSchemeType.per_tensor
        is_per_head = qscheme is QSchemeType.per_head
        if fmt.block or self.dtype is Dtype.mx or (is_per_head and self.is_dynamic):
            qscheme = QSchemeType.per_group
        return Scheme(
            fmt=fmt,
            qscheme=qscheme,
            axis=-1 if is_per_head else self.ch_axis or 0,
            group=self.group_size or fmt.block or (MX_BLOCK if self.dtype is Dtype.mx else -1),
            symmetric=self.symmetric is not False,
            rounding=self.round_method or RoundType.half_even,
            float_zero_point=self.zero_point_type is ZeroPointType.float32,
            per_token=bool(self.is_dynamic) and qscheme is QSchemeType.per_channel,
            block=self.block_size,
            flat=self.is_parameter,
            scale=self._scale_format(),
            scale_mode=self.scale_calculation_mode or "even",
            signed_scales=self.signed_scales,
            four_over_six=self.four_over_six,
        )

    def _scale_format(self) -> ScaleFormat:
        second = self.second_stage
        if second is not None and second.is_scale_quant:
            stored = second.fmt.native or "uint8"
            return ScaleFormat(stored, second.fmt, two_level=True)
        if self.dtype is Dtype.mx:
            return E8M0
        if self.scale_format is not None and self.scale_format != "float32":
            return SCALE_FORMATS[self.scale_format]
        return (self.scale_type or ScaleType.float).format

    @property
    def quantizes_codes(self) -> bool:
        """Whether a second stage quantizes the codes of this one."""
        return self.second_stage is not None and not self.second_stage.is_scale_quant

    @property
    def coded(self) -> QuantizationSpec:
        """The stage whose codes are stored: a second stage over codes, else the first."""
        return self.stages[1] if self.quantizes_codes else self

    @property
    def needs_data(self) -> bool:
        """Whether activations of this specification have a scale that needs calibration."""
        second = self.second_stage
        two_level = second is not None and second.is_scale_quant and not second.is_dynamic
        return self.fmt.scaled and (not self.is_dynamic or two_level)

    @property
    def range_training(self) -> str | None:
        """How the scale is trained: ``lsq`` by a step size, ``tqt`` by a threshold, or None."""
        return range_training(self.qat_spec, self.given_observer)

    @property
    def threshold_init(self) -> TQTThresholdInitMeth:
        """How the first threshold is chosen; see ``TQTSpec``."""
        given = getattr(self.qat_spec, "threshold_init_meth", None)
        has_blocks = self.scheme.qscheme is not QSchemeType.per_tensor
        default = "_3SD" if self.is_parameter or has_blocks else "_KL_J"
        return given or TQTThresholdInitMeth[default]

    @property
    def stages(self) -> list[QuantizationSpec]:
        """The specifications of the stages, one or two."""
        first = self.changed(second_stage=None)
        first.is_parameter = self.is_parameter
        return [first] if self.second_stage is None else [first, self.second_stage]

    @classmethod
    def of_stages(cls, stages: list[QuantizationSpec]) -> QuantizationSpec:
        """Return the specification of one or two stages.

        Raises:
            TypeError: A stage is no specification.
            ValueError: The list is empty, or has more than two stages.
        """
        check_types(list[QuantizationSpec], stages=stages)
        if not 1 <= len(stages) <= 2:
            raise ValueError(f"A tensor is quantized in one or two stages, got {len(stages)}.")
        second = stages[1] if len(stages) == 2 else None
        return stages[0].changed(second_stage=second)

    def for_parameter(self, is_transposed: bool = False) -> QuantizationSpec:
        """Return the specification for a weight or bias.

        Parameters do not change, so their dynamic scales become static. Groups extend over all
        axes of a weight except the first.

        Args:
            is_transposed: Whether the weight is (in, out) instead of (out, in).
        """
        axis = self.ch_axis
        if is_transposed and axis is not None:
            axis = 1 - axis % 2
        second = self.second_stage
        second = None if second is None else second.for_parameter(is_transposed)
        dynamic = False if self.is_dynamic else self.is_dynamic
        is_same = (dynamic, axis) == (self.is_dynamic, self.ch_axis)  # and checked before
        made = copy(self) if is_same else self.changed(is_dynamic=dynamic, ch_axis=axis)
        made.is_parameter, made.second_stage = True, second
        return made

    def make_observer(self) -> ObserverBase:
        """Return a new observer for a tensor of this specification."""
        assert self.observer_cls is not None
        return self.observer_cls(self)

    def set_group_size(self, group_size: int) -> None:
        """Set the group size.

        Args:
            group_size: Elements per group; -1 = one group per row.

        Raises:
            ValueError: The group size is neither positive nor -1.
        """
        if group_size != -1 and group_size <= 0:
            raise ValueError(f"group_size={group_size}: give a positive number, or -1.")
        self.group_size = group_size

    def to_dict(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the specification as plain JSON types: an object, or a list of two stages."""
        if self.second_stage is not None:
            return [stage.to_dict() for stage in self.stages]  # type: ignore[misc]
        data = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        del data["second_stage"]
        for name in ("signed_scales", "four_over_six"):  # other readers do not know them
            if not data[name]:
                del data[name]
        if self.qat_spec is None:
            del data["qat_spec"]
        else:
            data["qat_spec"] = self.qat_spec.to_dict()
        if self.fixes_blocks:  # the format implies these values; readers expect null
            implied = {"is_dynamic": True, "observer_cls": default_observer(self.scheme)}
            data |= {name: None for name, value in implied.items() if data[name] == value}
        return dict(sorted(data.items()))

    @classmethod
    def from_dict(cls, data: Any) -> QuantizationSpec:
        """Return the specification of a dict from ``to_dict``, of this or an earlier version.

        Raises:
            ValueError: There are more than two stages, or a key or name is unknown.
        """
        if isinstance(data, list):
            return cls.of_stages([cls.from_dict(stage) for stage in data])
        given = known(data, cls, "tensor specification")
        check_fields(given, cls)
        if given.get("qat_spec") is not None:
            given["qat_spec"] = qat_spec_from_dict(given["qat_spec"])
        if isinstance(given.get("second_stage"), dict):
            with path_of("second_stage"):
                given["second_stage"] = cls.from_dict(given["second_stage"])
        return cls(**{"dtype": None, **given})


def _required(value: Dtype | None, what: str) -> Dtype:
    if value is None:
        raise ValueError(f"{what} is required.")
    return value


# (condition, message): all rules on the fields of one specification.
_Rule = tuple[Callable[[QuantizationSpec], bool], Callable[[QuantizationSpec], str]]


def _rule(problem: Callable[[QuantizationSpec], str | None]) -> _Rule:
    return lambda s: problem(s) is not None, lambda s: f"{problem(s)}"


RULES: list[_Rule] = [
    _rule(granularity_problem),
    _rule(per_head_problem),
    (
        lambda s: s.fmt.is_float and s.symmetric is False,
        lambda s: "floating-point formats have no zero point: leave out symmetric=False.",
    ),
    (
        lambda s: s.zero_point_type is ZeroPointType.float32 and s.symmetric is not False,
        lambda s: "a float32 zero point needs symmetric=False.",
    ),
    _rule(mx_element_problem),
    (
        lambda s: s.scale_format not in (None, *SCALE_FORMATS),
        lambda s: unknown(str(s.scale_format), SCALE_FORMATS, "scale_format"),
    ),
    (
        lambda s: s.scale_calculation_mode not in (None, *SCALE_MODES),
        lambda s: unknown(str(s.scale_calculation_mode), SCALE_MODES, "scale_calculation_mode"),
    ),
    (
        lambda s: s.scheme.shares_exponents and s.symmetric is False,
        lambda s: "blocks that share an exponent have no zero point: leave out symmetric=False.",
    ),
    (
        lambda s: s.scheme.scale == E8M0 and not (s.fmt.exponent_bits or s.dtype is Dtype.mx),
        lambda s: "e8m0 scales are for floats and mx: use scale_type='pof2' with other formats.",
    ),
    _rule(observer_problem),
    _rule(training_problem),
    _rule(super_block_problem),
    _rule(signed_scales_problem),
    _rule(four_over_six_problem),
    _rule(second_stage_problem),
]

QTensorConfig = QuantizationSpec
