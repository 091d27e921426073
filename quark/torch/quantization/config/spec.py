"""Specification of one quantized tensor, and the documented helper classes which make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from quark.torch.numerics.formats import Format
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.names import one_of
from quark.torch.quantization.config.serialize import known, plain
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    RoundType,
    ScaleType,
    ZeroPointType,
)
from quark.torch.quantization.observer.observer import (
    OBSERVER_METHODS,
    OBSERVERS,
    ObserverBase,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PlaceholderObserver,
)

E = TypeVar("E", bound=Enum)


def member(enum: type[E], value: E | str | None, what: str) -> E | None:
    """Return the member of ``enum`` that ``value`` is or names.

    Raises:
        ValueError: No member has that name; the nearest one is named.
    """
    if value is None or isinstance(value, enum):
        return value
    return enum[one_of(str(value), enum.__members__, what)]


@dataclass(eq=True)
class QuantizationSpec:
    """How one tensor is quantized. ``QTensorConfig`` is the same class.

    Enumerations may be given as members or by name. Only the fields a format uses are required:
    integers and 8-bit floats need ``qscheme``; per channel and per group need ``ch_axis``, per
    group also ``group_size``. The rest has defaults.

    Attributes:
        dtype: Number format.
        observer_cls: Statistic that ranges come from; by default the minimum and maximum.
        is_dynamic: Whether ranges are those of each tensor as it passes, without calibration.
        qscheme: Granularity.
        ch_axis: Channel axis, or the axis that is cut in groups.
        group_size: Elements of a group; -1 for the whole axis.
        symmetric: Whether ranges are centred on zero.
        round_method: How values between two codes are decided.
        scale_type: Type in which scales are stored.
        zero_point_type: Whether zero points keep their fraction.
        block_size: Two-dimensional blocks; no format of this version uses it.
        scale_format: Number format of the scales of block formats; unused in this version.
        scale_calculation_mode: Rounding of shared exponents; unused in this version.
        qat_spec: Options of quantization-aware training; unused in this version.
        mx_element_dtype: Element format of a generic block format; unused in this version.
        is_scale_quant: Whether this specification quantizes the scales of another one.
        enable_buffer_reuse: Accepted for compatibility.
        max_input_numel: Accepted for compatibility.

    Raises:
        ValueError: A name is unknown, or fields contradict each other.
    """

    dtype: Dtype
    observer_cls: type[ObserverBase] | None = None
    is_dynamic: bool | None = None
    qscheme: QSchemeType | None = None
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    round_method: RoundType | None = None
    scale_type: ScaleType | None = None
    scale_format: str | None = None
    scale_calculation_mode: str | None = None
    qat_spec: Any | None = None
    mx_element_dtype: Dtype | None = None
    zero_point_type: ZeroPointType | None = ZeroPointType.int32
    is_scale_quant: bool = False
    block_size: tuple[int, int] | None = None
    enable_buffer_reuse: bool = False
    max_input_numel: int = 4194304

    def __post_init__(self) -> None:
        self.dtype = _required(member(Dtype, self.dtype, "dtype"), "dtype")
        self.qscheme = member(QSchemeType, self.qscheme, "qscheme")
        self.round_method = member(RoundType, self.round_method, "round_method")
        self.scale_type = member(ScaleType, self.scale_type, "scale_type")
        self.zero_point_type = member(ZeroPointType, self.zero_point_type, "zero_point_type")
        self.mx_element_dtype = member(Dtype, self.mx_element_dtype, "mx_element_dtype")
        if isinstance(self.observer_cls, str):
            self.observer_cls = OBSERVERS[one_of(self.observer_cls, OBSERVERS, "observer_cls")]
        if self.observer_cls is None:
            self.observer_cls = _default_observer(self)
        for broken, message in _RULES:
            if broken(self):
                raise ValueError(f"QuantizationSpec(dtype={self.dtype.name}): {message(self)}")

    @property
    def fmt(self) -> Format:
        """The number format."""
        return self.dtype.value

    @property
    def scheme(self) -> Scheme:
        """The specification as the arithmetic takes it."""
        qscheme = self.qscheme or QSchemeType.per_tensor
        return Scheme(
            fmt=self.fmt,
            qscheme=qscheme,
            axis=0 if self.ch_axis is None else self.ch_axis,
            group=-1 if self.group_size is None else self.group_size,
            symmetric=self.symmetric is not False,
            rounding=self.round_method or RoundType.half_even,
            scale_dtype=(self.scale_type or ScaleType.float).torch_dtype,
            float_zero_point=self.zero_point_type is ZeroPointType.float32,
            per_token=bool(self.is_dynamic) and qscheme is QSchemeType.per_channel,
        )

    def for_parameter(self) -> QuantizationSpec:
        """Return the specification as it applies to a weight or bias.

        Parameters do not change, so a dynamic scale of theirs is a static one.
        """
        return replace(self, is_dynamic=False) if self.is_dynamic else self

    def make_observer(self) -> ObserverBase:
        """Return a fresh observer for a tensor of this specification."""
        observer = self.observer_cls if self.fmt.scaled else PlaceholderObserver
        return (observer or _default_observer(self))(self)

    def set_group_size(self, group_size: int) -> None:
        """Set the group size: positive, or -1 for the whole axis.

        Raises:
            ValueError: Anything else.
        """
        if group_size != -1 and group_size <= 0:
            raise ValueError(f"group_size={group_size}: give a positive number, or -1.")
        self.group_size = group_size

    def to_dict(self) -> dict[str, Any]:
        """Return the specification as plain JSON types."""
        data = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        del data["qat_spec"]
        return dict(sorted(data.items()))

    @classmethod
    def from_dict(cls, data: Any) -> QuantizationSpec:
        """Make a specification from what ``to_dict`` gave, here or in an earlier version.

        Raises:
            ValueError: It is a list of several stages, or a key or name is unknown.
        """
        if isinstance(data, list):
            if len(data) != 1:
                raise ValueError(
                    f"A tensor quantized in {len(data)} stages is not supported by this version."
                )
            data = data[0]
        return cls(**{"dtype": None, **known(data, cls, "tensor specification")})


def _required(value: Dtype | None, what: str) -> Dtype:
    if value is None:
        raise ValueError(f"{what} is required.")
    return value


def _default_observer(spec: QuantizationSpec) -> type[ObserverBase]:
    if not spec.fmt.scaled:
        return PlaceholderObserver
    if spec.qscheme is QSchemeType.per_channel:
        return PerChannelMinMaxObserver
    if spec.qscheme is QSchemeType.per_group:
        return PerGroupMinMaxObserver
    return OBSERVER_METHODS["min_max"]


# (is broken, message): every rule on the fields of one specification.
_Rule = tuple[Callable[[QuantizationSpec], bool], Callable[[QuantizationSpec], str]]
_RULES: list[_Rule] = [
    (
        lambda s: s.fmt.scaled and s.qscheme is None,
        lambda s: f"qscheme is missing: give one of {[q.name for q in QSchemeType]}.",
    ),
    (
        lambda s: (
            s.qscheme in (QSchemeType.per_channel, QSchemeType.per_group)
            and not isinstance(s.ch_axis, int)
        ),
        lambda s: f"{s.qscheme and s.qscheme.name} needs an integer ch_axis, got {s.ch_axis!r}.",
    ),
    (
        lambda s: (
            s.qscheme is QSchemeType.per_group
            and not (isinstance(s.group_size, int) and (s.group_size > 0 or s.group_size == -1))
        ),
        lambda s: (
            f"per_group needs a positive group_size, or -1 for the whole axis, "
            f"got {s.group_size!r}."
        ),
    ),
    (
        lambda s: s.fmt.is_float and s.symmetric is False,
        lambda s: "floating-point formats have no zero point: leave out symmetric=False.",
    ),
    (
        lambda s: s.zero_point_type is ZeroPointType.float32 and s.symmetric is not False,
        lambda s: "a float32 zero point needs symmetric=False.",
    ),
    (
        lambda s: s.scale_format not in (None, "float32") or s.is_scale_quant,
        lambda s: (
            f"scales in a number format of their own (scale_format={s.scale_format!r}, "
            f"is_scale_quant={s.is_scale_quant}) are not supported; use scale_type."
        ),
    ),
    (
        lambda s: (
            not (isinstance(s.observer_cls, type) and issubclass(s.observer_cls, ObserverBase))
        ),
        lambda s: f"observer_cls must be an observer class, got {s.observer_cls!r}.",
    ),
]

QTensorConfig = QuantizationSpec


class DataTypeSpec:
    """Base of the helper classes below; ``to_quantization_spec`` makes the full specification."""

    _base: dict[str, Any]

    def to_quantization_spec(self) -> QuantizationSpec:
        """Return the full specification.

        Raises:
            ValueError: A field contradicts the format, or a name is unknown.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        method = given.pop("observer_method", None)
        if method is not None:
            methods = OBSERVER_METHODS
            given["observer_cls"] = methods[one_of(method, methods, "observer_method")]
        chosen = {name: value for name, value in given.items() if value is not None}
        return QuantizationSpec(**{**self._base, **chosen})


