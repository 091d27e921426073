"""Quantized attention in compressed-tensors: groups without weights, for classes of its modules.

``input_activations`` of such a group are the QuantizationArgs of queries, keys and values, all
after rotary embedding. For keys and values they replace ``kv_cache_scheme``. Static scales belong
to the attention module: ``self_attn.q_scale``, ``self_attn.k_scale``, ``self_attn.v_scale``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quark.torch.export.formats.compressed_tensors_args import args_to_cache, cache_args
from quark.torch.export.formats.config_section import read_names, to_pattern
from quark.torch.export.formats.kv_cache import SCALE_NAMES, kv_cache_config
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import first_match, matches

if TYPE_CHECKING:
    from quark.torch.quantization.nn.layer import QuantizedLayer

QUERY, QUERY_SCALE = "q_proj", "q_scale"
_CLASS = re.compile(r"\w*attention\w*", re.IGNORECASE)  # compressed-tensors asks for this name too


class Attention(NamedTuple):
    """What the section says of attention, as fields of ``Config``.

    Attributes:
        queries: ``query_quant_config``.
        cache: ``kv_cache_quant_config``.
        post_rope: ``kv_cache_post_rope``.
    """

    queries: dict[str, QuantizationConfig]
    cache: dict[str, QuantizationConfig]
    post_rope: bool


# ---- reading ------------------------------------------------------------------------------------


def read_attention(groups: Sequence[dict[str, Any]], cache: Any) -> Attention:
    """Return how queries, keys and values are quantized.

    Args:
        groups: Groups without weights.
        cache: The entry ``kv_cache_scheme``.

    Raises:
        ValueError: A group is not one of attention, or a scheme is not supported.
    """
    queries: dict[str, QuantizationConfig] = {}
    inside: dict[str, QuantizationConfig] = {}
    found = [(*_pattern(target, group), group) for group in groups for target in _targets(group)]
    for _, pattern, group in sorted(found, key=lambda each: each[0]):  # full names come first
        args = group.get("input_activations")
        spec = args_to_cache(args, "input_activations of attention")
        if spec is None or group.get("output_activations"):
            raise _refusal(group)
        layer = QuantizationConfig(output_tensors=spec)
        queries.setdefault(f"{pattern}.{QUERY}", layer)
        for name in SCALE_NAMES:
            inside.setdefault(f"{pattern}.{name}", layer)
    spec = args_to_cache(cache)
    cached = inside | kv_cache_config(spec)
    return Attention(queries, cached, post_rope=bool(cached))


def _targets(group: dict[str, Any]) -> list[str]:
    return read_names(group, "targets")


def _pattern(target: str, group: dict[str, Any]) -> tuple[int, str]:
    """Return how general a target of attention modules is, and the pattern of their names.

    Raises:
        ValueError: It cannot be one.
    """
    if _CLASS.fullmatch(target):
        return 2, "*"  # all attention modules: those without scales are an error on reading
    is_expression = target.startswith("re:")
    pattern = to_pattern(target)
    if "." not in target or (is_expression and pattern.endswith("*")):
        raise _refusal(group)
    return int(is_expression), pattern


def _refusal(group: dict[str, Any]) -> ValueError:
    return ValueError(
        f"compressed-tensors: the group {group} quantizes no weights, and is not one of attention: "
        "those have input_activations alone, and targets such as 'LlamaAttention' or "
        "'re:.*self_attn$'. Load the checkpoint with compressed-tensors."
    )


def without_ignored(
    layers: Mapping[str, QuantizationConfig], config: Config
) -> dict[str, QuantizationConfig]:
    """Return the layers without the queries of attention modules that are ignored.

    Args:
        layers: Configuration of each quantized layer, by its name.
        config: Configuration of the model.

    Raises:
        ValueError: A target of attention has no such layers.
    """
    kept = dict(layers)
    for name, layer in layers.items():
        if _is_query(name, config) and matches(name.rpartition(".")[0], config.exclude):
            kept.pop(name)
            other = QuantizationConfig(weight=layer.weight, input_tensors=layer.input_tensors)
            kept |= {} if other.is_empty else {name: other}
    for pattern in config.query_quant_config:
        if not any(matches(name, [pattern]) for name in layers):
            raise ValueError(
                f"compressed-tensors: no layer of the model matches {pattern!r}, which would "
                "compute queries that config_groups quantizes. Load the checkpoint with "
                "compressed-tensors."
            )
    return kept


def _is_query(name: str, config: Config) -> bool:
    return first_match(name, config.query_quant_config) is not None


# ---- writing ------------------------------------------------------------------------------------


def holds_queries(name: str, layer: QuantizationConfig, config: Config) -> bool:
    """Whether the outputs of a layer are queries that the format can hold.

    Args:
        name: Name of the layer.
        layer: Its configuration.
        config: Configuration of the model.
    """
    spec, last = layer.output_tensors, name.rpartition(".")[2]
    is_held = spec is not None and cache_args(spec) is not None
    return is_held and last == QUERY and _is_query(name, config)


def attention_groups(
    mode: str, layers: Mapping[str, QuantizedLayer], config: Config, classes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the groups of attention modules with quantized queries.

    A group has one class of modules, which vLLM knows by its ending "Attention".

    Args:
        mode: Name of the format, for errors.
        layers: The quantized layers of the model.
        config: Configuration of the model.
        classes: Names of all modules of the model -> names of their classes.

    Raises:
        ValueError: Keys or values of such a module are quantized in another way, or elsewhere;
            other modules have queries in float; or readers would not take it for attention.
    """
    modules = {
        name.rpartition(".")[0]: cache_args(layer.quant_config.output_tensors)
        for name, layer in layers.items()
        if layer.quant_config.output_tensors and name.rpartition(".")[2] == QUERY
    }
    modules = {name: args for name, args in modules.items() if name in classes}
    for name, args in modules.items():
        _check_module(mode, name, args, layers)
    if modules and not config.kv_cache_post_rope:
        raise ValueError(
            f"custom_mode={mode!r} has queries, keys and values after rotary embedding: quantize "
            "with kv_cache_post_rope=True, or use custom_mode='quark'."
        )
    groups = []
    for kind in dict.fromkeys(classes[name] for name in modules):
        if not kind.endswith("Attention"):
            raise ValueError(
                f"custom_mode={mode!r}: readers know attention by the name of its class, which is "
                f"{kind!r} here. Quantize without queries, or use custom_mode='quark'."
            )
        members = [name for name in modules if classes[name] == kind]
        for name, other in classes.items():
            if other == kind and name not in modules:
                raise ValueError(
                    f"custom_mode={mode!r}: compressed-tensors quantizes the queries of all "
                    f"attention modules or of none, and those of {name} are in float. Quantize "
                    "them too, or use custom_mode='quark'."
                )
        args = {"input_activations": modules[members[0]], "output_activations": None}
        groups.append({"format": None, **args, "targets": [kind], "weights": None})
    return groups


