"""Loading GGUF files: their tensors as a checkpoint in Quark's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from quark import __version__
from quark.torch.export.checkpoint.architecture import empty_model, read_config
from quark.torch.export.checkpoint.build_limit import check_counts
from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.export.gguf.architectures import (
    Architecture,
    architecture_of,
    head_size,
    is_rotated,
    tensor_names,
)
from quark.torch.export.gguf.blocks import block_spec, unpack_blocks
from quark.torch.export.gguf.reader import GgufFile
from quark.torch.export.gguf.rope import FACTORS, check_factors, interleaved_rows, read_scaling
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.name_lookup import names_as_subject
from quark.torch.quantization.config.spec import QuantizationSpec

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


def open_gguf(path: Path) -> GgufCheckpoint:
    """Open a GGUF file as a checkpoint, without reading its tensors.

    Raises:
        ImportError: The package gguf is missing.
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or its architecture or a tensor type is not supported.
    """
    file = GgufFile(path)
    check_counts(file.values, path)
    config = read_config(path.parent, gguf_file=path.name)
    architecture = architecture_of(config)
    if file.values.get("general.architecture") != architecture.name:
        raise ValueError(
            f"{path}: architecture {file.values.get('general.architecture')!r} is read as "
            f"{config.model_type!r} by Transformers, which is {architecture.name!r} in GGUF."
        )
    read_scaling(config, file, architecture.name)
    dtype = _float_type(file)
    model = empty_model(config, file.tensors, path, dtype)
    names = tensor_names(architecture, config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    sources = {key: names(key) for key in model.state_dict() if key not in tied}
    stored = set(sources.values())
    unlike = {
        "missing": [name for name in stored if name not in file.tensors],
        "unexpected": [name for name in file.tensors if name not in stored and name != FACTORS],
    }
    problems = [f"{names_as_subject(some)} {problem}" for problem, some in unlike.items() if some]
    if problems:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {'; '.join(problems)}.")
    check_factors(model, config, file, head_size(config))
    copies = {key: sources[origin] for key, origin in tied.items()}
    if any(file.tensors[name].kind not in FLOAT_TYPES for name in copies.values()):
        # Modules cannot share a packed weight: each gets one of its own, with the same codes.
        config.tie_word_embeddings = False
        model = empty_model(config, file.tensors, path, dtype)
        sources |= copies
    reader = GgufTensors(file, sources, architecture, head_size(config), dtype)
    exporter = JsonExporterConfig(weight_format="real_quantized", pack_method="reorder")
    return GgufCheckpoint(model, QuarkFormat(_to_config(model, reader), exporter), reader)


class GgufTensors:
    """Reader of a GGUF file that returns tensors in Quark's format.

    Args:
        file: The file.
        sources: Names of tensors in the model -> in the file.
        architecture: How the model family is stored.
        head: Width of an attention head.
        dtype: Type of the tensors that are not quantized.

    Attributes:
        specs: Specification of the weight of each quantized layer.
        entries: Headers of tensors by their names in Quark's format.

    Raises:
        ValueError: A tensor has an unsupported type, or no tensor is quantized.
    """

    def __init__(
        self,
        file: GgufFile,
        sources: dict[str, str],
        architecture: Architecture,
        head: int,
        dtype: torch.dtype,
    ) -> None:
        self.file, self.sources, self.architecture = file, sources, architecture
        self.head, self.dtype = head, dtype
        self.layout = PackedLayout("reorder")
        self.specs: dict[str, QuantizationSpec] = {}
        self.entries: dict[str, TensorHeader] = {}
        self.origins: dict[str, str] = {}  # name in Quark's format -> name in the model
        for key, name in sources.items():
            tensor = file.tensors[name]
            if tensor.kind in FLOAT_TYPES:
                self.entries[key] = TensorHeader(file.path.name, tensor.shape, dtype, tensor.bytes)
                self.origins[key] = key
                continue
            layer = key.removesuffix(".weight")
            self.specs[layer] = spec = block_spec(tensor.kind, file.blocks(name), name)
            for part, (shape, part_dtype) in self.layout.declare(spec, tensor.shape, True).items():
                # A block holds codes and scales: the codes stand for all its bytes.
                size = 0 if part else tensor.bytes
                header = TensorHeader(file.path.name, shape, part_dtype, size)
                self.entries[_part_name(layer, part)] = header
                self.origins[_part_name(layer, part)] = key
        if not self.specs:
            raise ValueError(f"{file.path} is not quantized: load it with Transformers.")

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        return dict(self._parts(self.origins[key]))[key]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over (name, tensor), in the order of the model."""
        for key in self.sources:
            yield from self._parts(key)

    def _parts(self, key: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors in Quark's format that hold one tensor of the model."""
        name = self.sources[key]
        layer = key.removesuffix(".weight")
        blocks, kind = self.file.blocks(name), self.file.tensors[name].kind
        if self.architecture.interleaves and is_rotated(key):
            # argsort inverts the permutation: rows return to the order of Transformers.
            blocks = blocks[torch.argsort(interleaved_rows(len(blocks), self.head))]
        if kind in FLOAT_TYPES:
            values = blocks.clone().view(FLOAT_TYPES[kind])
            if self.architecture.norm_offset and key.endswith("norm.weight"):
                values = values - self.architecture.norm_offset
            yield key, values.to(self.dtype)
            return
        parts = self.layout.pack(unpack_blocks(blocks, self.specs[layer], kind), None)
        for part, tensor in parts.items():
            yield _part_name(layer, part), tensor


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


def _float_type(file: GgufFile) -> torch.dtype:
    """Return the type for tensors that are not quantized.

    It is the type of the float matrices, unless a float32 vector does not fit in it exactly.
    """
    matrices = [t for t in file.tensors.values() if len(t.shape) > 1]
    kinds = {FLOAT_TYPES[t.kind] for t in matrices if t.kind in FLOAT_TYPES}
    if len(kinds) != 1:
        return torch.float32
    (kind,) = kinds
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 1 and tensor.kind == "F32" and name != FACTORS:
            values = file.blocks(name).clone().view(torch.float32)
            if not values.to(kind).float().equal(values):
                return torch.float32
    return kind
