"""Writing a model to one GGUF file, for llama.cpp and software built on it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.torch.export.checkpoint.writer import check_exportable, check_present
from quark.torch.export.checks import check_float, check_state
from quark.torch.export.formats.layer_checks import common_problem, describe_problems, weight_shape
from quark.torch.export.formats.layouts.act_order import ACT_ORDER_PROBLEM, has_act_order
from quark.torch.export.gguf.architectures import (
    Architecture,
    architecture_of,
    head_size,
    import_gguf,
    is_rotated,
)
from quark.torch.export.gguf.blocks import SUPPORTED, block_type, pack_blocks, stored_columns
from quark.torch.export.gguf.metadata import add_metadata
from quark.torch.export.gguf.places import (
    ROUTER,
    SCALE,
    Place,
    StoredTensor,
    has_tensor_scale,
    stored_tensors,
)
from quark.torch.export.gguf.rope import FACTORS, frequency_factors, interleaved_rows
from quark.torch.export.gguf.tokenizer import add_tokens, copy_tokens, load_tokenizer
from quark.torch.files import Target
from quark.torch.graph.residency import release, residency_of, resident
from quark.torch.progress import show_progress
from quark.torch.quantization.nn.experts import temporarily_split_experts
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.probabilities import probability_quantizers

QUANTIZATION_VERSION = 2
_FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILE_TYPES = {
    "F32": "ALL_F32",
    **{kind: f"MOSTLY_{kind}" for kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    **{kind: f"MOSTLY_{kind}" for kind in ("NVFP4", "Q2_K", "Q6_K")},
    "MXFP4": "MOSTLY_MXFP4_MOE",
    **{kind: f"MOSTLY_{kind}_S" for kind in ("Q3_K", "Q4_K", "Q5_K")},
}


def write_gguf(
    model: nn.Module, target: Target, model_type: str, tokenizer_path: str | Path
) -> None:
    """Write ``<model_type>.gguf``; see ``ModelExporter.export_gguf_model``.

    ``target`` is called with the number of bytes and gives the directory to write to.
    """
    architecture = check_writable(model)
    if residency_of(model) is None:
        check_present(model)
    with temporarily_split_experts(model):
        _write(_Tensors(model, architecture), target, model_type, tokenizer_path)


def _write(tensors: _Tensors, target: Target, model_type: str, tokenizer_path: str | Path) -> None:
    gguf = import_gguf()
    model, architecture = tensors.model, tensors.architecture
    used = [kind for shape, kind in tensors.outline.values() if len(shape) > 1]
    # The type of the file is that of its matrices: a quantized one, if there is any.
    most = max(_FILE_TYPES, key=lambda kind: (kind in used, kind not in _FLOAT_TYPES.values()))
    with target(tensors.size) as directory:
        writer = gguf.GGUFWriter(directory / f"{model_type}.gguf", architecture.name)
        add_metadata(writer, model.config, model_type, architecture)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[most]])
        writer.add_quantization_version(QUANTIZATION_VERSION)
        _add_tokenizer(writer, model, tokenizer_path)
        for name, (shape, kind) in tensors.outline.items():
            empty = np.empty(0, _stored_dtype(kind))
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(
                name, shape, empty.dtype, prod(shape) * empty.itemsize, raw_dtype=number
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in tensors.values():
            writer.write_tensor_data(values)
        writer.close()


def check_header(model: nn.Module, tokenizer_path: str | Path) -> None:
    """Check that GGUF has a name for every tensor of a model, and for its tokenizer.

    Args:
        model: A model that passed ``check_writable``.
        tokenizer_path: Directory of its tokenizer, or a GGUF file that holds it.

    Raises:
        ImportError: The package gguf is missing.
        ValueError: The tokenizer is missing or unknown, or a tensor has no name.
    """
    gguf = import_gguf()
    architecture = architecture_of(model.config)
    with temporarily_split_experts(model):
        stored_tensors(model, architecture)
    _add_tokenizer(gguf.GGUFWriter(None, architecture.name), model, tokenizer_path)


def _add_tokenizer(writer: Any, model: nn.Module, path: str | Path) -> None:
    """Add the tokenizer of a directory or of a GGUF file; parts of the model make room first."""
    release(model)
    config: Any = model.config
    if Path(path).is_file():
        copy_tokens(writer, path, config.vocab_size)
    else:
        add_tokens(writer, load_tokenizer(path), config.vocab_size)


class _Tensors:
    """The tensors of the file, made when they are written: each part of the model is read once.

    Args:
        model: The model, its experts split. It is not changed.
        architecture: How its family is stored.

    Attributes:
        outline: Name in GGUF -> shape as it is stored, with bytes for columns of blocks, and type.

    Raises:
        ValueError: A tensor has no name in GGUF.
    """

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self.model, self.architecture = model, architecture
        self._stored = stored_tensors(model, architecture)
        self._factors = frequency_factors(model, model.config, head_size(model.config))
        self.outline = {name: self._form(name, stored) for name, stored in self._stored.items()}
        if self._factors is not None:
            self.outline[FACTORS] = tuple(self._factors.shape), "F32"

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(
            prod(shape) * _stored_dtype(kind).itemsize for shape, kind in self.outline.values()
        )

    def values(self) -> Iterator[np.ndarray[Any, Any]]:
        """Iterate over the stored tensors in the order of the outline.

        Raises:
            ValueError: A tensor has values that its block type cannot hold.
        """
        for name, stored in show_progress(list(self._stored.items()), "writing"):
            with resident(self.model, *stored.owners):
                yield self._values(stored, *self.outline[name])
        if self._factors is not None:
            yield _as_array(self._factors, "F32")

    def _values(
        self, stored: StoredTensor, shape: tuple[int, ...], kind: str
    ) -> np.ndarray[Any, Any]:
        """Return a tensor of the file, in its shape and type there."""
        encoded = (
            _as_array(_encode(place, self.architecture, self.model, kind), kind)
            for place in stored.places
        )
        if not stored.is_stack:
            return next(encoded).reshape(shape)
        values = np.empty((shape[0], prod(shape[1:])), _stored_dtype(kind))
        for index, matrix in enumerate(encoded):
            values[index] = matrix.reshape(-1)
        return values.reshape(shape)

    def _form(self, name: str, stored: StoredTensor) -> tuple[tuple[int, ...], str]:
        """Return the shape and the type of a tensor in the file."""
        place = stored.places[0]
        owner = self.model.get_submodule(place.owner)
        kind = _kind(owner, place.attribute, name.endswith(ROUTER))
        shape: tuple[int, ...]
        if isinstance(owner, QuantizedLayer) and place.attribute == "weight":
            rows, columns = weight_shape(owner)
            shape = len(range(rows)[place.rows]), stored_columns(kind, columns)
        elif isinstance(owner, QuantizedLayer) and place.attribute == SCALE:
            shape = (1,)
        else:
            tensor = getattr(owner, place.attribute)
            width = tensor.itemsize if kind == "BF16" else 1
            shape = (*tensor[place.rows].shape[:-1], tensor[place.rows].shape[-1] * width)
        if stored.is_stack:
            return (len(stored.places), *(() if place.attribute == SCALE else shape)), kind
        # A matrix of one row, such as the gate of a shared expert, is a vector in ggml.
        return (shape[1:] if len(shape) == 2 and shape[0] == 1 else shape), kind


def _kind(owner: nn.Module, attribute: str, is_router: bool = False) -> str:
    """Return the type of a tensor in the file.

    Args:
        owner: The module that holds it.
        attribute: Its name there, as in ``Place``.
        is_router: Whether it is the weight of a router, which llama.cpp computes in float32.
    """
    if isinstance(owner, QuantizedLayer) and attribute == "weight":
        weight = owner.quant_config.weight
        return (weight and block_type(weight, weight_shape(owner)[1])) or ""
    if isinstance(owner, QuantizedLayer) and attribute == SCALE:
        return "F32"
    tensor = getattr(owner, attribute)
    is_vector = tensor.dim() == 1 or len(tensor) == 1
    return "F32" if is_vector or is_router else _FLOAT_TYPES[tensor.dtype]


def _stored_dtype(kind: str) -> np.dtype[Any]:
    """Return the type of the elements that stand for a tensor: bytes for all but F32 and F16."""
    return np.dtype({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))


def _as_array(tensor: torch.Tensor, kind: str) -> np.ndarray[Any, Any]:
    stored = tensor.detach().cpu().contiguous()
    array: np.ndarray[Any, Any] = (
        stored if kind in ("F32", "F16") else stored.view(torch.uint8)
    ).numpy()
    return array


def check_writable(model: nn.Module) -> Architecture:
    """Check that GGUF can hold every layer of a model, and return its architecture.

    Raises:
        ValueError: The model family, or the scheme of a layer, is not supported.
    """
    check_exportable(model)
    if next(probability_quantizers(model), None) is not None:
        raise ValueError(
            "GGUF cannot tell that probabilities of attention are quantized: quantize without "
            "attention_scheme and softmax_quant_spec."
        )
    architecture = architecture_of(getattr(model, "config", None))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    problems = {name: _layer_problem(layer, architecture) for name, layer in layers.items()}
    with temporarily_split_experts(model):
        problems |= dict(_stack_problems(model))
    described = describe_problems(problems)
    if described:
        raise ValueError(f"GGUF cannot hold {described}. It holds {SUPPORTED}.")
    return architecture


def _stack_problems(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Iterate over (layer of experts, reason) where matrices of a stack are of several types."""
    for path, module in model.named_modules():
        if not isinstance(module, LinearExperts):
            continue
        for part in (part for stack in module.stacks.values() for part in stack.parts):
            layers = (module.get_submodule(f"{n}.{part}") for n in range(module.num_experts))
            kinds = [_kind(layer, "weight") for layer in layers]
            other = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), None)
            if other is not None:
                yield (
                    path,
                    f"{part} of all experts is one tensor of one type, but expert 0 has "
                    f"{kinds[0] or 'none'} and expert {other} {kinds[other] or 'none'}: give the "
                    "experts of a layer one scheme, or leave all of them in float",
                )


