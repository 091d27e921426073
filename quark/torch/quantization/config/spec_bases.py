"""Bases of the documented helper classes, and the helpers of two stages."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.value_types import check_options
from quark.torch.quantization.observer.registry import OBSERVER_METHODS

_INSTEAD = " Call .to_quantization_spec() on it."  # end of the message where a result is expected


class DataTypeSpec:
    """Base of the helper classes below; ``to_quantization_spec`` makes the full specification.

    Raises:
        TypeError: A field has a value of another type.
    """

    _base: dict[str, Any]
    instead = _INSTEAD

    def __post_init__(self) -> None:
        check_options(self)

    def to_quantization_spec(self) -> QuantizationSpec:
        """Return the full specification.

        Raises:
            ValueError: A field contradicts the format, or a name is unknown.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        method = given.pop("observer_method", None)
        if method is not None:
            name = OBSERVER_METHODS[one_of(method, OBSERVER_METHODS, "observer_method")]
            given["observer_cls"] = name
        if "block_size" in given:
            given["group_size"] = given.pop("block_size")
        chosen = {name: value for name, value in given.items() if value is not None}
        return QuantizationSpec(**{**self._base, **chosen})


@dataclass
class TwoStageSpec:
    """Base of the helpers that make a specification of two stages, as a list.

    Attributes:
        first_stage: Specification of the tensor, or a helper for one.
        second_stage: Specification of what the first stage leaves.

    Raises:
        TypeError: A stage is neither.
    """

    instead = _INSTEAD

    first_stage: DataTypeSpec | QuantizationSpec
    second_stage: DataTypeSpec | QuantizationSpec

    def __post_init__(self) -> None:
        check_options(self)

    def to_quantization_spec(self) -> list[QuantizationSpec]:
        """Return the specifications of both stages."""
        return [
            stage.to_quantization_spec() if isinstance(stage, DataTypeSpec) else stage
            for stage in (self.first_stage, self.second_stage)
        ]


class ProgressiveSpec(TwoStageSpec):
    """The second stage quantizes the codes of the first, such as int4 over fp8."""


class ScaleQuantSpec(TwoStageSpec):
    """The second stage quantizes the scales of the first, such as NVFP4: fp4 with fp8 scales."""

    def to_quantization_spec(self) -> list[QuantizationSpec]:
        """Return the specifications of both stages."""
        first, second = super().to_quantization_spec()
        return [first, replace(second, is_scale_quant=True)]
