"""Layers that calibration data does not reach because it lacks a modality, such as images.

Text alone reaches no vision tower, no projector, and no block that attends to images. Such layers
stay in float; other layers without data are errors, as they are in a language model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.pipeline.batches import flatten_batches, run_batch
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.parts import Part, find_parts
from quark.torch.quantization.config.resolution import limit_cache

logger = logging.getLogger("quark")

_BLOCK = re.compile(r"(.*?\.)?\d+(?=\.)")  # "model.layers.3" of "model.layers.3.mlp.experts.0.up"


def leave_unreached_in_float(
    model: nn.Module,
    config: Config,
    layers: dict[str, QuantizationConfig],
    batches: Iterable[Any],
) -> tuple[Config, dict[str, QuantizationConfig]]:
    """Return configuration and layers without those that need a modality which the data lacks.

    Args:
        model: A float model with towers, which is not changed.
        config: Configuration of the model.
        layers: Configuration of each layer to quantize.
        batches: Calibration data, repeatable. The first batch of each set of arguments is run.
    """
    parts = [part for part in find_parts(model) if part.kind != "router"]
    towers = [part.name for part in parts if part.kind == "tower"]
    reached = _reached_modules(model, {*towers, *layers}, batches)
    if reached.issuperset(towers):
        return config, layers
    idle = _idle_layers(parts, layers, reached)
    if not idle or len(idle) == len(layers):
        return config, layers
    titles = dict.fromkeys(p.title for p in parts if p.name in towers and p.name not in reached)
    logger.warning(
        "%d layers, such as %s, stay in float: the data does not reach the %s. Calibrate with "
        "batches of the processor of the model to quantize them.",
        len(idle),
        idle[0],
        ", ".join(titles),
    )
    names = [name for name, _ in model.named_modules()]
    config = limit_cache(config, names, set(idle))
    config = replace(config, exclude=[*config.exclude, *map(literal, idle)])
    return config, {name: layer for name, layer in layers.items() if name not in idle}


def _reached_modules(model: nn.Module, names: Collection[str], batches: Iterable[Any]) -> set[str]:
    """Return the modules that run on the first batch of each set of arguments."""
    reached: set[str] = set()
    kinds: set[frozenset[str]] = set()
    with _record_calls(model, names, reached.add), eval_mode(model), torch.no_grad():
        for batch in flatten_batches(batches):
            kind = frozenset(_arguments(batch))
            if kind not in kinds:
                kinds.add(kind)
                run_batch(model, batch)
    return reached


def _arguments(batch: Any) -> Iterator[str]:
    """Iterate over the arguments that a batch gives the model, by name or number."""
    items = batch.items() if hasattr(batch, "items") else enumerate(batch)
    if isinstance(batch, torch.Tensor):
        items = enumerate([batch])
    return (str(key) for key, value in items if value is not None)


@contextmanager
def _record_calls(
    model: nn.Module, names: Iterable[str], record: Callable[[str], None]
) -> Iterator[None]:
    """Record the name of each of some modules when it is called."""
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: record(name))
        for name in names
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _idle_layers(
    parts: Iterable[Part], layers: Mapping[str, Any], reached: Collection[str]
) -> list[str]:
    """Return the layers of parts and of blocks of which no layer was reached."""
    groups: dict[str, list[str]] = {}
    for name in layers:
        part = next((part.name for part in parts if part.holds(name)), None)
        block = _BLOCK.match(name)
        place = part or (block[0] if block else None)
        if place is not None:
            groups.setdefault(place, []).append(name)
    idle = {n for names in groups.values() if not set(names) & set(reached) for n in names}
    return [name for name in layers if name in idle]
