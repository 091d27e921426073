"""Reading the ``quantization_config`` section of config.json as other tools write it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype

MAX_GROUP_SIZE = 1 << 31
IN_BLOCKS = "*.[0-9]*.*"  # layers inside numbered decoder blocks: model.layers.0.mlp.up_proj


def read_choice(section: Mapping[str, Any], key: str, known: Sequence[Any], default: Any) -> Any:
    """Return the value of a key that has a fixed set of supported values.

    Raises:
        ValueError: The value is not one of ``known``.
    """
    value = section.get(key, default)
    # The type counts: True == 1, but "sym": 1 is not a flag.
    if not any(value == one and type(value) is type(one) for one in known):
        raise ValueError(
            f"quant_method={section.get('quant_method')!r}: {key}={value!r} is not supported "
            f"(supported: {', '.join(map(repr, known))})."
        )
    return value


def read_group_size(section: Mapping[str, Any], default: int) -> int:
    """Return ``group_size``: a number of inputs, or -1 for all inputs.

    Raises:
        ValueError: It is neither a positive integer nor -1.
    """
    value = section.get("group_size", default)
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not (value == -1 or 0 < value <= MAX_GROUP_SIZE)
    ):
        raise ValueError(
            f"quant_method={section.get('quant_method')!r}: group_size={value!r} is not a positive "
            "integer, nor -1 for all inputs."
        )
    return value


def read_names(section: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of names under ``key``, [] if the key is absent or null.

    Raises:
        ValueError: The value is not a list of strings.
    """
    value = section.get(key)
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"quant_method={section.get('quant_method')!r}: {key} is not a list of names."
        )
    return names


def unsigned_weight_spec(bits: int, group_size: int, symmetric: bool) -> QuantizationSpec:
    """Return the specification of a weight in unsigned integers, per group of inputs."""
    return QuantizationSpec(
        Dtype[f"uint{bits}"],
        qscheme=QSchemeType.per_group,
        ch_axis=-1,
        group_size=group_size,
        symmetric=symmetric,
        is_dynamic=False,
    )


def config_for_blocks(layer: QuantizationConfig) -> Config:
    """Return a configuration that quantizes the layers inside numbered decoder blocks."""
    return Config(QuantizationConfig(), layer_quant_config={IN_BLOCKS: layer})


def config_without(layer: QuantizationConfig, name_parts: Sequence[str]) -> Config:
    """Return a configuration for all layers except those whose name contains one of the parts."""
    return Config(layer, exclude=[f"*{literal(part)}*" for part in name_parts])


def with_weight_fields(layer: QuantizationConfig, **fields: Any) -> QuantizationConfig:
    """Return a layer's configuration with other fields of its weight specification, if any."""
    return layer if layer.weight is None else replace(layer, weight=layer.weight.changed(**fields))


def with_all_weight_fields(config: Config, **fields: Any) -> Config:
    """Return a configuration with other fields in all its weight specifications."""
    layers = {
        n: with_weight_fields(layer, **fields) for n, layer in config.layer_quant_config.items()
    }
    default = with_weight_fields(config.global_quant_config, **fields)
    return replace(config, global_quant_config=default, layer_quant_config=layers)


def to_pattern(name: str, tool: str = "compressed-tensors") -> str:
    """Return the pattern of ``Config`` for a name or a simple regular expression.

    Expressions may have ``.*`` between literal parts: ``re:.*down_proj$`` becomes ``*down_proj``,
    ``re:.*mlp.*`` becomes ``*mlp*``. They match from the start of a name, as ``re.match`` does.

    Args:
        name: Name, or expression after ``re:``.
        tool: The tool that wrote it, for messages.

    Raises:
        ValueError: The expression has other operators.
    """
    if not name.startswith("re:"):
        return literal(name)
    parts = name[3:].removeprefix("^").split(".*")
    plain = [re.sub(r"\\?([.\-])", r"\1", part) for part in parts]
    ends = plain[-1].endswith("$")
    plain[-1] = plain[-1].removesuffix("$")
    if any(re.search(r"[^\w.\-]", part) for part in plain):
        raise ValueError(
            f"{tool}: the expression {name!r} is not supported: list the layers by "
            "their full names in config.json."
        )
    return "*".join(plain) + ("" if ends or not plain[-1] else "*")
