"""Keys of the cache, quantized as attention takes them: after rotary embedding.

Attention modules of Transformers pass queries, keys and values to the function that their
configuration names. One whose keys are quantized sees the configuration of the model through a
``KeyRoute``, which names a function of ours; that one quantizes and goes on to the function that
the model is set to. A cache holds what rotary embedding gave, so keys are quantized each time they
are read: under scales that are settled, or those of each token, to the same values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn

from quark.torch.graph.eval_mode import at_inference
from quark.torch.numerics.hadamard import hadamard, largest_order, rotate
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import first_match

_NAME = "quark"
_EAGER = "eager_attention_forward"  # how files of architectures end the name of their own function
_OTHERWISE = "it does not use the attention interface of Transformers"


class KeyRoute:
    """The configuration of a model as an attention module sees it whose keys are quantized.

    Attributes:
        config: The configuration itself. What is asked of this object, or set, goes there.
        projection: Name in the module of the layer that gives the keys; the quantizer of its
            outputs is that of the keys.
        rotates: Whether queries and keys are rotated before (R3).
    """

    _own: ClassVar[tuple[str, ...]] = ("config", "projection", "rotates")
    config: Any
    projection: str
    rotates: bool

    def __init__(self, config: Any, projection: str, rotates: bool = False) -> None:
        self.config, self.projection, self.rotates = config, projection, rotates

    @property
    def _attn_implementation(self) -> str:
        """The name under which Transformers finds our function."""
        from transformers import AttentionInterface

        AttentionInterface.register(_NAME, _attend)
        return _NAME

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__"):  # as it is before a copy has its attributes
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
        """Quantize keys, and do what the model is set to do with them.

        Args:
            module: The attention module.
            query: (batch, heads, tokens, size).
            key: (batch, key-value heads, tokens, size).
            value: (batch, key-value heads, tokens, size of values). Quantized too if the projection
                gives more than keys.
            *args: What the function takes besides.
            **kwargs: Likewise.
        """
        layer = module.get_submodule(self.projection)
        if self.rotates:
            rotation = _rotation(key.shape[-1])
            query, key = rotate(query, rotation), rotate(key, rotation)
        if layer.output_width > key.shape[1] * key.shape[3]:
            value = _quantized(layer, value)
        key = _quantized(layer, key)
        function = _function(type(module), self.config._attn_implementation)
        module.config = self.config  # some functions read it
        try:
            return function(module, query, key, value, *args, **kwargs)
        finally:
            module.config = self


def _attend(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.config.attend(module, *args, **kwargs)


def _quantized(layer: Any, heads: torch.Tensor) -> torch.Tensor:
    """Quantize (batch, heads, tokens, size) as the outputs (batch, tokens, channels) of a layer."""
    x = heads.transpose(1, 2)
    y: torch.Tensor = layer.quantized_output(x.flatten(2))
    return y.view(x.shape).transpose(1, 2)


@cache
def _rotation(size: int) -> torch.Tensor:
    """Return the rotation of heads: of blocks, where no Hadamard matrix has their size."""
    return hadamard(largest_order(size))


def _function(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return the function that an attention module would call, by its name in Transformers.

    Raises:
        LookupError: The module calls none.
    """
    forward: Any = inspect.unwrap(kind.forward)
    eager = next((n for n in forward.__code__.co_names if n.endswith(_EAGER)), "")
    scope = forward.__globals__
    found: Callable[..., Any] = scope["ALL_ATTENTION_FUNCTIONS"].get_interface(name, scope[eager])
    return found


def key_projections(layers: Mapping[str, QuantizationConfig], config: Config) -> dict[str, str]:
    """Return the attention modules whose keys are quantized after rotary embedding.

    Of the layers in one module that ``kv_cache_quant_config`` matches, the first one gives the
    keys: so do the architectures of Transformers declare them, and ``prove_keys`` checks it.

    Args:
        layers: Configuration of each quantized layer, in the order of the model.
        config: Configuration of the model.

    Returns:
        Name of each module, with the name in it of the layer that gives the keys.
    """
    found: dict[str, str] = {}
    for name, layer in layers.items() if config.kv_cache_post_rope else ():
        if layer.output_tensors and first_match(name, config.kv_cache_quant_config):
            parent, _, child = name.rpartition(".")
            found.setdefault(parent, child)
    return found


