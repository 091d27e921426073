"""Loading GGUF files: their tensors as a checkpoint in Quark's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quark import __version__
from quark.torch.export.checkpoint.architecture import empty_model
from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.export.gguf.blocks import block_spec, unpack_blocks
from quark.torch.export.gguf.matching import (
    FLOAT_TYPES,
    GgufModel,
    float_values,
    match_gguf,
    rows_of,
    tensor_scale,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.experts import temporarily_split_experts


class GgufCheckpoint(NamedTuple):
    """A GGUF file that is ready to be loaded.

    Attributes:
        model: The model without values, on the meta device.
        fmt: Format in which ``reader`` returns tensors.
        reader: Reader of the tensors.
    """

    model: nn.Module
    fmt: QuarkFormat
    reader: GgufTensors


def open_gguf(path: Path, **options: Any) -> GgufCheckpoint:
    """Open a GGUF file as a checkpoint, without reading its tensors.

    Args:
        path: The file.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        ImportError: The package gguf is missing.
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or its architecture or a tensor type is not supported.
    """
    match = match_gguf(path, **options)
    file, model, sources = match.file, match.model, match.sources
    copies = {key: sources[origin] for key, origin in match.tied.items()}
    if any(match.kind(origin) not in FLOAT_TYPES for origin in match.tied.values()):
        # Modules cannot share a packed weight: each gets one of its own, with the same codes.
        config: Any = model.config
        config.tie_word_embeddings = False
        model = empty_model(config, file.tensors, path, match.dtype, **options)
        match = match._replace(model=model, sources=sources | copies)
    reader = GgufTensors(match)
    exporter = JsonExporterConfig(weight_format="real_quantized", pack_method="reorder")
    with temporarily_split_experts(model):
        config = _to_config(model, reader)
    return GgufCheckpoint(model, QuarkFormat(config, exporter), reader)


class GgufTensors:
    """Reader of a GGUF file that returns tensors in Quark's format.

    A layer of experts is split if a matrix of it is quantized.

    Args:
        match: The file and its model.

    Attributes:
        specs: Specification of the weight of each quantized layer.
        entries: Headers of tensors by their names in Quark's format.

    Raises:
        ValueError: A tensor has an unsupported type, or no tensor is quantized.
    """

    def __init__(self, match: GgufModel) -> None:
        self.match, self.layout = match, PackedLayout("reorder")
        self.specs: dict[str, QuantizationSpec] = {}
        self.entries: dict[str, TensorHeader] = {}
        self.origins: dict[str, str] = {}  # name in Quark's format -> name in the model
        of_names: dict[tuple[str, ...], QuantizationSpec] = {}  # one for all experts of a stack
        state, self.stacks = match.model.state_dict(), match.float_stacks()
        inside: set[str] = set()
        for key, stacked in self.stacks.items():
            parts = stacked.split(state[key])
            names = {name for part in parts for name in match.sources[part].names}
            size = sum(match.file.tensors[name].bytes for name in names)
            self._add(key, key, tuple(state[key].shape), match.dtype, size)
            inside |= parts.keys()
        for key, source in match.sources.items():
            if key in inside:
                continue
            stored = [match.file.tensors[name] for name in source.names]
            count = 1 if source.expert is None else stored[0].shape[0]
            size = sum(tensor.bytes for tensor in stored) // count
            if match.kind(key) in FLOAT_TYPES:
                self._add(key, key, source.shape, match.dtype, size)
                continue
            if source.names not in of_names:
                of_names[source.names] = _spec_of(match, key)
            layer = key.removesuffix(".weight")
            self.specs[layer] = spec = of_names[source.names]
            for part, (shape, dtype) in self.layout.declare(spec, source.shape, True).items():
                # A block holds codes and scales: the codes stand for all its bytes.
                self._add(_part_name(layer, part), key, shape, dtype, 0 if part else size)
        if not self.specs:
            raise ValueError(f"{match.file.path} is not quantized: load it with Transformers.")

    def _add(
        self, name: str, origin: str, shape: tuple[int, ...], dtype: torch.dtype, size: int
    ) -> None:
        self.entries[name] = TensorHeader(self.match.file.path.name, shape, dtype, size)
        self.origins[name] = origin

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        return dict(self._parts(self.origins[key]))[key]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over (name, tensor)."""
        for key in dict.fromkeys(self.origins.values()):
            yield from self._parts(key)

    def _parts(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors in Quark's format that hold one tensor of the model."""
        match = self.match
        if key in self.stacks:
            yield key, match.stack(key, lambda part: float_values(match, part), match.dtype)
            return
        source = match.sources[key]
        layer, kind = key.removesuffix(".weight"), match.kind(key)
        if kind in FLOAT_TYPES:
            yield key, float_values(match, key).to(match.dtype)
            return
        scale = tensor_scale(match.file, source)
        state = unpack_blocks(rows_of(match, key), self.specs[layer], kind, scale)
        for part, tensor in self.layout.pack(state, None).items():
            yield _part_name(layer, part), tensor


def _spec_of(match: GgufModel, key: str) -> QuantizationSpec:
    """Return the specification of a weight in blocks, the same one for all experts of a stack."""
    source = match.sources[key]
    if source.expert is None:
        return block_spec(match.kind(key), rows_of(match, key), source.names[0])
    blocks = torch.cat([match.file.blocks(name).flatten(0, 1) for name in source.names])
    return block_spec(match.kind(key), blocks, source.names[0])


def _part_name(layer: str, part: str) -> str:
    return f"{layer}.weight" + (f"_{part}" if part else "")


def _to_config(model: nn.Module, reader: GgufTensors) -> Config:
    """Return the configuration: the most frequent specification for all, others by layer name."""
    layers = {n: QuantizationConfig(weight=spec) for n, spec in reader.specs.items()}
    modules = dict(model.named_modules())
    kinds = Counter(str(layer.weight) for layer in layers.values())
    usual, _ = kinds.most_common(1)[0]
    default = next(layer for layer in layers.values() if str(layer.weight) == usual)
    in_float = [n for n, m in modules.items() if isinstance(m, nn.Linear) and n not in layers]
    others = {
        literal(n): layer
        for n, layer in layers.items()
        if str(layer.weight) != usual or not isinstance(modules[n], nn.Linear)
    }
    return Config(
        default,
        layer_quant_config=others,
        exclude=[literal(name) for name in in_float],
        version=__version__,
    )
