"""The key-value cache in a configuration."""

from __future__ import annotations

from dataclasses import replace

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import config_for
from quark.torch.quantization.config.presets import kv_cache_scheme


def with_kv_cache(
    config: Config,
    patterns: list[str],
    scheme: str,
    min_kv_scale: float = 0.0,
    post_rope: bool = False,
) -> Config:
    """Return a configuration that also quantizes the key-value cache.

    The cache is quantized at the outputs of the key and value projections.

    Args:
        config: Configuration of the model. It is not changed.
        patterns: Name patterns of the key and value projections.
        scheme: Name of the scheme of the cache, one of ``KV_CACHE_SCHEMES``.
        min_kv_scale: Lower bound of the scales of the cache.
        post_rope: Whether keys are quantized after the rotary embedding.

    Raises:
        ValueError: No scheme has that name; the message names the nearest.
    """
    spec = kv_cache_scheme(scheme)
    cache = {}
    for pattern in patterns:
        base = config_for(pattern, None, config) or QuantizationConfig()
        cache[pattern] = replace(base, output_tensors=spec)
    # Entries of the caller come first and keep their schemes: the first match counts, and outputs
    # are taken from kv_cache_quant_config in any case.
    layers = {**config.layer_quant_config, **cache}
    return replace(
        config,
        layer_quant_config=layers,
        kv_cache_quant_config=cache,
        kv_cache_group=list(patterns),
        min_kv_scale=min_kv_scale,
        kv_cache_post_rope=post_rope,
    )
