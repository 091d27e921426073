"""GGUF files as checkpoints of Quark: the same codes, scales and offsets under other names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quark import __version__
from quark.torch.export.checkpoint.architecture import empty_model, read_config
from quark.torch.export.checkpoint.files import Stored
from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.export.gguf.blocks import from_blocks, spec_of
from quark.torch.export.gguf.metadata import (
    Architecture,
    architecture_of,
    head_size,
    interleaved_rows,
    rope_factors,
    rope_of,
)
from quark.torch.export.gguf.reader import GgufFile
from quark.torch.export.gguf.writer import tensor_names
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192


class GgufCheckpoint(NamedTuple):
    """A GGUF file, ready to be loaded.

    Attributes:
        model: Its architecture, on the meta device.
        fmt: The format that ``reader`` gives its tensors in.
        reader: Its tensors.
    """

    model: nn.Module
    fmt: QuarkFormat
    reader: GgufTensors


def open_gguf(path: Path) -> GgufCheckpoint:
    """Return the model of a GGUF file, without its values.

    Raises:
        ImportError: The package gguf is missing.
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or holds an architecture or a type that is not read here.
    """
    file = GgufFile(path)
    config = read_config(path.parent, gguf_file=path.name)
    architecture = architecture_of(config)
    if file.values.get("general.architecture") != architecture.name:
        raise ValueError(
            f"{path}: architecture {file.values.get('general.architecture')!r} is read as "
            f"{config.model_type!r} by Transformers, which is {architecture.name!r} in GGUF."
        )
    _scale_rotary(config, file, architecture.name)
    dtype = _float_type(file)
    model = empty_model(config, file.tensors, path, dtype)
    names = tensor_names(architecture, config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    places = {names(key): key for key in model.state_dict() if key not in tied}
    extra = [name for name in file.tensors if name not in places and name != FACTORS]
    missing = [name for name in places if name not in file.tensors]
    if extra or missing:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: {_some(missing)} missing, "
            f"{_some(extra)} unexpected."
        )
    _check_factors(model, config, file)
    reader = GgufTensors(file, places, architecture, head_size(config), dtype)
    exporter = JsonExporterConfig(weight_format="real_quantized", pack_method="reorder")
    return GgufCheckpoint(model, QuarkFormat(_config(model, reader), exporter), reader)


class GgufTensors:
    """Tensors of a GGUF file as a checkpoint of Quark has them.

    Args:
        file: The file.
        places: Names of its tensors -> names in the model.
        architecture: How the family is stored.
        head: Width of an attention head.
        dtype: Type of what is not quantized.

    Attributes:
        specs: How each quantized layer is quantized.
        entries: Headers by the names of a checkpoint.

    Raises:
        ValueError: A tensor is of a type that is not read here, or none is quantized.
    """

    def __init__(
        self,
        file: GgufFile,
        places: dict[str, str],
        architecture: Architecture,
        head: int,
        dtype: torch.dtype,
    ) -> None:
        self.file, self.places, self.architecture = file, places, architecture
        self.head, self.dtype = head, dtype
        self.layout = PackedLayout("reorder")
        self.specs: dict[str, QuantizationSpec] = {}
        self.entries: dict[str, Stored] = {}
        for name, key in places.items():
            tensor = file.tensors[name]
            if tensor.kind in FLOATS:
                self.entries[key] = Stored(file.path.name, tensor.shape, dtype)
                continue
            layer = key.removesuffix(".weight")
            self.specs[layer] = spec = spec_of(tensor.kind, file.blocks(name), name)
            for part, (shape, kind) in self.layout.declare(spec, tensor.shape, True).items():
                stored = f"{layer}.weight" + (f"_{part}" if part else "")
                self.entries[stored] = Stored(file.path.name, shape, kind)
        if not self.specs:
            raise ValueError(f"{file.path} is not quantized: load it with Transformers.")

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        return next(tensor for name, tensor in self.tensors() if name == key)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors, one of the file after the other."""
        for name, key in self.places.items():
            layer = key.removesuffix(".weight")
            blocks, kind = self.file.blocks(name), self.file.tensors[name].kind
            if self.architecture.interleaves and key.split(".")[-2] in ("q_proj", "k_proj"):
                blocks = blocks[torch.argsort(interleaved_rows(len(blocks), self.head))]
            if kind in FLOATS:
                values = blocks.clone().view(FLOATS[kind])
                if self.architecture.norm_offset and key.endswith("norm.weight"):
                    values = values - self.architecture.norm_offset
                yield key, values.to(self.dtype)
                continue
            parts = self.layout.pack(from_blocks(blocks, self.specs[layer], kind), None)
            for part, tensor in parts.items():
                yield f"{layer}.weight" + (f"_{part}" if part else ""), tensor


