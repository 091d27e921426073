"""Writing a model to one GGUF file, for llama.cpp and software built on it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from quark.torch.export.checkpoint.writer import check_exportable, check_present
from quark.torch.export.checks import check_float, check_state
from quark.torch.export.formats.layer_checks import common_problem, describe_problems, weight_shape
from quark.torch.export.formats.layouts.act_order import ACT_ORDER_PROBLEM, has_act_order
from quark.torch.export.gguf.architectures import (
    TENSOR_SCALE,
    Architecture,
    architecture_of,
    head_size,
    import_gguf,
    is_rotated,
    tensor_names,
)
from quark.torch.export.gguf.blocks import SUPPORTED, block_type, pack_blocks, stored_columns
from quark.torch.export.gguf.metadata import add_metadata
from quark.torch.export.gguf.rope import FACTORS, frequency_factors, interleaved_rows
from quark.torch.export.gguf.tokenizer import add_tokens, copy_tokens, load_tokenizer
from quark.torch.files import Target
from quark.torch.graph.residency import release, residency_of, resident
from quark.torch.progress import show_progress
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.probabilities import probability_quantizers

QUANTIZATION_VERSION = 2
_SCALE = TENSOR_SCALE.removeprefix(".")
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
    gguf = import_gguf()
    architecture = check_writable(model)
    if residency_of(model) is None:
        check_present(model)
    config: Any = model.config
    tensors = _Tensors(model, architecture)
    used = [kind for shape, kind in tensors.outline.values() if len(shape) > 1]
    # The type of the file is that of its matrices: a quantized one, if there is any.
    most = max(_FILE_TYPES, key=lambda kind: (kind in used, kind not in _FLOAT_TYPES.values()))
    with target(tensors.size) as directory:
        writer = gguf.GGUFWriter(directory / f"{model_type}.gguf", architecture.name)
        add_metadata(writer, config, model_type, architecture.rms)
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
    config: Any = model.config
    architecture = architecture_of(config)
    names = tensor_names(architecture, config)
    for place in _places(model):
        names(place.key)
    _add_tokenizer(gguf.GGUFWriter(None, architecture.name), model, tokenizer_path)


def _add_tokenizer(writer: Any, model: nn.Module, path: str | Path) -> None:
    """Add the tokenizer of a directory or of a GGUF file; parts of the model make room first."""
    release(model)
    config: Any = model.config
    if Path(path).is_file():
        copy_tokens(writer, path, config.vocab_size)
    else:
        add_tokens(writer, load_tokenizer(path), config.vocab_size)


class _Place(NamedTuple):
    """Where a tensor of the file is in the model.

    Attributes:
        owner: Name of a module.
        attribute: Name of its parameter or buffer. The bias of a quantized layer may be quantized.
            The tensor scale of its weight is called as in GGUF.
    """

    owner: str
    attribute: str

    @property
    def key(self) -> str:
        """Name of the tensor in the model."""
        return f"{self.owner}.{self.attribute}" if self.owner else self.attribute


class _Tensors:
    """The tensors of the file, made when they are written: each part of the model is read once.

    Args:
        model: The model. It is not changed.
        architecture: How its family is stored.

    Attributes:
        outline: Name in GGUF -> shape as it is stored, with bytes for columns of blocks, and type.

    Raises:
        ValueError: A tensor has no name in GGUF.
    """

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self._model, self._architecture = model, architecture
        names = tensor_names(architecture, model.config)
        self._places = {names(place.key): place for place in _places(model)}
        self._factors = frequency_factors(model, model.config, head_size(model.config))
        self.outline = {name: self._form(place) for name, place in self._places.items()}
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
        for name, place in show_progress(list(self._places.items()), "writing"):
            with resident(self._model, place.owner):
                stored = _encode(place, self._architecture, self._model, self.outline[name][1])
                yield _as_array(stored, self.outline[name][1])
        if self._factors is not None:
            yield _as_array(self._factors, "F32")

    def _form(self, place: _Place) -> tuple[tuple[int, ...], str]:
        """Return the shape and the type of a tensor in the file."""
        owner = self._model.get_submodule(place.owner)
        if isinstance(owner, QuantizedLayer) and place.attribute == "weight":
            rows, columns = weight_shape(owner)
            weight = owner.quant_config.weight
            kind = (weight and block_type(weight, columns)) or ""
            return (rows, stored_columns(kind, columns)), kind
        if isinstance(owner, QuantizedLayer) and place.attribute == _SCALE:
            return (1,), "F32"
        tensor = getattr(owner, place.attribute)
        if tensor.dim() == 1:
            return tuple(tensor.shape), "F32"
        kind = _FLOAT_TYPES[tensor.dtype]
        width = tensor.itemsize if kind == "BF16" else 1
        return (*tensor.shape[:-1], tensor.shape[-1] * width), kind


def _stored_dtype(kind: str) -> np.dtype[Any]:
    """Return the type of the elements that stand for a tensor: bytes for all but F32 and F16."""
    return np.dtype({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))


def _as_array(tensor: torch.Tensor, kind: str) -> np.ndarray[Any, Any]:
    stored = tensor.detach().cpu().contiguous()
    array: np.ndarray[Any, Any] = (
        stored if kind in ("F32", "F16") else stored.view(torch.uint8)
    ).numpy()
    return array


def _places(model: nn.Module) -> list[_Place]:
    """Return where the tensors of the file are, in the order of the model, tied ones once."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    modules = dict(model.named_modules(remove_duplicate=False))
    every_name = {n for n, m in modules.items() if isinstance(m, QuantizedLayer)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict()
    places = []
    for key, tensor in state.items():
        owners = {key.rsplit(".", 1)[0], key.rsplit(".", 2)[0]}
        is_copy = key in tied and tensor.data_ptr() == state[tied[key]].data_ptr()
        if not owners & every_name and not is_copy:
            owner, _, attribute = key.rpartition(".")
            places.append(_Place(owner, attribute))
    for name, layer in layers.items():
        places.append(_Place(name, "weight"))
        if _has_tensor_scale(layer):
            places.append(_Place(name, _SCALE))
        if getattr(layer, "bias", None) is not None:
            places.append(_Place(name, "bias"))
    order = {name: number for number, name in enumerate(modules)}
    return sorted(places, key=lambda place: order[place.owner])


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
    described = describe_problems(problems)
    if described:
        raise ValueError(f"GGUF cannot hold {described}. It holds {SUPPORTED}.")
    return architecture


def _has_tensor_scale(layer: QuantizedLayer) -> bool:
    weight = layer.quant_config.weight
    return weight is not None and weight.scheme.scale.two_level


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
    if _has_tensor_scale(layer):
        if isinstance(layer, nn.Embedding):
            return "it is an embedding, which llama.cpp reads without a tensor scale"
        if not architecture.tensor_scales:
            return f"llama.cpp leaves out tensor scales in models {architecture.name!r}"
    return None


def _encode(place: _Place, architecture: Architecture, model: nn.Module, kind: str) -> torch.Tensor:
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
    if state is not None and place.attribute == _SCALE:
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
        stored = value.float() if value.dim() == 1 else value
        if architecture.norm_offset and key.endswith("norm.weight"):
            stored = stored + architecture.norm_offset
    if architecture.interleaves and is_rotated(key):
        order = interleaved_rows(len(stored), head_size(model.config))
        stored = stored[order.to(stored.device)]
    return stored
