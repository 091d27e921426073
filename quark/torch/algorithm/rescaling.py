"""The rescalings an algorithm may use: all that were proved, or those that a file names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from quark.torch.graph.structure import Edit, ScaleGroup
from quark.torch.pipeline.accumulators import Gram, observing
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.runner import Block
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.layer import QuantMixin

logger = logging.getLogger(__name__)


def check_served(
    layers: Mapping[str, QuantizationConfig],
    what: str,
    wanted: Callable[[QuantizationConfig], bool],
) -> None:
    """Raise if no layer is quantized in a way that an algorithm serves.

    Raises:
        ValueError: None of the configurations is wanted.
    """
    if not any(wanted(layer) for layer in layers.values()):
        raise ValueError(
            f"{what} serves none of the layers to be quantized: it needs "
            + ("inputs (input_tensors)" if "smooth" in what else "weights")
            + " in a format with scales. Change the scheme, or leave the algorithm out."
        )


def usable_groups(
    context: Context,
    what: str,
    wanted: Callable[[QuantizationConfig], bool],
    written: list[dict[str, Any]] | None = None,
    decoder: str | None = None,
) -> list[ScaleGroup]:
    """Return the rescalings that can help: a consumer is quantized, no quantized output changes.

    Args:
        context: The model and what was found of it.
        what: Name of the algorithm, for messages.
        wanted: Whether a layer of this configuration gains from rescaled inputs.
        written: ``scaling_layers`` of a documented file: dictionaries with ``prev_op`` and
            ``layers``, names relative to a decoder block. Empty for all.
        decoder: Name of the list of decoder blocks that these are relative to.

    Raises:
        ValueError: Nothing can be rescaled to any use, or what is written cannot be.
    """
    groups = list(context.structure.groups)
    if written:
        groups = _named(context, what, written, decoder or "")
    groups = [group for group in groups if _gains(context, group, wanted)]
    if not groups:
        reasons = {f"{r.producer}: {r.reason}" for r in context.structure.rejected}
        found = "; ".join(sorted(reasons)[:3]) or "no layer's outputs feed a quantized one directly"
        raise ValueError(f"{what} found nothing to rescale ({found}).")
    return groups


def consumer_edits(group: ScaleGroup, context: Context) -> list[tuple[str, QuantMixin, Edit]]:
    """Return name, layer and edit of the weight of each quantized consumer."""
    edits = {edit.parameter: edit for edit in group.edits if edit.power > 0}
    names = [n for n in group.consumers if n in context.layers and f"{n}.weight" in edits]
    return [(n, context.layers[n], edits[f"{n}.weight"]) for n in names]


def producer_edit(group: ScaleGroup, context: Context) -> tuple[QuantMixin, Edit] | None:
    """Return layer and edit of the weight of the producer if it is a quantized layer."""
    layer = context.layers.get(group.producer)
    for edit in group.edits:
        if layer is not None and edit.power < 0 and edit.parameter == f"{group.producer}.weight":
            return layer, edit
    return None


def readers(group: ScaleGroup, context: Context) -> list[str]:
    """Return the quantized consumers to look at: one of those that read the very same tensor."""
    names = [name for name, _, _ in consumer_edits(group, context)]
    return list(dict.fromkeys(first_reader(name, names, context) for name in names))


def first_reader(name: str, names: Iterable[str], context: Context) -> str:
    """Return the first of ``names`` that reads what layer ``name`` reads, rotated alike."""
    shared = next((s for s in context.structure.shared_inputs if name in s), (name,))
    is_rotated = context.layers[name].input_rotation is not None
    alike = (n for n in names if (context.layers[n].input_rotation is not None) == is_rotated)
    return next((n for n in alike if n in shared), name)


def to_factors(values: torch.Tensor, edit: Edit, size: int, how: str) -> torch.Tensor:
    """Reduce magnitudes of channels to one for each factor.

    Where channels take a power of their factor, the root of their magnitude counts.

    Args:
        values: (channels,), not negative.
        edit: Which factor each channel takes, and to what power.
        size: Number of factors.
        how: "amax" or "mean".
    """
    index = edit.index.to(values.device)
    taken = index >= 0
    out = torch.zeros(size, dtype=values.dtype, device=values.device)
    roots = values[taken] ** (1 / abs(edit.power))
    return out.scatter_reduce_(0, index[taken], roots, how, include_self=False)


def to_channels(factors: torch.Tensor, edit: Edit) -> torch.Tensor:
    """Return what each channel of a parameter is multiplied by, 1 where it has no factor."""
    one = torch.ones(1, dtype=factors.dtype, device=factors.device)
    return torch.cat([factors, one])[edit.index.to(factors.device)] ** edit.power


def along(by: torch.Tensor, weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Return values of channels in a shape that multiplies a weight along an axis."""
    shape = [1] * weight.dim()
    shape[axis] = -1
    return by.view(shape)


