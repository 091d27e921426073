"""Proof that layers whose outputs are quantized as keys and values give nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import first_match
from quark.torch.quantization.nn.attention import AttentionRoute, uses_interface
from quark.torch.quantization.nn.layer import channel_count


def layers_to_prove(
    model: nn.Module, layers: Iterable[str], config: Config
) -> dict[str, list[str]]:
    """Return the layers that may give more than the keys and values they are quantized as.

    There are none if attention quantizes keys itself, which it knows. Two layers of a module with
    equally many outputs give keys and values.

    Args:
        model: A float model; its parameters need no values.
        layers: Names of the quantized layers.
        config: Configuration of the model.

    Returns:
        Names of attention modules -> names of their layers in the model.
    """
    found: dict[str, list[str]] = defaultdict(list)
    if config.kv_cache_post_rope:
        return found
    for name in layers:
        if first_match(name, config.kv_cache_quant_config):
            found[name.rpartition(".")[0]].append(name)
    return {
        name: children
        for name, children in found.items()
        if uses_interface(model.get_submodule(name)) and not _are_alike(model, children)
    }


def prove_cached_outputs(
    model: nn.Module, layers: Mapping[str, Sequence[str]], run: Callable[[], None]
) -> None:
    """Check that layers give no more channels than attention takes as keys and values.

    Args:
        model: A float model; its parameters need no values. It is unchanged afterwards.
        layers: Result of ``layers_to_prove``.
        run: Runs the model once. What it does not reach is not checked.

    Raises:
        ValueError: Layers give other outputs too, such as queries.
    """
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in layers}
    routes = {name: _CountingRoute(module.config, None) for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.config = routes[name]
        with eval_mode(model), torch.no_grad():
            run()
    finally:
        for name, module in modules.items():
            module.config = routes[name].config
    for name, children in layers.items():
        given = sum(_width(model.get_submodule(child)) for child in children)
        taken = routes[name].taken
        if taken and given > taken:
            raise ValueError(
                f"kv_cache_quant_config: {' and '.join(children)}: {given} outputs, of which "
                f"{taken} are keys and values. The others, such as queries, would be quantized "
                "too. Set kv_cache_post_rope=True (--kv_cache_post_rope): then attention "
                "quantizes keys and values alone."
            )


class _CountingRoute(AttentionRoute):
    """A route that counts channels of keys and values, and returns zeros as the output."""

    _own = (*AttentionRoute._own, "taken")
    taken: int = 0

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Count the channels of a token."""
        self.taken = sum(x.shape[1] * x.shape[3] for x in (key, value))
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, value.shape[-1]), None


def _are_alike(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether there are two layers, with equally many outputs."""
    return len(names) == 2 and len({_width(model.get_submodule(name)) for name in names}) == 1


def _width(layer: nn.Module) -> int:
    """Return the number of outputs of a layer."""
    return channel_count(layer, "output_tensors") or 0
