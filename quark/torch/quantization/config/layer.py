"""Which tensors of a layer are quantized, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quark.torch.quantization.config.serialize import known, plain
from quark.torch.quantization.config.spec import QuantizationSpec, member
from quark.torch.quantization.config.spec_classes import DataTypeSpec, TwoStageSpec
from quark.torch.quantization.config.type import DeviceType, QSchemeType

TENSORS = ("input_tensors", "output_tensors", "weight", "bias")


@dataclass(eq=True)
class QuantizationConfig:
    """Which tensors of a layer are quantized and how. ``QLayerConfig`` is the same class.

    Each tensor may be given one specification, or a list of two stages.

    Attributes:
        input_tensors: Specification of the inputs, or None to leave them alone.
        output_tensors: Specification of the outputs.
        weight: Specification of the weight.
        bias: Specification of the bias.
        target_device: Accepted for compatibility.

    Raises:
        TypeError: Something other than a specification is given.
        ValueError: Inputs or outputs are static per group.
    """

    input_tensors: QuantizationSpec | None = None
    output_tensors: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None
    bias: QuantizationSpec | None = None
    target_device: DeviceType | None = None

    def __post_init__(self) -> None:
        self.target_device = member(DeviceType, self.target_device, "target_device")
        for name in TENSORS:
            stages = getattr(self, name)
            if isinstance(stages, (list, tuple)):
                setattr(self, name, QuantizationSpec.of_stages(list(stages)))
        for name, spec in self.specs():
            if isinstance(spec, (DataTypeSpec, TwoStageSpec)):
                raise TypeError(
                    f"{name}={type(spec).__name__}(...) is a helper: "
                    "call .to_quantization_spec() on it."
                )
            if not isinstance(spec, QuantizationSpec):
                raise TypeError(f"{name}: expected a QuantizationSpec, got {spec!r}.")
            grouped = spec.scheme.qscheme in (QSchemeType.per_group, QSchemeType.per_block)
            if name.endswith("_tensors") and grouped and not spec.is_dynamic:
                raise ValueError(
                    f"{name}: activations have no static scale per group. Set is_dynamic=True."
                )
            if name.endswith("_tensors") and spec.quantizes_codes:
                raise ValueError(
                    f"{name}: a second stage over the codes of the first is for weights only."
                )

    def specs(self) -> Iterator[tuple[str, QuantizationSpec]]:
        """Iterate over (tensor name, specification) of what is quantized."""
        for name in TENSORS:
            spec = getattr(self, name)
            if spec is not None:
                yield name, spec

    @property
    def is_empty(self) -> bool:
        """Whether nothing is quantized."""
        return not any(True for _ in self.specs())

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain JSON types."""
        data: dict[str, Any] = dict.fromkeys(TENSORS)
        data |= {name: spec.to_dict() for name, spec in self.specs()}
        data["target_device"] = plain(self.target_device)
        return dict(sorted(data.items()))

    @classmethod
    def from_dict(cls, data: dict[str, Any] | None) -> QuantizationConfig:
        """Make a configuration from what ``to_dict`` gave; None quantizes nothing.

        Raises:
            ValueError: A key or name is unknown; the nearest known one is named.
        """
        given = known(data or {}, cls, "layer configuration")
        for name in TENSORS:
            if given.get(name) is not None:
                given[name] = QuantizationSpec.from_dict(given[name])
        return cls(**given)


QLayerConfig = QuantizationConfig
