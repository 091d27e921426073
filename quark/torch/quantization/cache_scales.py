"""Scales of cached heads, chosen by the error of the outputs of attention.

The squared error of keys and values counts all tokens alike. Attention does not: most queries look
at a few tokens, whose keys decide the others' share, and channels of keys matter as far as queries
have them. So each head takes the scale under which the outputs of its queries change least: that of
its keys with values in float, and that of its values with keys in float.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.numerics.scales import round_scale
from quark.torch.pipeline.model_pass import run_data
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.nn.attention import AttentionRoute, key_routes, quantized_heads
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.padding import without_padding
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.quantization.observer.heads import PerHeadMSEObserver

FACTORS = tuple(2.0 ** (i / 4) for i in range(-4, 9))  # of the scale with the least squared error
_FIRST = FACTORS.index(1.0)

Attend = Callable[[torch.Tensor, torch.Tensor], Any]


def searches_heads(config: Config) -> bool:
    """Whether a configuration has cached heads whose scales ``search_head_scales`` chooses."""
    caches = (layer.output_tensors for layer in config.kv_cache_quant_config.values())
    are_searched = (c is not None and c.observer_cls is PerHeadMSEObserver for c in caches)
    return config.kv_cache_post_rope and any(are_searched)


@torch.no_grad()
def search_head_scales(model: nn.Module, batches: Iterable[Any]) -> None:
    """Choose the scales of cached heads that ``PerHeadMSEObserver`` has observed.

    Keys must be quantized after rotary embedding: attention sees them and the queries there. A
    projection of keys and values together keeps the scales that it has.

    Args:
        model: A calibrated model whose quantizers are disabled; scales are changed in place.
        batches: The calibration data. All processes run all of it.
    """
    searches = _searches(model)
    names = {name for name, _ in searches}
    observe = partial(_watching, [search for _, search in searches])
    run_data(model, batches, "scales of the cache", observe=observe, observed=names)
    for _, search in searches:
        search.apply()


class _Search:
    """The search of an attention module.

    Args:
        route: Its route.
        layers: The layers that compute keys and values, None for each that is not searched.
    """

    def __init__(
        self, route: AttentionRoute, layers: tuple[FakeQuantizedLayer | None, ...]
    ) -> None:
        self.route, self._layers = route, layers
        self._errors: dict[int, torch.Tensor] = {}  # of keys (0) and values (1), (factors, heads)

    def watch(
        self, key: torch.Tensor, value: torch.Tensor, expected: torch.Tensor, attend: Attend
    ) -> None:
        """Add the errors of a batch.

        Args:
            key: (batch, key-value heads, tokens, size).
            value: Likewise.
            expected: Output of attention, (batch, tokens, heads, size of values).
            attend: Returns a tuple for other keys and values, with this output in front.
        """
        for index, layer in enumerate(self._layers):
            if layer is None or _heads(layer).numel() != key.shape[1]:
                continue
            quantizer, found = _quantizer(layer), []
            scale = quantizer.scale
            quantizer.enabled = True
            try:
                for factor in FACTORS:
                    quantizer.scale = _scaled(quantizer, scale, factor)
                    tried = [key, value]
                    tried[index] = quantized_heads(layer, tried[index])
                    found.append(_errors_of_heads(attend(*tried)[0] - expected, key.shape[1]))
            finally:
                quantizer.scale, quantizer.enabled = scale, False
            errors = torch.stack(found)
            self._errors[index] = self._errors.get(index, 0.0) + errors

    def apply(self) -> None:
        """Set the best scale of each head; the first one where none is better."""
        for index, errors in self._errors.items():
            layer = self._layers[index]
            assert layer is not None
            least, best = errors.min(0)
            best = best.where(least < errors[_FIRST], _FIRST)
            factors = torch.tensor(FACTORS, dtype=torch.float32, device=best.device)[best]
            quantizer = _quantizer(layer)
            quantizer.scale = _scaled(quantizer, quantizer.scale, factors)


def _scaled(
    quantizer: TensorQuantizer, scale: torch.Tensor | None, factor: float | torch.Tensor
) -> torch.Tensor:
    assert scale is not None
    return round_scale((scale.float() * factor).to(scale.dtype), quantizer.scheme.scale)


def _errors_of_heads(change: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the squared errors of the outputs whose queries meet each head, (heads,) float64.

    Args:
        change: (batch, tokens, query heads, size).
        heads: Number of key-value heads; adjacent queries share one.
    """
    squares = without_padding(change).float().square().sum((0, 1, 3))  # (query heads,)
    return squares.view(heads, -1).sum(1).double()


def _quantizer(layer: FakeQuantizedLayer) -> TensorQuantizer:
    quantizer = layer.quantizers()["output_tensors"]
    assert isinstance(quantizer, TensorQuantizer)
    return quantizer


def _heads(layer: FakeQuantizedLayer) -> torch.Tensor:
    scale = _quantizer(layer).scale
    assert scale is not None
    return scale


def _searches(model: nn.Module) -> list[tuple[str, _Search]]:
    """Return the search of each attention module, with the name of the module."""
    routes = {id(route) for route in key_routes(model)}
    searches = []
    for name, module in model.named_modules():
        route = getattr(module, "config", None)
        if not isinstance(route, AttentionRoute) or id(route) not in routes:
            continue
        keys = module.get_submodule(str(route.projection))
        others = [
            m for n, m in module.named_children() if n not in (route.projection, route.queries)
        ]
        values = [m for m in others if _is_searched(m)]
        layers = keys if _is_searched(keys) else None, values[0] if len(values) == 1 else None
        if any(layer is not None for layer in layers):
            searches.append((name, _Search(route, layers)))
    return searches


def _is_searched(module: nn.Module) -> bool:
    """Whether a layer has static scales of heads that were chosen by squared error."""
    if not isinstance(module, FakeQuantizedLayer):
        return False
    quantizer = module.quantizers().get("output_tensors")
    if quantizer is None or not quantizer.scheme.symmetric:
        return False
    return isinstance(quantizer.observer, PerHeadMSEObserver)


@contextmanager
def _watching(searches: list[_Search]) -> Iterator[None]:
    """Let attention pass keys, values and outputs to the searches while the context is open."""
    for search in searches:
        search.route.watch = search.watch
    try:
        yield
    finally:
        for search in searches:
            search.route.watch = None
