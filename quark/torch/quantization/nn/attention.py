"""Quantization inside of attention: queries and keys after rotary embedding, and probabilities.

Attention modules of Transformers pass queries, keys and values to the function that their
configuration names. A module gets an ``AttentionRoute`` in place of its configuration. The route
names a function of this file, which quantizes queries and keys and calls the function that the
model is set to. If the module has a quantizer of probabilities (``nn.probabilities``), results of
softmax are quantized meanwhile. A cache holds unquantized keys after rotary embedding, so keys are
quantized each time they are read. Scales are static or per token, so each time gives the same
values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from quark.torch.numerics.custom_operators import rotate_by_hadamard
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import first_match
from quark.torch.quantization.nn.softmax import QuantizedSoftmax

PROBABILITIES = (
    "prob_output_quantizer"  # attribute of attention modules; AMD Quark stores its scale
)
_NAME = "quark"
_EAGER = "eager_attention_forward"  # ending of the name of the default function of an architecture
_OPTIONS = {  # tensor -> its option, and what to do where the option cannot be followed
    "keys": ("kv_cache_post_rope", "Set kv_cache_post_rope=False"),
    "queries": ("query_quant_config", "Leave query_quant_config out"),
}
OTHERWISE = "it does not use the attention interface of Transformers"


class Projections(NamedTuple):
    """Layers of an attention module whose outputs are quantized after rotary embedding.

    Attributes:
        keys: Name in the module of the layer that computes the keys, or None.
        queries: Likewise of the layer that computes the queries.
    """

    keys: str | None = None
    queries: str | None = None


class AttentionRoute:
    """Stands for the configuration of the model in an attention module.

    Attributes:
        config: The configuration. Attributes of the route are read and set there.
        projection: Name in the module of the layer that computes the keys; its output quantizer
            quantizes the keys. None if they are not quantized here.
        queries: Likewise of the layer that computes the queries.
        rotates: Whether queries and keys are rotated before they are quantized (R3).
        watch: Takes keys, values, the output, and the function that computes the result for other
            keys and values; None for nothing.
    """

    _own: ClassVar[tuple[str, ...]] = ("config", "projection", "queries", "rotates", "watch")
    config: Any
    projection: str | None
    queries: str | None = None
    rotates: bool
    watch: Callable[..., None] | None = None

    def __init__(self, config: Any, projection: str | None, rotates: bool = False) -> None:
        self.config, self.projection, self.rotates = config, projection, rotates

    @property
    def _attn_implementation(self) -> str:
        """Name of ``_attend`` in the registry of Transformers."""
        from transformers import AttentionInterface

        AttentionInterface.register(_NAME, _attend)
        return _NAME

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__"):  # while a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self.config, name, value)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Quantize queries and keys, then call the attention function that the model is set to.

        Results of softmax are quantized if the module has a quantizer of probabilities.

        Args:
            module: The attention module.
            query: (batch, heads, tokens, size).
            key: (batch, key-value heads, tokens, size).
            value: (batch, key-value heads, tokens, size of values). Quantized too if the projection
                computes keys and values.
            *args: Further arguments of the function.
            **kwargs: Likewise.

        Raises:
            ValueError: Probabilities are quantized, and the model is not set to the default
                function of its architecture, or that calls softmax several times or never.
        """
        query, key, value = self._quantized(module, query, key, value)
        name = self.config._attn_implementation
        function = _function(type(module), name)
        quantizer = module._modules.get(PROBABILITIES)
        if quantizer is not None and name not in (None, "eager"):
            raise ValueError(
                f"The probabilities of attention are quantized, which {name!r} does not compute: "
                "call model.set_attn_implementation('eager')."
            )
        softmax = QuantizedSoftmax(quantizer, query.dtype) if quantizer is not None else None

        def compute(key: torch.Tensor, value: torch.Tensor) -> Any:
            return function(module, query, key, value, *args, **kwargs)

        module.config = self.config  # some functions read it
        try:
            with nullcontext() if softmax is None else softmax:
                result = compute(key, value)
            if self.watch is not None:
                self.watch(key, value, result[0], compute)
        finally:
            module.config = self
        if softmax is not None and softmax.calls != 1:
            raise ValueError(
                f"softmax_quant_spec: the attention of {type(module).__name__} calls softmax "
                f"{softmax.calls} times, expected once. Leave it out."
            )
        return result

    def _quantized(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what attention takes: rotated and quantized, as far as that happens here."""
        if self.rotates:
            query, key = rotate_by_hadamard(query), rotate_by_hadamard(key)
        if self.queries is not None:
            query = quantized_heads(module.get_submodule(self.queries), query)
        if self.projection is not None:
            key, value = _quantized_cache(module.get_submodule(self.projection), key, value)
        return query, key, value


def _attend(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.config.attend(module, *args, **kwargs)


def quantized_heads(layer: Any, heads: torch.Tensor) -> torch.Tensor:
    """Quantize (batch, heads, tokens, size) as the outputs (batch, tokens, channels) of a layer."""
    x = heads.transpose(1, 2)
    y: torch.Tensor = layer.quantized_output(x.flatten(2))
    return y.view(x.shape).transpose(1, 2)


def _quantized_cache(
    layer: Any, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize keys, and values too if the layer that computes keys computes them.

    Static scales of heads or channels belong to all outputs of a layer. Queries, keys and values
    are in that order then, and zeros stand for the queries, whose scales nothing uses.
    """
    others = layer.output_width - key.shape[1] * key.shape[3]
    if others <= 0:
        return quantized_heads(layer, key), value
    if not layer.shape("output_tensors"):
        value = quantized_heads(layer, value)
        return quantized_heads(layer, key), value
    keys, values = key.transpose(1, 2), value.transpose(1, 2)
    parts = [keys.flatten(2), values.flatten(2)]
    widths = [others - parts[1].shape[2], parts[0].shape[2], parts[1].shape[2]]
    queries = parts[0].new_zeros(*parts[0].shape[:2], widths[0])
    outputs = layer.quantized_output(torch.cat([queries, *parts], 2))
    _, new_keys, new_values = outputs.split(widths, 2)
    return new_keys.view(keys.shape).transpose(1, 2), new_values.view(values.shape).transpose(1, 2)


def _function(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return the attention function with a name in Transformers, as an attention module does.

    Raises:
        LookupError: The module does not use the attention interface.
    """
    forward: Any = inspect.unwrap(kind.forward)
    eager = next((n for n in forward.__code__.co_names if n.endswith(_EAGER)), "")
    scope = forward.__globals__
    interface = scope["ALL_ATTENTION_FUNCTIONS"]
    function: Callable[..., Any] = interface.get_interface(name, scope[eager])
    return function


def attention_projections(
    layers: Mapping[str, QuantizationConfig], config: Config
) -> dict[str, Projections]:
    """Return the attention modules whose queries or keys are quantized after rotary embedding.

    If ``kv_cache_quant_config`` matches several layers of a module, the first computes the keys.
    The architectures of Transformers declare keys before values; ``prove_projections`` checks it.

    Args:
        layers: Configuration of each quantized layer, in the order of the model.
        config: Configuration of the model.

    Returns:
        Name of each module -> its layers.
    """
    keys: dict[str, str] = {}
    queries: dict[str, str] = {}
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        if not layer.output_tensors:
            continue
        if config.kv_cache_post_rope and first_match(name, config.kv_cache_quant_config):
            keys.setdefault(parent, child)
        if first_match(name, config.query_quant_config):
            queries.setdefault(parent, child)
    return {n: Projections(keys.get(n), queries.get(n)) for n in {**keys, **queries}}


def check_routes(model: nn.Module, projections: Mapping[str, Projections]) -> None:
    """Raise if an attention module does not take its function from its configuration.

    Raises:
        ValueError: A module does not use the attention interface of Transformers.
    """
    for name, layers in projections.items():
        if not uses_interface(model.get_submodule(name)):
            raise refusal(name, "queries" if layers.keys is None else "keys", OTHERWISE)


def refusal(name: str, tensor: str, problem: str) -> ValueError:
    """Return the error that an attention module cannot quantize a tensor after rotary embedding.

    Args:
        name: Name of the module.
        tensor: "keys" or "queries".
        problem: The reason, as a clause.
    """
    option, remedy = _OPTIONS[tensor]
    return ValueError(
        f"{option}: the {tensor} of {name} cannot be quantized after rotary embedding: "
        f"{problem}. {remedy}."
    )


def uses_interface(module: nn.Module) -> bool:
    """Whether a module takes its attention function from its configuration."""
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return False
    try:
        _function(type(module), "eager")
    except LookupError:
        return False
    return True


def route_projections(
    model: nn.Module, projections: Mapping[str, Projections], rotates: bool = False
) -> None:
    """Quantize queries and keys in attention instead of in the layers that compute them.

    Args:
        model: A model with quantized layers; it is changed in place.
        projections: Result of ``attention_projections``.
        rotates: Whether queries and keys are rotated before keys are quantized.
    """
    for name, layers in projections.items():
        module: Any = model.get_submodule(name)
        for layer in filter(None, layers):
            module.get_submodule(layer).quantizes_output = False
        route = route_attention(module)
        route.projection, route.queries = layers
        route.rotates = rotates and layers.keys is not None


def route_attention(module: Any) -> AttentionRoute:
    """Return the route of an attention module, which gets one if it has none."""
    if not isinstance(module.config, AttentionRoute):
        module.config = AttentionRoute(module.config, None)
    route: AttentionRoute = module.config
    return route


def key_routes(model: nn.Module) -> list[AttentionRoute]:
    """Return the routes of all attention modules with keys quantized after rotary embedding."""
    return [route for route in attention_routes(model) if route.projection is not None]


def attention_routes(model: nn.Module) -> list[AttentionRoute]:
    """Return the routes of all modules with queries or keys quantized after rotary embedding."""
    configs = (getattr(module, "config", None) for module in model.modules())
    routes = [config for config in configs if isinstance(config, AttentionRoute)]
    return [route for route in routes if route.projection or route.queries]