def _check_module(
    mode: str, module: str, args: dict[str, Any] | None, layers: Mapping[str, QuantizedLayer]
) -> None:
    """Check that the keys and values of an attention module are quantized as its queries.

    Raises:
        ValueError: They are not.
    """
    for name in SCALE_NAMES:
        layer = layers.get(f"{module}.{name}")
        spec = None if layer is None else layer.quant_config.output_tensors
        found = None if spec is None else cache_args(spec)
        if found != args:
            raise ValueError(
                f"custom_mode={mode!r} has one scheme for queries, keys and values, but the "
                f"queries of {module} are {args} and {name} is {found}. Quantize them alike, "
                "as attention_scheme='qkv_fp8' does."
            )


def queries_stored_name(key: str) -> str:
    """Return the stored name of a tensor: ``….q_scale`` for ``….q_proj.output_scale``."""
    ending = f".{QUERY}.output_scale"
    return key.removesuffix(ending) + f".{QUERY_SCALE}" if key.endswith(ending) else key


def queries_state_name(key: str) -> str:
    """Return the name of a tensor as for a layer: the inverse of ``queries_stored_name``."""
    ending = f".{QUERY_SCALE}"
    return key.removesuffix(ending) + f".{QUERY}.output_scale" if key.endswith(ending) else key
