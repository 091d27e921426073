"""Configuration of a layer: the specification of each of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quark.torch.quantization.config.name_lookup import member
from quark.torch.quantization.config.serialize import known, path_of, plain
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import DeviceType, Dtype, QSchemeType
from quark.torch.quantization.config.value_types import check_fields, check_types

Stages = QuantizationSpec | list[QuantizationSpec] | None  # one specification, or two stages
TENSORS = ("input_tensors", "output_tensors", "weight", "bias")


@dataclass(eq=True)
class QuantizationConfig:
    """Quantization of the tensors of a layer. ``QLayerConfig`` is the same class.

    A tensor takes one specification, or a list of two stages. None leaves it in float.

    Attributes:
        input_tensors: Specification of the inputs.
        output_tensors: Specification of the outputs.
        weight: Specification of the weight.
        bias: Specification of the bias.
        target_device: No effect: layers stay on their device.

    Raises:
        TypeError: A field is not a specification.
        ValueError: Inputs or outputs have static scales per group, or another tensor than the
            outputs has scales per head, or they have signed scales.
    """

    input_tensors: QuantizationSpec | None = None
    output_tensors: QuantizationSpec | None = None
    weight: QuantizationSpec | None = None
    bias: QuantizationSpec | None = None
    target_device: DeviceType | None = None

    if TYPE_CHECKING:  # a list of stages becomes one specification below

        def __init__(
            self,
            input_tensors: Stages = None,
            output_tensors: Stages = None,
            weight: Stages = None,
            bias: Stages = None,
            target_device: DeviceType | str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        self.target_device = member(DeviceType, self.target_device, "target_device")
        for name in TENSORS:
            stages = getattr(self, name)
            check_types(Stages, **{f"QuantizationConfig.{name}": stages})
            if isinstance(stages, (list, tuple)):
                with path_of(name):
                    setattr(self, name, QuantizationSpec.of_stages(list(stages)))
        for name, spec in self.specs():
            if name.endswith("_tensors") and spec.dtype is Dtype.mx and not spec.is_dynamic:
                spec = spec.changed(is_dynamic=True)  # there are no other scales of activations
                setattr(self, name, spec)
            if name != "output_tensors" and spec.qscheme is QSchemeType.per_head:
                raise ValueError(
                    f"{name}: scales per head are for output_tensors of keys and values. Use "
                    "qscheme='per_tensor' or 'per_group'."
                )
            grouped = spec.scheme.qscheme in (QSchemeType.per_group, QSchemeType.per_block)
            if name.endswith("_tensors") and grouped and not spec.is_dynamic:
                raise ValueError(
                    f"{name}: activations have no static scale per group. Set is_dynamic=True."
                )
            if name.endswith("_tensors") and spec.signed_scales:
                raise ValueError(f"{name}: signed_scales=True is for weights only.")
            if not name.endswith("_tensors") and spec.four_over_six:
                raise ValueError(f"{name}: four_over_six=True is for inputs and outputs only.")
            if name.endswith("_tensors") and spec.quantizes_codes:
                raise ValueError(
                    f"{name}: a second stage over the codes of the first is for weights only."
                )

    def specs(self) -> Iterator[tuple[str, QuantizationSpec]]:
        """Iterate over (name, specification) of the quantized tensors."""
        for name in TENSORS:
            spec = getattr(self, name)
            if spec is not None:
                yield name, spec

    @property
    def is_empty(self) -> bool:
        """Whether no tensor is quantized."""
        return not any(True for _ in self.specs())

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain JSON types."""
        data: dict[str, Any] = dict.fromkeys(TENSORS)
        data |= {name: spec.to_dict() for name, spec in self.specs()}
        data["target_device"] = plain(self.target_device)
        return dict(sorted(data.items()))

    @classmethod
    def from_dict(cls, data: dict[str, Any] | None) -> QuantizationConfig:
        """Return the configuration of a dict from ``to_dict``; None quantizes no tensor.

        Raises:
            ValueError: A key or name is unknown; the message names the nearest.
        """
        given = known(data or {}, cls, "layer configuration")
        check_fields(given, cls)
        for name in TENSORS:
            if given.get(name) is not None:
                with path_of(name):
                    given[name] = QuantizationSpec.from_dict(given[name])
        return cls(**given)


QLayerConfig = QuantizationConfig