def _config(model: nn.Module, reader: GgufTensors) -> Config:
    """Return a configuration: what most layers have for all, the others by name."""
    layers = {n: QuantizationConfig(weight=spec) for n, spec in reader.specs.items()}
    modules = dict(model.named_modules())
    kinds = Counter(str(layer.weight) for layer in layers.values())
    usual, _ = kinds.most_common(1)[0]
    whole = next(layer for layer in layers.values() if str(layer.weight) == usual)
    plain = [n for n, m in modules.items() if isinstance(m, nn.Linear) and n not in layers]
    others = {
        literal(n): layer
        for n, layer in layers.items()
        if str(layer.weight) != usual or not isinstance(modules[n], nn.Linear)
    }
    return Config(
        whole,
        layer_quant_config=others,
        exclude=[literal(name) for name in plain],
        version=__version__,
    )


def _float_type(file: GgufFile) -> torch.dtype:
    """Return the type of the matrices in float if it holds all vectors too, else float32."""
    kinds = {FLOATS[t.kind] for t in file.tensors.values() if t.kind in FLOATS and len(t.shape) > 1}
    if len(kinds) != 1:
        return torch.float32
    (kind,) = kinds
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 1 and tensor.kind == "F32" and name != FACTORS:
            values = file.blocks(name).clone().view(torch.float32)
            if not values.to(kind).float().equal(values):
                return torch.float32
    return kind


def _scale_rotary(config: Any, file: GgufFile, name: str) -> None:
    """Take over how rotary embedding is scaled, which Transformers passes over.

    Raises:
        ValueError: It is scaled in a way that is not read here.
    """
    kind = file.values.get(f"{name}.rope.scaling.type", "none")
    rope = {"rope_theta": 10000.0, **rope_of(config)}
    if kind == "linear":
        factor = float(file.values.get(f"{name}.rope.scaling.factor", 1.0))
        config.rope_parameters = {**rope, "rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise ValueError(f"{file.path}: rotary embedding scaled by {kind!r} is not read here.")
    if FACTORS in file.tensors:
        factors = _factors(file)
        config.rope_parameters = {
            **rope,
            **_LLAMA3,
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }


def _factors(file: GgufFile) -> torch.Tensor:
    tensor = file.tensors[FACTORS]
    if tensor.kind != "F32":
        raise ValueError(f"{file.path}: {FACTORS} is {tensor.kind}, expected F32.")
    return file.blocks(FACTORS).clone().view(torch.float32).flatten()


def _check_factors(model: nn.Module, config: Any, file: GgufFile) -> None:
    """Raise if frequencies are divided by other factors than those of Llama 3."""
    if FACTORS not in file.tensors:
        return
    rotary = next((m for n, m in model.named_modules() if n.endswith("rotary_emb")), None)
    if rotary is None:
        raise ValueError(f"{file.path}: {FACTORS}, but the model has no rotary embedding.")
    holder = nn.Module()
    holder.rotary_emb = type(rotary)(config)
    expected, found = rope_factors(holder, config), _factors(file)
    if expected is None or expected.shape != found.shape or not expected.allclose(found):
        raise ValueError(f"{file.path}: {FACTORS} are not those of Llama 3: not read here.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "") if names else "nothing"