def check_routes(model: nn.Module, keys: Mapping[str, str]) -> None:
    """Raise if an attention module does not ask its configuration for a function.

    Raises:
        ValueError: One does not. The model is unchanged.
    """
    for name in keys:
        module: Any = model.get_submodule(name)
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            try:
                _function(type(module), "eager")
                continue
            except LookupError:
                pass
        raise _refusal(name, _OTHERWISE)


def prove_keys(model: nn.Module, keys: Mapping[str, str], run: Callable[[], None]) -> None:
    """Try out whether the projections give the keys, all of them, and no others read them.

    Their outputs are NaN in one forward pass, where attention gives zeros: the keys that a module
    takes must be NaN, and nothing behind it.

    Args:
        model: A float model. It is as before when this returns.
        keys: What ``key_projections`` returned.
        run: Runs the model once.

    Raises:
        ValueError: Keys come from elsewhere, or go elsewhere.
    """
    check_routes(model, keys)
    trials: dict[str, _Trial] = {}
    leaks: list[bool] = []
    hooks = [model.register_forward_hook(lambda _, __, output: leaks.append(_has_nan(output)))]
    for name, projection in keys.items():
        module: Any = model.get_submodule(name)
        module.config = trials[name] = _Trial(module.config, projection)
        hooks.append(module.get_submodule(projection).register_forward_hook(trials[name].mark))
    try:
        with at_inference(model), torch.no_grad():
            run()
    finally:
        unroute_keys(model)
        for hook in hooks:
            hook.remove()
    for name, trial in trials.items():
        if not trial.width:
            raise _refusal(name, f"nothing reaches its {trial.projection}")
        if trial.problem:
            raise _refusal(name, trial.problem)
    if any(leaks):
        raise _refusal(next(iter(keys)), "other layers read them too")


def route_keys(model: nn.Module, keys: Mapping[str, str], rotates: bool = False) -> None:
    """Let attention quantize keys instead of the projections that give them.

    Args:
        model: A model whose projections are quantized or packed; it is changed in place.
        keys: What ``key_projections`` returned.
        rotates: Whether queries and keys are rotated before.
    """
    for name, projection in keys.items():
        module: Any = model.get_submodule(name)
        module.get_submodule(projection).quantizes_output = False
        module.config = KeyRoute(module.config, projection, rotates)


def unroute_keys(model: nn.Module) -> None:
    """Undo ``route_keys``."""
    for module in list(model.modules()):
        route = getattr(module, "config", None)
        if isinstance(route, KeyRoute):
            module.config = route.config
            vars(module.get_submodule(route.projection)).pop("quantizes_output", None)


def key_routes(model: nn.Module) -> list[KeyRoute]:
    """Return the routes of all attention modules that have one."""
    found = (getattr(module, "config", None) for module in model.modules())
    return [route for route in found if isinstance(route, KeyRoute)]


class _Trial(KeyRoute):
    """A route that marks what a projection gives, looks where it arrives, and gives zeros."""

    _own = (*KeyRoute._own, "width", "problem")
    width: int
    problem: str | None

    def __init__(self, config: Any, projection: str) -> None:
        super().__init__(config, projection)
        self.width, self.problem = 0, _OTHERWISE

    def mark(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Replace the outputs (..., width) of the projection by NaN."""
        self.width = output.shape[-1]
        return torch.full_like(output, torch.nan)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Note what is wrong, and return zeros in the shape of the output."""
        width = key.shape[1] * key.shape[3]
        gives_values = bool(value.isnan().any())
        if not bool(key.isnan().all()) or width > self.width:
            self.problem = f"{self.projection} is not what gives them"
        elif gives_values is not (self.width > width):
            self.problem = f"{self.projection} gives neither keys alone nor keys and values"
        else:
            self.problem = None
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, value.shape[-1]), None


def _has_nan(output: Any) -> bool:
    """Whether the first tensor of what a model returns has NaN."""
    first = output if isinstance(output, torch.Tensor) else output[0]
    return bool(first.isnan().any())


def _refusal(name: str, problem: str) -> ValueError:
    return ValueError(
        f"kv_cache_post_rope: the keys of {name} cannot be quantized after rotary embedding: "
        f"{problem}. Set kv_cache_post_rope=False."
    )
