"""Configurations of language models from names of schemes and algorithms."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import ClassVar

from torch import nn

from quark.torch.quantization.config import presets
from quark.torch.quantization.config.algo import AlgoConfig
from quark.torch.quantization.config.algo_lookup import make_algo_configs
from quark.torch.quantization.config.attention import quantizes_cache
from quark.torch.quantization.config.bounds import NonNegative
from quark.torch.quantization.config.builder import (
    Attention,
    KVCache,
    as_patterns,
    build_config,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.part_kinds import PARTS
from quark.torch.quantization.config.recipes import recipe
from quark.torch.quantization.config.resolution import OUTPUT_HEAD
from quark.torch.quantization.config.value_types import check_types

logger = logging.getLogger(__name__)


class LLMTemplate:
    """Defaults for the configurations of one type of language model.

    Every type of model has a template, since layers are found by name patterns. Quantizing a model
    warns about patterns without a match. Register a template to change the patterns of a type.

    Args:
        model_type: Type of the model, as in its ``config.json``.
        kv_layers_name: Name patterns of the key and value projections. Defaults to
            ``["*k_proj", "*v_proj"]``.
        q_layer_name: Name pattern of the query projection. Defaults to ``"*q_proj"``.
        exclude_layers_name: Name patterns of layers to leave in float. Defaults to
            ``["lm_head"]``, which stands for the output head whatever the model calls it, with
            all parts of ``float_parts``.

    Raises:
        TypeError: An argument is of another type.

    Example::

        template = LLMTemplate.get(model.config.model_type)
        config = template.get_config("nvfp4", algorithm="gptq")
    """

    _registered: ClassVar[dict[str, LLMTemplate]] = {}
    _schemes: ClassVar[dict[str, QuantizationConfig]] = {}

    def __init__(
        self,
        model_type: str,
        kv_layers_name: str | list[str] | None = None,
        q_layer_name: str | list[str] | None = None,
        exclude_layers_name: str | list[str] | None = None,
    ) -> None:
        check_types(str, model_type=model_type)
        self.model_type = model_type
        self.kv_layers_name = as_patterns(
            "kv_layers_name", kv_layers_name or ["*k_proj", "*v_proj"]
        )
        self.q_layer_name = q_layer_name or "*q_proj"
        as_patterns("q_layer_name", self.q_layer_name)
        self.float_parts = list(PARTS) if exclude_layers_name is None else []
        self.exclude_layers_name = as_patterns(
            "exclude_layers_name",
            [OUTPUT_HEAD] if exclude_layers_name is None else exclude_layers_name,
        )

    @classmethod
    def get(cls, model_type: str) -> LLMTemplate:
        """Return the template of a type of model, or the default one if none is registered.

        Raises:
            TypeError: ``model_type`` is no text.
        """
        if not isinstance(model_type, str):
            raise TypeError(
                f"model_type: expected a text, got a {type(model_type).__name__}. Give "
                "model.config.model_type."
            )
        return cls._registered.get(model_type) or cls(model_type)

    @classmethod
    def list_available(cls) -> list[str]:
        """Return the types of causal language models that Transformers knows."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *cls._registered})

    @classmethod
    def register_template(cls, template: LLMTemplate) -> None:
        """Register a template for its type of model.

        Raises:
            TypeError: It is no template.
        """
        check_types(LLMTemplate, template=template)
        cls._registered[template.model_type] = template

    @classmethod
    def register_scheme(cls, scheme_name: str, config: QuantizationConfig) -> None:
        """Register a scheme under a new name.

        A registered scheme may be registered again, which replaces it. Schemes of this package keep
        their meaning: no name that finds one of them is free, in any case or spelling.

        Raises:
            TypeError: The name is no text, or the scheme is no configuration of layers.
            ValueError: The name is empty, or that of a scheme of this package.
        """
        check_types(str, scheme_name=scheme_name)
        check_types(QuantizationConfig, config=config)
        if not scheme_name.strip():
            raise ValueError(f"scheme_name: expected a name, got {scheme_name!r}.")
        if _is_built_in(scheme_name):
            raise ValueError(
                f"scheme_name: {scheme_name!r} is a scheme of this package, which cannot be "
                "replaced. Choose a name that LLMTemplate.get_supported_schemes() does not list."
            )
        cls._schemes[scheme_name] = config

    @classmethod
    def unregister_scheme(cls, scheme_name: str) -> None:
        """Remove a registered scheme.

        Raises:
            TypeError: The name is no text.
            ValueError: No registered scheme has that name.
        """
        del cls._schemes[one_of(scheme_name, cls._schemes, "registered scheme")]

    @classmethod
    def get_supported_schemes(cls) -> list[str]:
        """Return the names of all schemes."""
        return [*presets.scheme_names(), *cls._schemes]

    @classmethod
    def _scheme(cls, name: str) -> QuantizationConfig:
        if name in cls._schemes:
            return cls._schemes[name]
        return presets.scheme(name)

    def get_config(
        self,
        scheme: str,
        algorithm: str | list[str] | None = None,
        kv_cache_scheme: str | None = None,
        min_kv_scale: float = 0.0,
        attention_scheme: str | None = None,
        layer_config: dict[str, str] | None = None,
        layer_type_config: dict[type[nn.Module], str] | None = None,
        exclude_layers: list[str] | None = None,
        algo_configs: dict[str, AlgoConfig] | None = None,
        shared_scale_groups: list[list[str]] | None = None,
        float_parts: list[str] | None = None,
    ) -> Config:
        """Return the configuration of a model.

        Args:
            scheme: Name of the scheme of all layers; ``get_supported_schemes`` lists them.
            algorithm: Name or names of algorithms, applied in order.
            kv_cache_scheme: Name of the scheme of the key-value cache.
            min_kv_scale: Lower bound of the scales of the cache.
            attention_scheme: Name of the scheme of attention, one of ``ATTENTION_SCHEMES``:
                ``fp8`` for queries and the probabilities, ``qkv_fp8`` and so on for queries, keys
                and values after rotary embedding.
            layer_config: Name pattern to name of a scheme; the first match counts.
            layer_type_config: Module type to name of a scheme.
            exclude_layers: Name patterns of layers to leave in float, instead of the patterns of
                the template.
            algo_configs: Options of algorithms by their names, instead of the default options.
            shared_scale_groups: Groups of name endings that share per-tensor scales. By default
                layers with the same input share them where scales have two levels.
            float_parts: Kinds of parts to leave in float, found by the structure of the model:
                ``tower`` (vision and audio), ``projector`` and ``router``. By default all of them,
                or none if ``exclude_layers`` is given. ``[]`` quantizes all of them.

        Raises:
            TypeError: An argument is of another type, or options are not those of their algorithm.
            ValueError: A name is unknown; the message names the nearest. Or ``min_kv_scale`` is
                negative or not finite, or a pattern of ``layer_config`` may match queries, which
                ``attention_scheme`` quantizes.
        """
        check_types(str, scheme=scheme)
        check_types(dict[str, str] | None, layer_config=layer_config)
        check_types(dict[type[nn.Module], str] | None, layer_type_config=layer_type_config)
        cache, attention = self._cache(kv_cache_scheme, attention_scheme, min_kv_scale)
        algorithms = make_algo_configs(algorithm, algo_configs or {})
        _warn_of_unused(algo_configs or {}, algorithms)
        return build_config(
            self._scheme(scheme),
            layers={p: self._scheme(s) for p, s in (layer_config or {}).items()},
            layer_types={kind: self._scheme(s) for kind, s in (layer_type_config or {}).items()},
            exclude=self.exclude_layers_name if exclude_layers is None else exclude_layers,
            float_parts=self._parts(float_parts, exclude_layers is None),
            algorithms=algorithms,
            kv_cache=cache,
            attention=attention,
            shared_scale_groups=shared_scale_groups,
        )

    def _cache(
        self, kv_cache_scheme: str | None, attention_scheme: str | None, min_kv_scale: float
    ) -> tuple[KVCache | None, Attention | None]:
        """Return the quantization of the cache and of attention; arguments of ``get_config``."""
        check_types(str | None, kv_cache_scheme=kv_cache_scheme, attention_scheme=attention_scheme)
        check_types(NonNegative, min_kv_scale=min_kv_scale)
        cache = attention = None
        if kv_cache_scheme is not None:
            cache = KVCache(kv_cache_scheme, self.kv_layers_name, min_kv_scale)
        if attention_scheme is not None:
            patterns = self.query_patterns, self.kv_layers_name
            attention = Attention(attention_scheme, *patterns, min_kv_scale)
        if min_kv_scale and cache is None and not quantizes_cache(attention_scheme or ""):
            logger.warning("min_kv_scale=%g has no effect without kv_cache_scheme.", min_kv_scale)
        return cache, attention

    @property
    def query_patterns(self) -> list[str]:
        """Name patterns of the query projections."""
        return as_patterns("q_layer_name", self.q_layer_name)

    def _parts(self, wanted: list[str] | None, is_default: bool) -> list[str]:
        if wanted is not None:
            return wanted
        return self.float_parts if is_default else []

    def get_recipe(self, name: str) -> Config:
        """Return the configuration of a recipe: a scheme with its best algorithms.

        Args:
            name: Name of the recipe, such as ``w4``; ``RECIPES`` lists them.

        Raises:
            ValueError: No recipe has that name; the message names the nearest.
        """
        scheme, options = recipe(name)
        return replace(self.get_config(scheme), algo_config=options)


def _is_built_in(name: str) -> bool:
    """Whether a name finds a scheme of this package."""
    try:
        presets.scheme(name)
    except ValueError:
        return False
    return True


def _warn_of_unused(given: dict[str, AlgoConfig], algorithms: list[AlgoConfig]) -> None:
    """Warn of options of algorithms that are not applied."""
    for name, options in given.items():
        if not any(options is applied for applied in algorithms):
            logger.warning("algo_configs: %s is not applied: name it in algorithm, too.", name)
