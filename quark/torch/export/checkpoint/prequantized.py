"""Layers of a quantized source that a configuration leaves in float: they keep codes and scales.

A quantized checkpoint is dequantized to be quantized again. Layers that the configuration leaves
alone, and that nothing has changed, return to their stored form::

    source, fp8          config: experts to int4       output
    q_proj    fp8        in float                      fp8, the codes of the source
    experts   fp8        int4                          int4
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.dequantized import DequantizedReader
from quark.torch.export.checkpoint.placement import put_tensor
from quark.torch.export.checkpoint.value_checks import check_layer_values
from quark.torch.export.formats.layouts.act_order import has_act_order
from quark.torch.files import size_of
from quark.torch.graph.residency import iterate_parts, residency_of
from quark.torch.quantization.config.linear_classes import operator_class
from quark.torch.quantization.config.match import with_layers
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.experts import split_experts, stack_experts
from quark.torch.quantization.nn.layer import float_class
from quark.torch.quantization.nn.packed import PackedLayer

ATTRIBUTE = "_prequantized"  # of a float model that was dequantized
logger = logging.getLogger("quark")


class PrequantizedLayers:
    """The quantized layers of a source, for a float model that was made of it.

    Args:
        reader: The source in float.
    """

    def __init__(self, reader: DequantizedReader) -> None:
        self._reader, self._loading = reader, reader.loading
        self._keys = reader.loading.stored_names()
        self._layers = {
            name: layer
            for name, layer in reader.loading.model.named_modules()
            if isinstance(layer, PackedLayer) and _is_storable(layer)
        }

    def __deepcopy__(self, memo: Any) -> PrequantizedLayers:
        """Return the same object: copies of a model have one source."""
        return self

    def find(self, model: nn.Module, changed: Collection[str] = ()) -> dict[str, PackedLayer]:
        """Return the layers that a model has in float, by name, without values.

        Args:
            model: The model, its experts split.
            changed: Names of layers that will be quantized.
        """
        modules = dict(model.named_modules())
        return {
            name: layer
            for name, layer in self._layers.items()
            if name not in changed
            and name in modules
            and operator_class(type(modules[name])) is layer.float_class
        }

    def is_unchanged(self, name: str, layer: Any) -> bool:
        """Whether a float layer has the values of the source. They are in memory."""
        values = {n: p for n in PARAMETERS if (p := getattr(layer, n, None)) is not None}
        return all(
            torch.equal(p.detach().cpu(), self._reader.value(name, n, p.dtype))
            for n, p in values.items()
        )

    def put(self, model: nn.Module, name: str) -> None:
        """Replace a float layer in place by the packed one of the source, without values."""
        self._loading.fmt.prepare_for_load(
            model.get_submodule(name), self._layers[name].quant_config
        )
        self.release(model, name)

    def fill(self, model: nn.Module, name: str, device: torch.device) -> None:
        """Read codes and scales of a packed layer of a model.

        Raises:
            ValueError: A value is not sound.
        """
        names = {key: self._keys.get(key) for key in self._tensors(name)}
        self._loading._replace(model=model).fill_part(names, device)
        layer = model.get_submodule(name)
        assert isinstance(layer, PackedLayer)
        check_layer_values(layer, name)

    def release(self, model: nn.Module, name: str) -> None:
        """Take the values of a packed layer of a model from memory."""
        for key, empty in self._tensors(name).items():
            put_tensor(model, key, empty)

    def size(self, name: str) -> int:
        """Return the bytes of the stored tensors of a layer."""
        return size_of(self._tensors(name))

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a layer by their names in the model, on the meta device."""
        keys = [f"{name}.{key}" for key in self._layers[name].state_dict()]
        return {key: self._loading.outline[key].to("meta") for key in keys}


def _is_storable(layer: PackedLayer) -> bool:
    """Whether Quark's format can store a layer beside layers of any other scheme."""
    is_plain = layer.input_rotation is None and layer.quant_config.output_tensors is None
    return is_plain and not has_act_order(layer)


def remember_prequantized(model: nn.Module, reader: Any) -> None:
    """Let a float model remember the quantized checkpoint that it was made of.

    Args:
        model: The model.
        reader: Its tensors. Those of a GGUF file are not remembered.
    """
    if isinstance(reader, DequantizedReader):
        vars(model)[ATTRIBUTE] = PrequantizedLayers(reader)