def as_rows(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a weight as (outputs, inputs), given the axis of its inputs."""
    return weight.movedim(axis, -1).flatten(0, -2)


def _gains(context: Context, group: ScaleGroup, wanted: Callable[[Any], bool]) -> bool:
    producer = context.layers.get(group.producer)
    if producer is not None and producer.output_quantizer is not None:
        logger.info("%s is left alone: its quantized outputs would change.", group.producer)
        return False
    layers = {n: context.layers[n] for n in group.consumers if n in context.layers}
    if any(n in context.rotated or m.input_rotation is not None for n, m in layers.items()):
        logger.info("%s is left alone: what it gives is rotated.", group.producer)
        return False
    return any(wanted(layer.quant_config) for layer in layers.values())


def _named(
    context: Context,
    what: str,
    written: Iterable[dict[str, Any]],
    decoder: str,
) -> list[ScaleGroup]:
    chosen = []
    for entry in written:
        prev, layers = str(entry.get("prev_op")), [str(n) for n in entry.get("layers", [])]
        found = [
            group
            for group in context.structure.groups
            if group.block.startswith(decoder)
            and group.producer == f"{group.block}.{prev}"
            and {f"{group.block}.{layer}" for layer in layers} & set(group.consumers)
        ]
        if not found:
            _refuse(context, what, prev, layers)
        for group in found:
            more = set(group.consumers) - {f"{group.block}.{layer}" for layer in layers}
            if more:
                logger.info("%s: %s read it too and are rescaled.", group.producer, sorted(more))
        chosen += found
    return chosen


def _refuse(context: Context, what: str, prev: str, layers: list[str]) -> None:
    reasons = [r.reason for r in context.structure.rejected if r.producer.endswith(f".{prev}")]
    near = sorted(
        {
            group.producer.removeprefix(f"{group.block}.")
            for group in context.structure.groups
            if group.block
        }
    )
    raise ValueError(
        f"{what}: scaling_layers has prev_op={prev!r} with layers={layers}, which cannot be "
        f"rescaled: {reasons[0] if reasons else 'no decoder block has them so connected'}. "
        f"What can be: {', '.join(near[:8]) or 'nothing'}."
    )


def block_layers(
    context: Context, block: str, wanted: Callable[[QuantizationConfig], bool]
) -> dict[str, QuantMixin]:
    """Return the layers of a block whose configuration is wanted, by name."""
    inside = {n: m for n, m in context.layers.items() if n.startswith(f"{block}.")}
    return {name: layer for name, layer in inside.items() if wanted(layer.quant_config)}


def observe_grams(
    context: Context, block: Block, layers: Mapping[str, QuantMixin]
) -> dict[str, Gram]:
    """Run the data through a block once and return the statistics of the inputs of its layers.

    Layers that read the same tensor share them. Where statistics were kept, nothing runs.
    """
    if context.grams is not None:
        return context.grams(layers)
    grams: dict[str, Gram] = {}
    observers = []
    for name in layers:
        first = first_reader(name, layers, context)
        if first not in grams:
            grams[first] = Gram()
            observers.append((layers[first], grams[first]))
        grams[name] = grams[first]
    with observing(observers, lambda: block.mask):
        block.run()
    return grams
