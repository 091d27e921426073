"""Options of the documented API that have no effect here, or that are not supported.

They can be read and written, so that configurations of other versions load. Quantizing with a value
other than the default warns or raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from quark.torch.quantization.config.attention import check_softmax
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.serialize import plain
from quark.torch.quantization.config.value_types import check_options

logger = logging.getLogger(__name__)

_DISCOVERED = "the structure of the model is discovered, so this name is not used"
_KERNEL = "it belongs to a kernel of another implementation, and results do not depend on it"
_RESIDUAL = "{} is not supported: the scheme chooses the format. Leave it out."
_DAMPING = "{}: the damping is fixed. Leave it out."

# Class -> option -> why it has no effect. Results are the same with any value.
IGNORED: dict[str, dict[str, str]] = {
    "Config": {
        "gpu_resident_blocks": "the whole model is held in memory, which gives the same result",
    },
    "QuantizationConfig": {"target_device": "layers stay on their device"},
    "QuantizationSpec": {"enable_buffer_reuse": _KERNEL, "max_input_numel": _KERNEL},
    "RotationConfig": dict.fromkeys(("backbone", "self_attn", "mlp"), _DISCOVERED),
    "OnlineRotationConfig": {
        "shared_parallel": "online rotations are Hadamard matrices of one size, so parallel "
        "layers share theirs in any case",
    },
}
# Class -> option -> message, in which {} stands for the option and its value.
REFUSED: dict[str, dict[str, str]] = {
    "Config": {
        "quant_flow": "{}: quantize_model supports standard only. Leave it out, or call "
        "direct_quantize_checkpoint for file2file.",
        "quant_mode": "{}: only graphs in memory are quantized this way, by ModelQuantizer or "
        "FxGraphQuantizer. Leave it out.",
    },
    "QuaRotConfig": {
        "optimized_rotation_path": "{}: rotations are not read from files. Leave it out, or set "
        "trainable=True to train them.",
    },
    "SVDQuantConfig": dict.fromkeys(
        ("gptq_n_bits", "gptq_symmetric", "gptq_group_size"), _RESIDUAL
    ),
    "QronosConfig": {"alpha": _DAMPING, "beta": _DAMPING},
}


def check_compatibility(config: Config) -> None:
    """Check that a configuration has no option that is not supported.

    Types and ranges are checked again, since options may have changed after they were made.

    Raises:
        TypeError: An option has a value of another type.
        ValueError: An option has a value that is not supported, or outside of its range.
    """
    for part in _parts(config):
        check_options(part)
    for part, name, message in _changed_options(config, REFUSED):
        raise ValueError(message.format(_describe(part, name)))
    check_softmax(config)


def warn_about_ignored(config: Config) -> None:
    """Warn about each option of a configuration that has no effect."""
    warnings: dict[str, None] = {}
    for part, name, reason in _changed_options(config, IGNORED):
        warnings[f"{_describe(part, name)} has no effect: {reason}."] = None
    if config.kv_cache_post_rope and not config.kv_cache_quant_config:
        warnings["kv_cache_post_rope changes nothing without kv_cache_quant_config."] = None
    for warning in warnings:
        logger.warning("%s", warning)


def _changed_options(
    config: Config, table: dict[str, dict[str, str]]
) -> Iterator[tuple[Any, str, str]]:
    """Iterate over (part of the configuration, option, text of the table) of changed options."""
    for part in _parts(config):
        for cls in type(part).__mro__:
            for name, text in table.get(cls.__name__, {}).items():
                if _is_changed(part, name):
                    yield part, name, text


def _parts(config: Config) -> Iterator[Any]:
    """Iterate over the configuration, its layers, their specifications and the algorithms."""
    yield config
    layers = [config.global_quant_config, *config.layer_type_quant_config.values()]
    for by_name in (
        config.layer_quant_config,
        config.kv_cache_quant_config,
        config.query_quant_config,
    ):
        layers += by_name.values()
    for layer in layers:
        yield layer
        for _, spec in layer.specs():
            yield from spec.stages
    for options in config.algo_config or []:
        yield options
        if getattr(options, "online_config", None) is not None:
            yield options.online_config  # type: ignore[attr-defined]


def _is_changed(part: Any, name: str) -> bool:
    """Whether an option has another value than its default."""
    default = next(field.default for field in fields(part) if field.name == name)
    return bool(getattr(part, name) != default)


def _describe(part: Any, name: str) -> str:
    prefix = f"{part.name}: " if hasattr(part, "name") else ""
    value = getattr(part, name)
    is_long = hasattr(value, "to_dict")
    return f"{prefix}{name}" if is_long else f"{prefix}{name}={plain(value)}"