def announce_kept(model: nn.Module, quantized: Collection[str], config: Any) -> None:
    """Tell before the work which layers will keep codes, and which formats cannot hold them.

    Args:
        model: A float model.
        quantized: Names of the layers that will be quantized.
        config: How.
    """
    source: PrequantizedLayers | None = vars(model).get(ATTRIBUTE)
    if source is None or not config.keep_prequantized_layers:
        return
    kept = source.find(model, quantized)
    if kept:
        logger.info(
            "%d layers that stay in float, such as %s, will keep the codes of the source, which "
            "custom_mode='quark' alone holds. For another format, set "
            "Config(keep_prequantized_layers=False) now.",
            len(kept),
            next(iter(kept)),
        )


@torch.no_grad()
def keep_prequantized_layers(model: nn.Module) -> None:
    """Give the float layers of a quantized model the codes that they have in its source, in place.

    Layers with other values than in the source, such as those that an algorithm has changed, and
    layers that share their weight, stay in float.

    Args:
        model: A frozen model. It is not changed if its source was in float, or if its configuration
            has ``keep_prequantized_layers=False``.
    """
    source: PrequantizedLayers | None = vars(model).get(ATTRIBUTE)
    config: Any = getattr(model, "quant_config", None)
    if source is None or not config.keep_prequantized_layers:
        return
    experts = split_experts(model)
    candidates = source.find(model)
    kept: dict[str, PackedLayer] = {}
    try:
        for part in iterate_parts(model, candidates):
            for name in filter(part.holds, without_shared(model, candidates)):
                if source.is_unchanged(name, model.get_submodule(name)):
                    kept[name] = candidates[name]
    finally:
        stack_experts(experts, keep=kept)
    for name in kept:
        _put(model, name, source)
    left = [name for name in candidates if name not in kept]
    if left:
        logger.warning(
            "%d layers that stay in float, such as %s, are stored in float, not as in the source: "
            "their values have been changed, or their weight is shared.",
            len(left),
            left[0],
        )
    declare_kept(model, kept)


def without_shared(model: nn.Module, layers: Mapping[str, PackedLayer]) -> dict[str, PackedLayer]:
    """Return the layers whose weight no other module of a model shares, by name."""
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    weights = {name: model.get_submodule(name)._parameters["weight"] for name in layers}
    return {name: layer for name, layer in layers.items() if owners[id(weights[name])] == 1}


def _put(model: nn.Module, name: str, source: PrequantizedLayers) -> None:
    """Replace a float layer by that of the source, with values or read when it is used."""
    residency = residency_of(model)
    device = next(model.get_submodule(name).parameters()).device
    source.put(model, name)
    if residency is None:
        source.fill(model, name, device)
    else:
        residency.read_by(name, source)


def declare_kept(model: Any, kept: Mapping[str, PackedLayer]) -> None:
    """Name layers that keep their codes in the configuration of a model, in place."""
    if kept:
        owners = ((name, m) for name, m in model.named_modules() if m._parameters)
        names = {name: float_class(module) for name, module in owners}
        layers = {name: layer.quant_config for name, layer in kept.items()}
        model.quant_config = with_layers(names, model.quant_config, layers)
        logger.info("%d layers keep the codes and scales of the source.", len(kept))


def find_kept(model: nn.Module, files: Any, layers: Collection[str]) -> dict[str, PackedLayer]:
    """Return the layers that will keep the codes of the source unless something changes them.

    Args:
        model: The float model, its experts split. Its parameters need no values.
        files: Its tensors.
        layers: Names of the layers that will be quantized.
    """
    if not isinstance(files, DequantizedReader):
        return {}
    return without_shared(model, PrequantizedLayers(files).find(model, layers))


def saved_bytes(model: nn.Module, kept: Mapping[str, PackedLayer]) -> int:
    """Return how many bytes less layers take as codes than in float; see ``find_kept``."""
    floats = sum(size_of(model.get_submodule(name).state_dict()) for name in kept)
    return floats - sum(size_of(layer.state_dict()) for layer in kept.values())
