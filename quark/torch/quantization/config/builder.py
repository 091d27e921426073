"""The one way from schemes and algorithms to the configuration of a language model.

``LLMTemplate`` and the command line both build here, so the same names give the same result. The
configuration is built without a model; ``resolution`` adapts it to a model when it is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from quark.torch.quantization.config.algo import AlgoConfig
from quark.torch.quantization.config.attention import (
    ATTENTION_SCHEMES,
    quantizes_cache,
    with_attention,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.config.part_kinds import PARTS
from quark.torch.quantization.config.resolution import OUTPUT_HEAD, fused_projections
from quark.torch.quantization.config.value_types import check_types


@dataclass(frozen=True)
class KVCache:
    """Quantization of the key-value cache.

    Attributes:
        scheme: Name of the scheme, one of ``KV_CACHE_SCHEMES``.
        patterns: Name patterns of the key and value projections.
        min_scale: Lower bound of the scales.
        post_rope: Whether keys are quantized after the rotary embedding.
    """

    scheme: str
    patterns: list[str]
    min_scale: float = 0.0
    post_rope: bool = False


@dataclass(frozen=True)
class Attention:
    """Quantization inside of attention: queries, with probabilities or with the cache.

    Attributes:
        scheme: Name of the scheme, one of ``ATTENTION_SCHEMES``.
        patterns: Name patterns of the query projections.
        cache_patterns: Name patterns of the key and value projections.
        min_scale: Lower bound of the scales of the cache.
    """

    scheme: str
    patterns: list[str]
    cache_patterns: list[str]
    min_scale: float = 0.0


def build_config(
    scheme: QuantizationConfig,
    layers: Mapping[str, QuantizationConfig] | None = None,
    layer_types: Mapping[type[nn.Module], QuantizationConfig] | None = None,
    exclude: Sequence[str] | None = None,
    algorithms: Sequence[AlgoConfig] = (),
    kv_cache: KVCache | None = None,
    attention: Attention | None = None,
    shared_scale_groups: list[list[str]] | None = None,
    float_parts: Sequence[str] | None = None,
) -> Config:
    """Return the configuration of a language model.

    Args:
        scheme: Scheme of all layers that no other argument names.
        layers: Name pattern to scheme; the first match counts.
        layer_types: Module type to scheme.
        exclude: Name patterns of layers to leave in float; None for the output head.
        algorithms: Options of algorithms, applied in order.
        kv_cache: Quantization of the key-value cache; None leaves it in float.
        attention: Quantization of queries, with probabilities or keys and values; None leaves them
            in float.
        shared_scale_groups: Groups of name endings that share scales per tensor. None shares those
            of layers with the same input, where a scheme has two levels of scales.
        float_parts: Kinds of ``PARTS`` to leave in float. None for all of them if ``exclude`` is
            None too, else for none: an explicit list of names is the whole list.

    Raises:
        TypeError: Patterns or groups are of another type.
        ValueError: No scheme of the cache or of attention has that name; the message names the
            nearest. Or a pattern of ``layers`` may match queries that are quantized.
    """
    layers, layer_types = dict(layers or {}), dict(layer_types or {})
    if shared_scale_groups is None:
        schemes = [scheme, *layers.values(), *layer_types.values()]
        shared_scale_groups = fused_projections() if any(map(is_two_level, schemes)) else []
    if float_parts is None:
        float_parts = PARTS if exclude is None else ()
    config = Config(
        global_quant_config=scheme,
        layer_quant_config=layers,
        layer_type_quant_config=layer_types,
        exclude=[OUTPUT_HEAD] if exclude is None else as_patterns("exclude_layers", exclude),
        float_parts=as_patterns("float_parts", float_parts),
        algo_config=list(algorithms),
        shared_scale_groups=shared_scale_groups,
    )
    if attention is not None:
        config = with_attention(config, attention.patterns, attention.scheme)
        kv_cache = cache_beside(attention, kv_cache)
    if kv_cache is None:
        return config
    return with_kv_cache(
        config, kv_cache.patterns, kv_cache.scheme, kv_cache.min_scale, kv_cache.post_rope
    )


def as_patterns(what: str, patterns: str | Sequence[str]) -> list[str]:
    """Return patterns as a list; a single text is one pattern, not one for each character.

    Args:
        what: Name of the argument, for the message.
        patterns: Pattern or patterns.

    Raises:
        TypeError: They are no patterns.
    """
    check_types(str | Sequence[str], **{what: patterns})
    return [patterns] if isinstance(patterns, str) else list(patterns)


def cache_beside(attention: Attention, cache: KVCache | None) -> KVCache | None:
    """Return the quantization of the cache beside that of attention, which may ask for one.

    Args:
        attention: Quantization inside of attention.
        cache: Quantization of the cache that is asked for, or None.

    Raises:
        ValueError: It asks for another one.
    """
    if not quantizes_cache(attention.scheme):
        return cache
    own = ATTENTION_SCHEMES[attention.scheme]
    cache = cache or KVCache(own, attention.cache_patterns, attention.min_scale)
    if cache.scheme != own:
        raise ValueError(
            f"attention_scheme: {attention.scheme!r} quantizes keys and values by {own!r}, but the "
            f"scheme of the cache is {cache.scheme!r}. Leave that one out."
        )
    return replace(cache, post_rope=True)


def is_two_level(layer: QuantizationConfig) -> bool:
    """Whether a tensor of a layer has scales that are relative to a scale of the whole tensor."""
    return any(spec.scheme.scale.two_level for _, spec in layer.specs())
