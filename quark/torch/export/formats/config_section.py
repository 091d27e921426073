"""What the ``quantization_config`` of other tools says, checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype

LARGEST = 1 << 31  # inputs of a group
IN_BLOCKS = "*.[0-9]*.*"  # names of layers inside of numbered blocks


def required(section: Mapping[str, Any], key: str, known: Sequence[Any], default: Any) -> Any:
    """Return the value of a key of a ``quantization_config``.

    Raises:
        ValueError: It is not one of ``known``.
    """
    value = section.get(key, default)
    if not any(value == one and type(value) is type(one) for one in known):
        raise ValueError(
            f"quant_method={section.get('quant_method')!r}: {key}={value!r} is not read here "
            f"(known: {', '.join(map(repr, known))})."
        )
    return value


def group_size(section: Mapping[str, Any], default: int) -> int:
    """Return the inputs of a group, -1 for all, as a ``quantization_config`` says.

    Raises:
        ValueError: It is no such number.
    """
    value = section.get("group_size", default)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not (value == -1 or 0 < value <= LARGEST)
    ):
        raise ValueError(
            f"quant_method={section.get('quant_method')!r}: group_size={value!r} is no positive "
            "integer, nor -1 for all inputs."
        )
    return value


def names_in(section: Mapping[str, Any], key: str) -> list[str]:
    """Return the names that a ``quantization_config`` lists, none if it lacks the key.

    Raises:
        ValueError: It has something else there.
    """
    value = section.get(key)
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"quant_method={section.get('quant_method')!r}: {key} is no list of names."
        )
    return names


def unsigned_spec(bits: int, group: int, symmetric: bool, **fields: Any) -> QuantizationSpec:
    """Return the specification of a weight of unsigned integers per group of inputs."""
    return QuantizationSpec(
        Dtype[f"uint{bits}"],
        qscheme=QSchemeType.per_group,
        ch_axis=-1,
        group_size=group,
        symmetric=symmetric,
        is_dynamic=False,
        **fields,
    )


def named_config(layer: QuantizationConfig, left: Sequence[str] | None) -> Config:
    """Return the configuration of all layers but those whose names contain one of ``left``.

    Without names to leave out it is that of the layers inside of numbered blocks.
    """
    if left is None:
        return Config(QuantizationConfig(), layer_quant_config={IN_BLOCKS: layer})
    return Config(layer, exclude=[f"*{literal(name)}*" for name in left])
