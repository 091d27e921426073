"""Quantized attention in a configuration: queries, keys, values, and the results of softmax."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import config_for
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.presets import kv_cache_scheme
from quark.torch.quantization.config.type import QSchemeType

# Schemes of the cache that queries take too, after rotary embedding: "qkv_fp8" and so on.
_QKV = ("fp8", "fp8_per_head", "int8_per_head", "int4_per_head", "fp4_per_head")
# Name -> scheme of the cache with the same format.
ATTENTION_SCHEMES = {"fp8": "fp8", **{f"qkv_{name}": name for name in _QKV}}


def quantizes_cache(scheme: str) -> bool:
    """Whether a scheme of attention quantizes keys and values too, after rotary embedding."""
    return scheme.startswith("qkv_")


def with_attention(config: Config, patterns: Sequence[str], scheme: str) -> Config:
    """Return a configuration that also quantizes queries of attention, or probabilities too.

    ``fp8``: queries are quantized at the outputs of their projections, probabilities after softmax.
    ``qkv_…``: queries are quantized after rotary embedding, and probabilities are not; keys and
    values are those of the cache, by the same scheme.

    Args:
        config: Configuration of the model. It is not changed.
        patterns: Name patterns of the query projections.
        scheme: Name of the scheme, one of ``ATTENTION_SCHEMES``.

    Raises:
        ValueError: No scheme has that name, or another entry of ``layer_quant_config`` may match
            a query projection first.
    """
    spec = kv_cache_scheme(ATTENTION_SCHEMES[one_of(scheme, ATTENTION_SCHEMES, "attention_scheme")])
    if quantizes_cache(scheme):
        layer = QuantizationConfig(output_tensors=spec)
        return replace(config, query_quant_config=dict.fromkeys(patterns, layer))
    queries = {}
    for pattern in patterns:
        others = (p for p in config.layer_quant_config if p != pattern)
        rival = next((p for p in others if _may_overlap(p, pattern)), None)
        if rival is not None:
            raise ValueError(
                f"attention_scheme: the layer pattern {rival!r} may match queries ({pattern!r}), "
                "which would stay in float there. Give a pattern that ends in another name, or a "
                "Config whose entries for queries have output_tensors."
            )
        base = config_for(pattern, None, config) or QuantizationConfig()
        queries[pattern] = replace(base, output_tensors=spec)
    return replace(
        config,
        layer_quant_config={**queries, **(config.layer_quant_config | queries)},
        softmax_quant_spec=spec,
    )


def _may_overlap(first: str, second: str) -> bool:
    """Whether one name may match two patterns, by the text after their last wildcards."""
    a, b = (re.split(r"[*?\]]", pattern)[-1] for pattern in (first, second))
    return a.endswith(b) or b.endswith(a)


def softmax_layers(config: Config) -> list[QuantizationConfig]:
    """Return the probabilities of attention as the output of a layer; [] if they are in float."""
    spec = config.softmax_quant_spec
    return [] if spec is None else [QuantizationConfig(output_tensors=spec)]


def check_softmax(config: Config) -> None:
    """Check that probabilities of attention can be quantized as a configuration asks.

    Raises:
        ValueError: They cannot.
    """
    spec = config.softmax_quant_spec
    if spec is None:
        return
    problem = ""
    if not spec.fmt.is_float or spec.qscheme is not QSchemeType.per_tensor:
        problem = "probabilities take a float format with one scale per tensor"
    elif spec.second_stage is not None:
        problem = "probabilities are quantized in one stage"
    elif spec.range_training is not None:
        problem = "the range of probabilities does not train"
    if problem:
        raise ValueError(
            f"softmax_quant_spec: {problem}, got {spec.dtype.name}. Use FP8E4M3PerTensorSpec()."
        )
