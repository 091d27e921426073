"""Loading GGUF files: their tensors as a checkpoint in Quark's format."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quark import __version__
from quark.torch.export.checkpoint.architecture import empty_model, read_config
from quark.torch.export.checkpoint.build_limit import check_counts
from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.export.gguf.architectures import (
    TENSOR_SCALE,
    Architecture,
    architecture_of,
    head_size,
    import_gguf,
    is_rotated,
    tensor_names,
)
from quark.torch.export.gguf.blocks import block_spec, has_tensor_scale, unpack_blocks
from quark.torch.export.gguf.reader import GgufFile
from quark.torch.export.gguf.rope import FACTORS, check_factors, interleaved_rows, read_scaling
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.name_lookup import names_as_subject
from quark.torch.quantization.config.spec import QuantizationSpec

logger = logging.getLogger(__name__)
_INPUT_SCALE = ".input_scale"
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


class GgufModel(NamedTuple):
    """A GGUF file and the model of Transformers that its tensors fit.

    Attributes:
        file: The file.
        model: The float model, on the meta device.
        architecture: How the model family is stored.
        dtype: Type of the tensors that are not quantized.
        sources: Names of tensors in the model -> in the file. Tied ones are left out.
    """

    file: GgufFile
    model: nn.Module
    architecture: Architecture
    dtype: torch.dtype
    sources: dict[str, str]

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return head_size(self.model.config)

    @property
    def tied(self) -> dict[str, str]:
        """Names of tied tensors -> names of the tensors that they are tied to."""
        return dict(getattr(self.model, "all_tied_weights_keys", None) or {})


def match_gguf(path: Path, dtype: torch.dtype | None = None, **options: Any) -> GgufModel:
    """Return the model of a GGUF file, and which tensor is which, without reading the tensors.

    Args:
        path: The file.
        dtype: Type of the model; None for the type of the tensors that are not quantized.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        ImportError: The package gguf is missing.
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or its architecture is not supported.
    """
    file, config = GgufFile(path), read_gguf_config(path)
    architecture = architecture_of(config)
    if file.values.get("general.architecture") != architecture.name:
        raise ValueError(
            f"{path}: architecture {file.values.get('general.architecture')!r} is read as "
            f"{config.model_type!r} by Transformers, which is {architecture.name!r} in GGUF."
        )
    read_scaling(config, file, architecture.name)
    dtype = dtype or _float_type(file)
    model = empty_model(config, file.tensors, path, dtype, **options)
    names = tensor_names(architecture, config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    sources = {key: names(key) for key in model.state_dict() if key not in tied}
    stored = set(sources.values())
    scales = _scales_of(file, stored, TENSOR_SCALE)
    of_inputs = _scales_of(file, stored, _INPUT_SCALE)
    if of_inputs:
        logger.warning(
            "%s has scales of inputs, which llama.cpp may round: here they stay in float.", path
        )
    known = stored | scales | of_inputs | {FACTORS}
    unlike = {
        "missing": [name for name in stored if name not in file.tensors],
        "unexpected": [name for name in file.tensors if name not in known],
    }
    problems = [f"{names_as_subject(some)} {problem}" for problem, some in unlike.items() if some]
    if problems:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {'; '.join(problems)}. Write the file "
            "again from the model, or copy it again."
        )
    check_factors(model, config, file, head_size(config))
    return GgufModel(file, model, architecture, dtype, sources)


def _scales_of(file: GgufFile, names: set[str], suffix: str) -> set[str]:
    """Return the names that the file may have for scales of its weights in NVFP4."""
    weights = (name for name in names & file.tensors.keys() if file.tensors[name].kind == "NVFP4")
    return {_scale_name(name, suffix) for name in weights} & file.tensors.keys()


def _scale_name(name: str, suffix: str = TENSOR_SCALE) -> str:
    return name.removesuffix(".weight") + suffix


def tensor_scale(file: GgufFile, name: str) -> torch.Tensor | None:
    """Return the tensor scale of a weight, float32 []; None for types that have none.

    It is 1 where the file has none, as in llama.cpp.

    Raises:
        ValueError: It is not one positive, finite float32 number.
    """
    if not has_tensor_scale(file.tensors[name].kind):
        return None
    stored = file.tensors.get(_scale_name(name))
    if stored is None:
        return torch.ones((), dtype=torch.float32, device="cpu")
    if stored.kind == "F32" and prod(stored.shape) == 1:
        scale = file.blocks(_scale_name(name)).clone().view(torch.float32).reshape(())
        if scale.isfinite() and scale > 0:
            return scale
    raise ValueError(
        f"{file.path} is damaged: {_scale_name(name)}, {stored.kind} {list(stored.shape)}, is not "
        "one positive and finite number in F32."
    )


def read_gguf_config(path: Path) -> Any:
    """Return the configuration of the model of a GGUF file.

    Transformers reads the whole vocabulary for it, so a file is read once.

    Raises:
        ImportError: The package gguf is missing.
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or Transformers does not understand it.
    """
    import_gguf()
    check_counts(GgufFile(path).values, path)
    stat = path.stat()
    return copy.deepcopy(_read_config(path.resolve(), stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2)
def _read_config(path: Path, size: int, modified: int) -> Any:
    return read_config(path.parent, gguf_file=path.name)


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
    if any(file.tensors[name].kind not in FLOAT_TYPES for name in copies.values()):
        # Modules cannot share a packed weight: each gets one of its own, with the same codes.
        config: Any = model.config
        config.tie_word_embeddings = False
        model = empty_model(config, file.tensors, path, match.dtype, **options)
        sources = sources | copies
    reader = GgufTensors(file, sources, match.architecture, match.head, match.dtype)
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
        kind = self.file.tensors[name].kind
        blocks = rows_of(self.file, name, key, self.architecture, self.head)
        if kind in FLOAT_TYPES:
            yield key, float_values(blocks, kind, key, self.architecture).to(self.dtype)
            return
        state = unpack_blocks(blocks, self.specs[layer], kind, tensor_scale(self.file, name))
        parts = self.layout.pack(state, None)
        for part, tensor in parts.items():
            yield _part_name(layer, part), tensor


def rows_of(
    file: GgufFile, name: str, key: str, architecture: Architecture, head: int
) -> torch.Tensor:
    """Return the bytes of a tensor, (…, bytes of a row) uint8, its rows as in Transformers.

    Args:
        file: The file.
        name: Name of the tensor in the file.
        key: Its name in the model.
        architecture: How the model family is stored.
        head: Width of an attention head.
    """
    blocks = file.blocks(name)
    if not (architecture.interleaves and is_rotated(key)):
        return blocks
    # argsort inverts the permutation: rows return to the order of Transformers.
    return blocks[torch.argsort(interleaved_rows(len(blocks), head))]


def float_values(
    blocks: torch.Tensor, kind: str, key: str, architecture: Architecture
) -> torch.Tensor:
    """Return the values of a tensor of floats, given its bytes; see ``rows_of``."""
    values = blocks.clone().view(FLOAT_TYPES[kind])
    if architecture.norm_offset and key.endswith("norm.weight"):
        return values - architecture.norm_offset
    return values


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
        is_parameter = name != FACTORS and not name.endswith((TENSOR_SCALE, _INPUT_SCALE))
        if len(tensor.shape) == 1 and tensor.kind == "F32" and is_parameter:
            values = file.blocks(name).clone().view(torch.float32)
            if not values.to(kind).float().equal(values):
                return torch.float32
    return kind
