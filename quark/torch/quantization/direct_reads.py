"""Layers whose weight a model reads without calling them, such as ``dt_proj`` of Mamba.

The inputs of such a layer never pass through it, so nothing quantizes them: they stay in float, as
its outputs do, and its weight alone is quantized. The layers are found by running the model, on
data or on zeros; names of modules play no part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.quantized_mark import marked
from quark.torch.graph.replay import replace_forwards
from quark.torch.pipeline.batches import flatten_batches, run_batch, take_excerpt
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.match import with_layers
from quark.torch.quantization.config.resolution import limit_cache
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.dry_run import without_products, zero_batch

logger = logging.getLogger("quark")

Layers = Mapping[str, QuantizationConfig]


def quantizes_activations(layers: Layers) -> bool:
    """Whether the inputs or outputs of a layer are quantized."""
    return any(name not in PARAMETERS for layer in layers.values() for name, _ in layer.specs())


def leave_unpassed_in_float(
    model: nn.Module, config: Config, layers: Layers, batches: Iterable[Any] | None = None
) -> tuple[Config, dict[str, QuantizationConfig]]:
    """Return configuration and layers without inputs and outputs that pass through no layer.

    A warning names the layers. A model that runs neither on the data nor on zeros is left alone.

    Args:
        model: A float model, which is not changed; its parameters need no values.
        config: Configuration with the names of the model.
        layers: Configuration of each layer to quantize.
        batches: Data, of which the first tokens run; zeros without.
    """
    names = _find_unpassed(model, layers, batches) if quantizes_activations(layers) else []
    if not names:
        return config, dict(layers)
    changed = {n: replace(layers[n], input_tensors=None, output_tensors=None) for n in names}
    has_outputs = any(layers[name].output_tensors is not None for name in names)
    has_weights = not all(layer.is_empty for layer in changed.values())
    logger.warning(
        "The inputs%s of %d layers, such as %s, stay in float: %s reads their weights without "
        "calling them.%s",
        " and outputs" * has_outputs,
        len(names),
        names[0],
        type(model).__name__,
        " Their weights are quantized." * has_weights,
    )
    modules = {name: type(module) for name, module in model.named_modules()}
    config = with_layers(modules, limit_cache(config, modules, set(names)), changed)
    left = {name: changed.get(name, layer) for name, layer in layers.items()}
    return config, {name: layer for name, layer in left.items() if not layer.is_empty}


def _find_unpassed(model: nn.Module, layers: Layers, batches: Iterable[Any] | None) -> list[str]:
    """Return the layers whose weight is read while they are not called, in a run without values."""
    wanted = [name for name, layer in layers.items() if quantizes_activations({name: layer})]
    # As a quantized model of Transformers, which may call what a float one reads.
    with marked(model), suppress(Exception):  # models that cannot be copied
        shape = without_products(model)
        for make in (partial(_excerpt, batches), partial(zero_batch, model)):
            with suppress(Exception):  # whatever the code of a model raises: the run will tell
                if (batch := make()) is not None:
                    return find_direct_reads(shape, wanted, partial(run_batch, shape, batch))
    return []


def _excerpt(batches: Iterable[Any] | None) -> Any:
    """Return the first tokens of data; None without."""
    first = None if batches is None else next(flatten_batches(batches), None)
    return None if first is None else take_excerpt(first)


def find_direct_reads(
    model: nn.Module, names: Iterable[str], run: Callable[[], object]
) -> list[str]:
    """Return the layers whose weight an operation reads while the layer is not called.

    A weight that two layers share is read directly if neither of them is running.

    Args:
        model: The model. It is unchanged afterwards.
        names: Names of layers with a weight; those that the model lacks are left out.
        run: Runs the model once.
    """
    modules = dict(model.named_modules())
    own = {n: p for n, m in modules.items() if (p := m._parameters.get("weight")) is not None}
    weights = {name: id(own[name]) for name in names if name in own}
    reads = _Reads(weights.values())
    owners = {name: modules[name] for name, weight in own.items() if reads.watches(weight)}
    forwards = {name: partial(reads.run, name, m, m.forward) for name, m in owners.items()}
    with replace_forwards(model, forwards), eval_mode(model), torch.no_grad(), reads:
        run()
    return [n for n, weight in weights.items() if weight in reads.direct and n not in reads.called]


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which weights operations take outside of the layers that own them.

    Args:
        weights: Identifiers of the weights.

    Attributes:
        called: Names of the layers that ran.
        direct: Identifiers of the weights that were read directly.
    """

    def __init__(self, weights: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = set(weights)
        self._running: list[int] = []
        self.called: set[str] = set()
        self.direct: set[int] = set()

    def watches(self, weight: nn.Parameter) -> bool:
        """Whether reads of a weight are recorded."""
        return id(weight) in self._weights

    def run(
        self, name: str, layer: nn.Module, forward: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Run the ``forward`` of a layer."""
        self.called.add(name)
        self._running.append(id(layer._parameters.get("weight")))
        try:
            return forward(*args, **options)
        finally:
            self._running.pop()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        read = set(map(id, tree_leaves((args, kwargs)))) & self._weights
        self.direct |= read - set(self._running)
        return func(*args, **(kwargs or {}))