REQUIRED = object()
_COMMON: dict[str, Any] = {
    "scale_type": "float",
    "round_method": "half_even",
    "is_dynamic": False,
}
_SCALE_FORMAT: dict[str, Any] = {"scale_format": "float32", "scale_calculation_mode": None}
_SCHEME_FIELDS: dict[str, dict[str, Any]] = {
    "per_tensor": {"observer_method": "min_max"},
    "per_channel": {"ch_axis": REQUIRED},
    "per_group": {"ch_axis": REQUIRED, "group_size": REQUIRED},
}


def _row(dtype: str, qscheme: str, **defaults: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    base = {"dtype": dtype, "qscheme": qscheme}
    return base, {**_SCHEME_FIELDS[qscheme], "symmetric": True, **_COMMON, **defaults}


# Name of the class -> (fixed fields, constructor arguments with their defaults).
_SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Int4PerTensorSpec": _row("int4", "per_tensor"),
    "Int8PerTensorSpec": _row("int8", "per_tensor"),
    "Uint4PerTensorSpec": _row("uint4", "per_tensor", symmetric=False),
    "Uint8PerTensorSpec": _row("uint8", "per_tensor", symmetric=False),
    "Int3PerChannelSpec": _row("int3", "per_channel", symmetric=False),
    "Int4PerChannelSpec": _row("int4", "per_channel"),
    "Int8PerChannelSpec": _row("int8", "per_channel", symmetric=False),
    "Uint4PerChannelSpec": _row("uint4", "per_channel", symmetric=False, zero_point_type="int32"),
    "Uint8PerChannelSpec": _row("uint8", "per_channel"),
    "Int2PerGroupSpec": _row("int2", "per_group"),
    "Int3PerGroupSpec": _row("int3", "per_group"),
    "Int4PerGroupSpec": _row("int4", "per_group"),
    "Int8PerGroupSpec": _row("int8", "per_group"),
    "Uint4PerGroupSpec": _row("uint4", "per_group", symmetric=False),
    "Uint8PerGroupSpec": _row("uint8", "per_group", symmetric=False),
    "FP8E4M3PerTensorSpec": _row("fp8_e4m3", "per_tensor", scale_type=None),
    "FP8E5M2PerTensorSpec": _row("fp8_e5m2", "per_tensor"),
    "FP8E4M3PerChannelSpec": _row("fp8_e4m3", "per_channel"),
    "FP8E5M2PerChannelSpec": _row("fp8_e5m2", "per_channel"),
    "FP8E4M3PerGroupSpec": _row("fp8_e4m3", "per_group", is_dynamic=True, **_SCALE_FORMAT),
    "FP8E5M2PerGroupSpec": _row("fp8_e5m2", "per_group", is_dynamic=True, **_SCALE_FORMAT),
    "Float16Spec": ({"dtype": "float16"}, {}),
    "Bfloat16Spec": ({"dtype": "bfloat16"}, {}),
}


def _make(name: str, base: dict[str, Any], arguments: dict[str, Any]) -> type[DataTypeSpec]:
    what = " ".join(base.values())
    required = [(f, Any) for f, default in arguments.items() if default is REQUIRED]
    optional = [
        (f, Any, field(default=default))
        for f, default in arguments.items()
        if default is not REQUIRED
    ]
    namespace = {"__doc__": f"Quantization to {what}.", "_base": base, "__module__": __name__}
    return make_dataclass(name, [*required, *optional], bases=(DataTypeSpec,), namespace=namespace)


SPEC_CLASSES: dict[str, type[DataTypeSpec]] = {n: _make(n, *row) for n, row in _SPECS.items()}
globals().update(SPEC_CLASSES)
