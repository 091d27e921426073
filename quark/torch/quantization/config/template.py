"""Configurations of language models from the name of a scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import nn

from quark.torch.quantization.config import presets
from quark.torch.quantization.config.algo import ALGO_CONFIGS, AlgoConfig
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import config_for
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.recipes import recipe


class LLMTemplate:
    """What is common to the configurations of a type of language model.

    Any type of model has a template: layers are found by patterns, and a pattern that matches
    nothing is reported when a model is quantized. Register one to change the patterns.

    Args:
        model_type: Type of the model, as in its ``config.json``.
        kv_layers_name: Patterns of the key and value projections.
        q_layer_name: Pattern of the query projection.
        exclude_layers_name: Patterns of layers that stay as they are.
    """

    _registered: ClassVar[dict[str, LLMTemplate]] = {}
    _schemes: ClassVar[dict[str, QuantizationConfig]] = {}

    def __init__(
        self,
        model_type: str,
        kv_layers_name: list[str] | None = None,
        q_layer_name: str | list[str] | None = None,
        exclude_layers_name: list[str] | None = None,
    ) -> None:
        self.model_type = model_type
        self.kv_layers_name = kv_layers_name or ["*k_proj", "*v_proj"]
        self.q_layer_name = q_layer_name or "*q_proj"
        self.exclude_layers_name = (
            ["lm_head"] if exclude_layers_name is None else exclude_layers_name
        )

    @classmethod
    def get(cls, model_type: str) -> LLMTemplate:
        """Return the template registered for a type of model, or the general one."""
        return cls._registered.get(model_type) or cls(model_type)

    @classmethod
    def list_available(cls) -> list[str]:
        """Return the types of causal language models that Transformers knows."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *cls._registered})

    @classmethod
    def register_template(cls, template: LLMTemplate) -> None:
        """Use a template for its type of model from now on."""
        cls._registered[template.model_type] = template

    @classmethod
    def register_scheme(cls, scheme_name: str, config: QuantizationConfig) -> None:
        """Make a scheme known under a name of one's own."""
        cls._schemes[scheme_name] = config

    @classmethod
    def unregister_scheme(cls, scheme_name: str) -> None:
        """Forget a scheme that was registered.

        Raises:
            ValueError: None has that name.
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
    ) -> Config:
        """Return the configuration of a model.

        Args:
            scheme: Name of the scheme of all layers.
            algorithm: Name or names of algorithms, applied in order.
            kv_cache_scheme: Name of the scheme of the key-value cache.
            min_kv_scale: Smallest scale of the cache.
            attention_scheme: Not supported in this version.
            layer_config: Name pattern to scheme, first match first.
            layer_type_config: Module type to scheme.
            exclude_layers: Patterns of layers that stay as they are, instead of the template's.
            algo_configs: Options of algorithms by name.
            shared_scale_groups: Groups of name endings that share per-tensor scales; by default
                the projections that are served fused, where scales have two levels.

        Raises:
            ValueError: A name is unknown; the nearest one is named.
        """
        if attention_scheme is not None:
            raise ValueError("attention_scheme is not supported: leave it out.")
        exclude = self.exclude_layers_name if exclude_layers is None else exclude_layers
        config = Config(
            global_quant_config=self._scheme(scheme),
            layer_quant_config={p: self._scheme(s) for p, s in (layer_config or {}).items()},
            layer_type_quant_config={
                kind: self._scheme(s) for kind, s in (layer_type_config or {}).items()
            },
            exclude=list(exclude),
            algo_config=algorithms(algorithm, algo_configs or {}),
            shared_scale_groups=_shared(scheme, shared_scale_groups),
        )
        if kv_cache_scheme is not None:
            config = with_kv_cache(config, self.kv_layers_name, kv_cache_scheme, min_kv_scale)
        return config

    def get_recipe(self, name: str) -> Config:
        """Return the configuration of a recipe: a scheme with the algorithms that serve it best.

        Args:
            name: Name of the recipe, such as ``w4``.

        Raises:
            ValueError: No recipe has that name; the nearest one is named.
        """
        scheme, options = recipe(name)
        return replace(self.get_config(scheme), algo_config=options)


def with_kv_cache(
    config: Config, patterns: list[str], scheme: str, min_kv_scale: float = 0.0
) -> Config:
    """Return a configuration that also quantizes the outputs of the key and value projections.

    Args:
        config: Configuration of the model.
        patterns: Patterns of the projections.
        scheme: Name of the scheme of the cache.
        min_kv_scale: Smallest scale of the cache.
    """
    spec = presets.kv_cache_scheme(scheme)
    cache = {}
    for pattern in patterns:
        base = config_for(pattern, nn.Linear, config) or QuantizationConfig()
        cache[pattern] = replace(base, output_tensors=spec)
    # What the caller said of a layer precedes; its outputs follow from kv_cache_quant_config.
    layers = {**config.layer_quant_config, **cache}
    return replace(
        config,
        layer_quant_config=layers,
        kv_cache_quant_config=cache,
        kv_cache_group=list(patterns),
        min_kv_scale=min_kv_scale,
    )


def _shared(scheme: str, groups: list[list[str]] | None) -> list[list[str]]:
    if groups is not None:
        return groups
    is_two_level = scheme.lower().startswith(("nvfp4", "fp4_block16"))
    return [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]] if is_two_level else []


def algorithms(names: str | list[str] | None, given: dict[str, AlgoConfig]) -> list[AlgoConfig]:
    """Return the options of algorithms by their documented names, in order.

    Args:
        names: Name or names.
        given: Options by name, instead of the default ones.

    Raises:
        ValueError: A name is unknown; the nearest one is named.
    """
    names = [names] if isinstance(names, str) else names or []
    aliases = {"smoothquant": "smooth"}
    found = []
    for name in names:
        key = one_of(name, [*ALGO_CONFIGS, *aliases, *given], "algorithm")
        key = aliases.get(key, key)
        found.append(given.get(name) or given.get(key) or ALGO_CONFIGS[key]())
    return found
