"""GGUF files and the models of Transformers that their tensors fit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.export.checkpoint.architecture import empty_model, read_config
from quark.torch.export.checkpoint.build_limit import check_counts
from quark.torch.export.gguf.architectures import (
    TENSOR_SCALE,
    Architecture,
    architecture_of,
    head_size,
    import_gguf,
    is_rotated,
)
from quark.torch.export.gguf.blocks import has_tensor_scale
from quark.torch.export.gguf.metadata import header_config
from quark.torch.export.gguf.places import ROUTER
from quark.torch.export.gguf.reader import GgufFile
from quark.torch.export.gguf.rope import FACTORS, check_factors, interleaved_rows, read_scaling
from quark.torch.export.gguf.sources import (
    Source,
    StackedParameter,
    find_sources,
    names_in_file,
    stacked_parameters,
)
from quark.torch.quantization.config.name_lookup import names_as_subject

logger = logging.getLogger(__name__)
_INPUT_SCALE = ".input_scale"
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufModel(NamedTuple):
    """A GGUF file and the model of Transformers that its tensors fit.

    Attributes:
        file: The file.
        model: The float model, on the meta device.
        architecture: How the model family is stored.
        dtype: Type of the tensors that are not quantized.
        sources: Names of tensors in the model, its experts split -> place in the file. Tied ones
            are left out.
        stacked: Parameters of the model that hold several of them.
    """

    file: GgufFile
    model: nn.Module
    architecture: Architecture
    dtype: torch.dtype
    sources: dict[str, Source]
    stacked: dict[str, StackedParameter]

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return head_size(self.model.config)

    def kind(self, key: str) -> str:
        """Return the type of a tensor in the file, by its name in the model with split experts."""
        return self.file.tensors[self.sources[key].names[0]].kind

    def stack(
        self, key: str, value: Callable[[str], torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a stacked parameter.

        Args:
            key: Its name, one of ``stacked``.
            value: Returns one of its matrices or biases, by the name in split experts.
            dtype: Type of the result.
        """
        values = torch.empty(self.model.state_dict()[key].shape, dtype=dtype, device="cpu")
        for name, part in self.stacked[key].split(values).items():
            part.copy_(value(name))
        return values

    def float_stacks(self) -> dict[str, StackedParameter]:
        """Return the stacked parameters of layers of experts of which no matrix is quantized."""
        state = self.model.state_dict()
        split = {
            owner.experts
            for key, owner in self.stacked.items()
            for name in owner.split(state[key])
            if self.kind(name) not in FLOAT_TYPES
        }
        return {key: owner for key, owner in self.stacked.items() if owner.experts not in split}

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
    stacked = stacked_parameters(model, architecture)
    names = names_in_file(model, architecture, stacked)
    stored = set(names.values())
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
    sources = find_sources(model, names, file.tensors, stacked, path)
    return GgufModel(file, model, architecture, dtype, sources, stacked)


def _scales_of(file: GgufFile, names: set[str], suffix: str) -> set[str]:
    """Return the names that the file may have for scales of its weights in NVFP4."""
    weights = (name for name in names & file.tensors.keys() if file.tensors[name].kind == "NVFP4")
    return {_scale_name(name, suffix) for name in weights} & file.tensors.keys()


def _scale_name(name: str, suffix: str = TENSOR_SCALE) -> str:
    return name.removesuffix(".weight") + suffix


def tensor_scale(file: GgufFile, source: Source) -> torch.Tensor | None:
    """Return the tensor scale of a weight, float32 []; None for types that have none.

    It is 1 where the file has none, as in llama.cpp.

    Raises:
        ValueError: It is not one positive, finite float32 number, for each expert of a stack; or
            the rows of the weight have several.
    """
    if not has_tensor_scale(file.tensors[source.names[0]].kind):
        return None
    scales = [_stored_scale(file, name, source.expert) for name in source.names]
    if any(scale != scales[0] for scale in scales):
        raise ValueError(
            f"{file.path}: {' and '.join(source.names)} have several tensor scales, but their rows "
            "are in one matrix of the model. Write them in another type."
        )
    return scales[0]


def _stored_scale(file: GgufFile, name: str, expert: int | None) -> torch.Tensor:
    stored = file.tensors.get(_scale_name(name))
    if stored is None:
        return torch.ones((), dtype=torch.float32, device="cpu")
    count = 1 if expert is None else file.tensors[name].shape[0]
    if stored.kind == "F32" and prod(stored.shape) == count:
        scales = file.blocks(_scale_name(name)).clone().view(torch.float32).flatten()
        scale = scales[expert or 0]
        if scale.isfinite() and scale > 0:
            return scale
    raise ValueError(
        f"{file.path} is damaged: {_scale_name(name)}, {stored.kind} {list(stored.shape)}, is not "
        f"{'one positive and finite number' if count == 1 else f'{count} such numbers'} in F32."
    )


def read_gguf_config(path: Path) -> Any:
    """Return the configuration of the model of a GGUF file.

    Where Transformers reads it, it reads the whole vocabulary too, so a file is read once.

    Raises:
        ImportError: The package gguf is missing.
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or Transformers does not understand it.
    """
    import_gguf()
    file = GgufFile(path)
    check_counts(file.values, path)
    config = header_config(file)
    if config is not None:
        return config
    stat = path.stat()
    return copy.deepcopy(_read_config(path.resolve(), stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2)
def _read_config(path: Path, size: int, modified: int) -> Any:
    return read_config(path.parent, gguf_file=path.name)


def rows_of(match: GgufModel, key: str) -> torch.Tensor:
    """Return the bytes of a tensor, (…, bytes of a row) uint8, its rows as in Transformers.

    Args:
        match: The file and its model.
        key: Name of the tensor in the model, its experts split.
    """
    source = match.sources[key]
    height = source.shape[0] // len(source.names)
    stored = [match.file.blocks(n, source.expert).reshape(height, -1) for n in source.names]
    blocks = stored[0] if len(stored) == 1 else torch.stack(stored, 1)
    blocks = blocks.reshape(*source.shape[:-1], -1)
    if not (match.architecture.interleaves and is_rotated(key)):
        return blocks
    # argsort inverts the permutation: rows return to the order of Transformers.
    return blocks[torch.argsort(interleaved_rows(len(blocks), match.head))]


def float_values(match: GgufModel, key: str) -> torch.Tensor:
    """Return the values of a tensor of floats; see ``rows_of``."""
    values = rows_of(match, key).clone().view(FLOAT_TYPES[match.kind(key)])
    if match.architecture.norm_offset and key.endswith("norm.weight"):
        return values - match.architecture.norm_offset
    return values


def _float_type(file: GgufFile) -> torch.dtype:
    """Return the type for tensors that are not quantized.

    It is the type of the float matrices, unless a vector, a bias or the weight of a router does not
    fit in it exactly. These are float32 in files of any type.
    """
    floats = {name: tensor for name, tensor in file.tensors.items() if tensor.kind in FLOAT_TYPES}
    wide = {n for n, t in floats.items() if len(t.shape) == 1 or n.endswith((ROUTER, ".bias"))}
    kinds = {FLOAT_TYPES[tensor.kind] for name, tensor in floats.items() if name not in wide}
    if len(kinds) != 1:
        return torch.float32
    (kind,) = kinds
    for name in wide:
        is_parameter = name != FACTORS and not name.endswith((TENSOR_SCALE, _INPUT_SCALE))
        if floats[name].kind == "F32" and is_parameter:
            values = file.blocks(name).clone().view(torch.float32)
            if not values.to(kind).float().equal(values):
                return torch.float32
    return kind