def _layer_problem(layer: QuantizedLayer, architecture: Architecture) -> str | None:
    """Return why GGUF cannot hold a layer, or None."""
    config, weight = layer.quant_config, layer.quant_config.weight
    problem = common_problem(layer, (nn.Linear, nn.Embedding))
    if problem is not None or weight is None:
        return problem
    for tensor in ("input", "output"):
        if getattr(config, f"{tensor}_tensors") is not None:
            return f"its {tensor} is quantized"
    if has_act_order(layer):
        return ACT_ORDER_PROBLEM
    columns = weight_shape(layer)[1]
    if block_type(weight, columns) is None:
        return f"its weight of {columns} inputs is {weight.dtype.name} " + (
            f"{weight.scheme.qscheme.name}, group_size={weight.group_size}, "
            f"symmetric={weight.scheme.symmetric}"
        )
    if has_tensor_scale(layer):
        if isinstance(layer, nn.Embedding):
            return "it is an embedding, which llama.cpp reads without a tensor scale"
        if not architecture.tensor_scales:
            return f"llama.cpp leaves out tensor scales in models {architecture.name!r}"
    return None


def _encode(place: Place, architecture: Architecture, model: nn.Module, kind: str) -> torch.Tensor:
    """Return the values or blocks that GGUF stores for a tensor.

    Args:
        place: Where the tensor is.
        architecture: How the model family is stored.
        model: The model.
        kind: Type in the file.

    Raises:
        ValueError: A value is NaN or infinite, or the type cannot hold it.
    """
    owner, key = model.get_submodule(place.owner), place.key
    layer = owner if isinstance(owner, QuantizedLayer) else None
    state = None if layer is None else layer.quantized_tensor("weight")
    if state is not None and place.attribute == SCALE:
        assert state.scale_2 is not None
        return state.scale_2.float().reshape(1)
    if state is not None and place.attribute == "weight":
        try:
            check_state(state, "weight")
            stored = pack_blocks(state, kind)
        except ValueError as error:
            raise ValueError(f"{key} cannot be written: {error}") from None
    else:
        value: Any = getattr(owner, place.attribute) if layer is None else layer.value("bias")
        check_float({key: value})
        stored = value.float() if kind == "F32" else value
        if architecture.norm_offset and key.endswith("norm.weight"):
            stored = stored + architecture.norm_offset
    if architecture.interleaves and is_rotated(key):
        order = interleaved_rows(len(stored), head_size(model.config))
        stored = stored[order.to(stored.device)]
    return stored[place.rows]
