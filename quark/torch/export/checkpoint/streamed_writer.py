"""Writing a checkpoint of a model larger than memory: one part after the other, index last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.writer import (
    float_state,
    layer_parts,
    merged_scales,
    original_names,
    untie,
)
from quark.torch.export.checks import check_configured, check_float
from quark.torch.export.expert_tokens import report_experts
from quark.torch.export.formats.base import ExportFormat
from quark.torch.graph.residency import Part, iterate_parts, release, resident
from quark.torch.quantization.nn.layer import QuantizedLayer

Parts = dict[str, dict[str, torch.Tensor]]  # layer -> stored tensors by names relative to it


class StreamedState:
    """The tensors of the checkpoint of a frozen model, made when they are written.

    Args:
        model: The model. It is not changed.
        fmt: Format of the checkpoint.

    Attributes:
        outline: Every tensor by its stored name, on the meta device, in the order of the files.

    Raises:
        ValueError: The model has no values, or such as no reader can make sense of.
    """

    def __init__(self, model: nn.Module, fmt: ExportFormat) -> None:
        release(model)  # what shares memory now is tied
        self.model, self.fmt = model, fmt
        self.layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
        self.scales = merged_scales(self.layers, fmt.options)
        check_configured(model, fmt.config, self.layers)
        report_experts(model)
        state = untie(model, float_state(model))
        self._float = list(state)
        kind_of = {name: _kind(layer) for name, layer in self.layers.items()}  # none is resident
        kinds: dict[Any, dict[str, torch.Tensor]] = {}
        for name, kind in kind_of.items():
            if kind not in kinds:
                with resident(model, name):
                    parts = self._parts_of(name)
                kinds[kind] = {part: tensor.to("meta") for part, tensor in parts.items()}
        outline = {name: tensor.to("meta") for name, tensor in state.items()}
        parts_of = {name: kinds[kind] for name, kind in kind_of.items()}
        self.outline = original_names(model, fmt.join(outline | self._named(parts_of)))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors by their stored names; each part of the model is read once.

        Raises:
            ValueError: A value is one that no reader can make sense of.
        """
        for part in iterate_parts(self.model):
            yield from self._tensors_of(part).items()

    def _tensors_of(self, part: Part) -> dict[str, torch.Tensor]:
        names = {n for n in self._float if part.holds(n.rpartition(".")[0])}
        values = float_state(self.model) if names else {}
        state = {name: values[name] for name in self._float if name in names}
        check_float(state)
        inside = {n: self._parts_of(n) for n in self.layers if part.holds(n)}
        return original_names(self.model, self.fmt.join(state | self._named(inside)))

    def _parts_of(self, name: str) -> dict[str, torch.Tensor]:
        return layer_parts(name, self.layers[name], self.fmt, self.scales.get(name, {}))

    def _named(self, parts_of: Parts) -> dict[str, torch.Tensor]:
        """Return the stored tensors of layers by their full names."""
        return {
            self.fmt.stored_name(f"{name}.{part}"): tensor
            for name, parts in parts_of.items()
            for part, tensor in parts.items()
        }


def _kind(layer: QuantizedLayer) -> Any:
    """Return a key that layers share whose stored tensors have equal shapes and types."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
    return layer.float_class, repr(layer.quant_config), tuple(shapes)
