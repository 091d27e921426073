"""Rescalings that an algorithm may use: all that were proved, or those that a file names."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from quark.torch.algorithm.layers import (
    Predicate,
    block_layers,
    fake_quantized_weight,
    has_quantized_weight,
)
from quark.torch.algorithm.named_modules import has_end, warn_of_names
from quark.torch.graph.block_selection import is_inside
from quark.torch.graph.structure import Edit, RescalingGroup
from quark.torch.pipeline.context import Context
from quark.torch.quantization.config.algo import AutoSmoothQuantConfig, AWQConfig, SmoothQuantConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)

RescalingConfig = SmoothQuantConfig | AutoSmoothQuantConfig | AWQConfig


# ---- selection of groups ------------------------------------------------------------------------


def select_groups(
    context: Context, options: RescalingConfig, predicate: Predicate
) -> list[RescalingGroup]:
    """Return the groups that an algorithm may rescale to reduce errors.

    A consumer of each is quantized, and no quantized output and no rotated tensor changes.

    Args:
        context: The model and its structure.
        options: Options of the algorithm. ``scaling_layers`` holds dictionaries with ``prev_op``
            and ``layers``, whose names are relative to a decoder block in the list
            ``model_decoder_layers``; None or an empty list selects all groups.
        predicate: Whether a layer of this configuration benefits from rescaled inputs.

    Raises:
        ValueError: No group is left, or ``scaling_layers`` names layers that cannot be rescaled.
    """
    groups = list(context.structure.groups)
    if options.scaling_layers:
        groups = _named_groups(context, options, options.scaling_layers)
    groups = [group for group in groups if _is_usable(context, group, predicate)]
    if not groups:
        examples: dict[str, str] = {}  # kind of reason, without the place -> first of its kind
        for text in sorted(f"{r.producer}: {r.reason}" for r in context.structure.rejected):
            examples.setdefault(text.partition(": ")[2].partition(" in ")[0], text)
        first = "; ".join(examples.values()) or "no layer's outputs feed a quantized one directly"
        raise ValueError(
            f"{options.name} found nothing to rescale ({first}). Leave it out, or choose an "
            "algorithm that rounds weights, such as gptq."
        )
    return groups


def require_groups(
    context: Context, options: RescalingConfig, predicate: Predicate
) -> Collection[str]:
    """Raise if nothing can be rescaled; no input is rotated.

    Raises:
        ValueError: As in ``select_groups``.
    """
    select_groups(context, options, predicate)
    return ()


def groups_by_unit(
    context: Context, groups: Iterable[RescalingGroup]
) -> dict[str, list[RescalingGroup]]:
    """Return groups by name of the unit that holds their modules, empty for several units."""
    result: dict[str, list[RescalingGroup]] = defaultdict(list)
    for group in groups:
        modules = (group.producer, *group.consumers)
        units = (u for u in context.structure.units if all(is_inside(m, u) for m in modules))
        result[group.block or next(units, "")].append(group)
    return result


def rescaled_units(context: Context, groups: Collection[str], all_layers: bool) -> list[str]:
    """Return the units that data runs through one by one to rescale layers.

    Args:
        context: The model.
        groups: Units with groups.
        all_layers: Whether other units with quantized weights are needed too.
    """
    structure = context.structure
    return [
        unit
        for unit in structure.units
        if unit in structure.blocks
        or unit in groups
        or (all_layers and block_layers(context, unit, has_quantized_weight))
    ]


def _is_usable(context: Context, group: RescalingGroup, predicate: Predicate) -> bool:
    producer = context.layers.get(group.producer)
    if producer is not None and producer.output_quantizer is not None:
        logger.info("%s is not rescaled: its outputs are quantized.", group.producer)
        return False
    layers = {n: context.layers[n] for n in group.consumers if n in context.layers}
    if any(n in context.rotated or m.input_rotation is not None for n, m in layers.items()):
        logger.info("%s is not rescaled: its outputs are rotated.", group.producer)
        return False
    return any(predicate(layer.quant_config) for layer in layers.values())


def _named_groups(
    context: Context, options: RescalingConfig, entries: Iterable[dict[str, Any]]
) -> list[RescalingGroup]:
    """Return the groups that entries of ``scaling_layers`` name, each once.

    Raises:
        ValueError: ``model_decoder_layers`` names no block, or an entry no group, or a layer that
            does not read its producer.
    """
    decoder, blocks = options.model_decoder_layers or "", context.structure.blocks
    if not any(block.startswith(decoder) for block in blocks) and blocks:
        raise ValueError(
            f"{options.name}: model_decoder_layers={decoder!r} names no decoder block. "
            f"Give {blocks[0].rpartition('.')[0]!r}, or leave it out."
        )
    selected: list[RescalingGroup] = []
    modules = {name for name, _ in context.model.named_modules()}
    for entry in entries:
        producer, layers = _read_entry(entry, options.name)
        groups = [
            group
            for group in context.structure.groups
            if group.block.startswith(decoder)
            and group.producer == f"{group.block}.{producer}"
            and {f"{group.block}.{layer}" for layer in layers} & set(group.consumers)
        ]
        if not groups:
            raise ValueError(_not_rescalable(context, options.name, producer, layers))
        warn_of_names(context, f"{options.name}: scaling_layers", layers, has_end)
        for group in groups:
            named = {f"{group.block}.{layer}" for layer in layers}
            same = [g for g in groups if g.producer == group.producer]
            readers = {name for g in same for name in g.consumers}
            if strangers := (named & modules) - readers:
                raise ValueError(_no_readers(options.name, group.producer, strangers, readers))
            if others := readers - named:
                logger.info(
                    "%s: %s read the same output and are rescaled too.",
                    group.producer,
                    sorted(others),
                )
        _warn_of_other_blocks(context, options, producer, layers, groups)
        selected += [g for g in groups if all(g is not known for known in selected)]
    return selected


def _no_readers(
    algorithm: str, producer: str, strangers: Iterable[str], readers: Iterable[str]
) -> str:
    """Return the message for layers of an entry that do not read its producer."""
    return (
        f"{algorithm}: scaling_layers has layers for which a pass through the model shows no path "
        f"from {producer} that keeps its factors: {', '.join(sorted(strangers))}. Readers of "
        f"{producer}: {', '.join(sorted(readers))}. Name only readers in the entry."
    )


def _warn_of_other_blocks(
    context: Context,
    options: RescalingConfig,
    producer: str,
    layers: Iterable[str],
    groups: Iterable[RescalingGroup],
) -> None:
    """Warn of blocks that have the modules of an entry, where they cannot be rescaled."""
    modules = {name for name, _ in context.model.named_modules()}
    reasons = {r.producer: r.reason for r in context.structure.rejected}
    rescaled = {group.block for group in groups}
    for block in context.structure.blocks:
        name = f"{block}.{producer}"
        if block in rescaled or not block.startswith(options.model_decoder_layers or ""):
            continue
        if name in modules and any(f"{block}.{layer}" in modules for layer in layers):
            logger.warning(
                "%s: scaling_layers has prev_op=%r, which is not rescaled in %s: %s.",
                options.name,
                producer,
                block,
                reasons.get(name, "no layer of the entry reads it there"),
            )


def _read_entry(entry: Any, algorithm: str) -> tuple[str, list[str]]:
    """Return producer and layers of an entry of ``scaling_layers``.

    Raises:
        ValueError: It has another form.
    """
    given = entry if isinstance(entry, dict) else {}
    producer, layers = given.get("prev_op", ""), given.get("layers", [])
    if (
        given
        and isinstance(producer, str)
        and isinstance(layers, list)
        and all(isinstance(name, str) for name in layers)
    ):
        return producer, layers
    raise ValueError(
        f"{algorithm}: an entry of scaling_layers needs prev_op (a name) and layers (a list of "
        f"names), got {str(entry)[:80]}."
    )


def _not_rescalable(context: Context, algorithm: str, producer: str, layers: list[str]) -> str:
    """Return the message for an entry of ``scaling_layers`` that matches no group."""
    reasons = [r.reason for r in context.structure.rejected if r.producer.endswith(f".{producer}")]
    known = sorted(
        {
            group.producer.removeprefix(f"{group.block}.")
            for group in context.structure.groups
            if group.block
        }
    )
    return (
        f"{algorithm}: scaling_layers has prev_op={producer!r} with layers={layers}, which cannot "
        f"be rescaled: {reasons[0] if reasons else 'no decoder block connects them so'}. "
        f"Rescalable: {', '.join(known[:8]) or 'nothing'}."
    )


# ---- parameters of a group ----------------------------------------------------------------------


def consumer_edits(
    group: RescalingGroup, context: Context
) -> list[tuple[str, FakeQuantizedLayer, Edit]]:
    """Return name, layer and edit of the weight of each quantized consumer.

    An edit is that of the matrix of the layer: an index for each of its columns, on the device of
    its weight. Example: two input channels of a kernel of 3 have the index [0, 0, 0, 1, 1, 1].
    """
    edits = {edit.parameter: edit for edit in group.edits if edit.power > 0}
    names = [n for n in group.consumers if n in context.layers and f"{n}.weight" in edits]
    layers = {n: context.layers[n] for n in names if context.layers[n].has_matrix}
    return [(n, m, _column_edit(m, edits[f"{n}.weight"])) for n, m in layers.items()]


def _column_edit(layer: FakeQuantizedLayer, edit: Edit) -> Edit:
    weight = layer.weight
    kernel = weight[0, 0].numel() if layer.is_convolution else 1
    index = edit.index.to(weight.device).repeat_interleave(kernel)
    return replace(edit, axis=1, index=index)


def producer_edit(
    group: RescalingGroup, context: Context
) -> tuple[FakeQuantizedLayer, Edit] | None:
    """Return layer and edit of the weight of the producer, or None if it is not quantized.

    The edit is that of the matrix of the layer: an index for each of its rows. Convolutions of
    several groups count as not quantized.
    """
    layer = context.layers.get(group.producer)
    if layer is None or not layer.has_matrix or layer.channel_groups > 1:
        return None
    for edit in group.edits:
        if edit.power < 0 and edit.parameter == f"{group.producer}.weight":
            return layer, replace(edit, axis=0)
    return None


# ---- channels and factors -----------------------------------------------------------------------


def reduce_to_factors(values: torch.Tensor, edit: Edit, size: int, reduction: str) -> torch.Tensor:
    """Reduce magnitudes of channels to one magnitude per factor.

    Where channels are multiplied by a power p of their factor, the p-th root of their magnitude
    counts.

    Args:
        values: (channels,), not negative.
        edit: Factor of each channel, and its power.
        size: Number of factors.
        reduction: "amax" or "mean".
    """
    # Example: index (0, 0, 1, -1), values (3, 5, 2, 9), "amax" -> (5, 2). Channels of query heads
    # that read one key-value head share a factor this way; -1 marks channels without a factor.
    index = edit.index.to(values.device)
    has_factor = index >= 0
    out = torch.zeros(size, dtype=values.dtype, device=values.device)
    roots = values[has_factor] ** (1 / abs(edit.power))
    return out.scatter_reduce_(0, index[has_factor], roots, reduction, include_self=False)


def expand_to_channels(factors: torch.Tensor, edit: Edit) -> torch.Tensor:
    """Return the multiplier of each channel of a parameter, 1 for channels without a factor."""
    one = torch.ones(1, dtype=factors.dtype, device=factors.device)
    return torch.cat([factors, one])[edit.index.to(factors.device)] ** edit.power  # -1: the one


def fake_quantized_matrix(layer: FakeQuantizedLayer, matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix (outputs, inputs) as the quantizer of a layer would round it as a weight."""
    return layer.to_matrix(fake_quantized_weight(layer, layer.from_matrix(matrix)))
