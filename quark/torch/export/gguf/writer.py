"""Writing a model to one GGUF file, for llama.cpp and software built on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.writer import check_exportable, check_present
from quark.torch.export.checks import check_state
from quark.torch.export.formats.layer_checks import common_problem, describe_problems, weight_shape
from quark.torch.export.formats.layouts.act_order import ACT_ORDER_PROBLEM, has_act_order
from quark.torch.export.gguf.architectures import (
    Architecture,
    architecture_of,
    head_size,
    import_gguf,
    is_rotated,
    tensor_names,
)
from quark.torch.export.gguf.blocks import SUPPORTED, block_type, pack_blocks
from quark.torch.export.gguf.metadata import add_metadata
from quark.torch.export.gguf.rope import FACTORS, frequency_factors, interleaved_rows
from quark.torch.export.gguf.tokenizer import add_tokens
from quark.torch.files import Target, size_of
from quark.torch.quantization.nn.layer import QuantizedLayer

QUANTIZATION_VERSION = 2
_FLOAT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILE_TYPES = {
    "F32": "ALL_F32",
    **{kind: f"MOSTLY_{kind}" for kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q8_0")},
}
Tensors = dict[str, tuple[torch.Tensor, str]]  # name in GGUF -> values or blocks, their type


def write_gguf(
    model: nn.Module, target: Target, model_type: str, tokenizer_path: str | Path
) -> None:
    """Write ``<model_type>.gguf``; see ``ModelExporter.export_gguf_model``.

    ``target`` is called with the number of bytes and gives the directory to write to.
    """
    gguf = import_gguf()
    architecture = check_writable(model)
    check_present(model)
    config: Any = model.config
    tensors = _collect_tensors(model, architecture)
    used = [kind for tensor, kind in tensors.values() if tensor.dim() > 1]
    # The type of the file is that of its matrices: a quantized one, if there is any.
    most = max(_FILE_TYPES, key=lambda kind: (kind.startswith("Q") and kind in used, kind in used))
    values = {name: tensor for name, (tensor, _) in tensors.items()}
    tokenizer = _tokenizer(tokenizer_path)
    with target(size_of(values)) as directory:
        writer = gguf.GGUFWriter(directory / f"{model_type}.gguf", architecture.name)
        add_metadata(writer, config, model_type, architecture.rms)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[most]])
        writer.add_quantization_version(QUANTIZATION_VERSION)
        add_tokens(writer, tokenizer, config.vocab_size)
        for name, (tensor, kind) in tensors.items():
            stored = tensor.detach().cpu().contiguous()
            stored = stored.view(torch.uint8) if kind not in ("F32", "F16") else stored
            writer.add_tensor(name, stored.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def check_header(model: nn.Module, tokenizer_path: str | Path) -> None:
    """Check that GGUF has a name for every tensor of a model, and for its tokenizer.

    Args:
        model: A model that passed ``check_writable``.
        tokenizer_path: Directory of its tokenizer.

    Raises:
        ImportError: The package gguf is missing.
        ValueError: The tokenizer is missing or unknown, or a tensor has no name.
    """
    gguf = import_gguf()
    config: Any = model.config
    architecture = architecture_of(config)
    names = tensor_names(architecture, config)
    for key in _parts(model):
        names(key)
    add_tokens(
        gguf.GGUFWriter(None, architecture.name), _tokenizer(tokenizer_path), config.vocab_size
    )


def _tokenizer(path: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer_path={str(path)!r} has no tokenizer that Transformers loads ({error})."
        ) from error


def _collect_tensors(model: nn.Module, architecture: Architecture) -> Tensors:
    """Return every tensor under its name in GGUF, without copies of tied tensors.

    Raises:
        ValueError: A tensor has no name in GGUF, or values that its block type cannot hold.
    """
    names = tensor_names(architecture, model.config)
    parts = _parts(model)
    tensors = {names(key): _encode(key, part, architecture, model) for key, part in parts.items()}
    factors = frequency_factors(model, model.config, head_size(model.config))
    return tensors if factors is None else {**tensors, FACTORS: (factors, "F32")}


def _parts(model: nn.Module) -> dict[str, Any]:
    """Return tensors in float and quantized layers by the names of their tensors."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    modules = model.named_modules(remove_duplicate=False)
    every_name = {n for n, m in modules if isinstance(m, QuantizedLayer)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict()
    parts: dict[str, Any] = {}
    for key, tensor in state.items():
        owners = {key.rsplit(".", 1)[0], key.rsplit(".", 2)[0]}
        is_copy = key in tied and tensor.data_ptr() == state[tied[key]].data_ptr()
        if not owners & every_name and not is_copy:
            parts[key] = tensor
    for name, layer in layers.items():
        parts[f"{name}.weight"], bias = layer, layer.value("bias")
        if bias is not None:
            parts[f"{name}.bias"] = bias
    return parts


def check_writable(model: nn.Module) -> Architecture:
    """Check that GGUF can hold every layer of a model, and return its architecture.

    Raises:
        ValueError: The model family, or the scheme of a layer, is not supported.
    """
    check_exportable(model)
    architecture = architecture_of(getattr(model, "config", None))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    described = describe_problems({name: _layer_problem(layer) for name, layer in layers.items()})
    if described:
        raise ValueError(f"GGUF cannot hold {described}. It holds {SUPPORTED}.")
    return architecture


def _layer_problem(layer: QuantizedLayer) -> str | None:
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
    return None


def _encode(
    key: str, part: Any, architecture: Architecture, model: nn.Module
) -> tuple[torch.Tensor, str]:
    """Return the values or blocks that GGUF stores for a tensor, and their type.

    Args:
        key: Name of the tensor in Transformers.
        part: A tensor, or the quantized layer whose weight it is.
        architecture: How the model family is stored.
        model: The model.
    """
    if isinstance(part, torch.Tensor):
        kind = "F32" if part.dim() == 1 else _FLOAT_TYPES[part.dtype]
        stored = part.float() if part.dim() == 1 else part
        if architecture.norm_offset and key.endswith("norm.weight"):
            stored = stored + architecture.norm_offset
    else:
        kind = block_type(part.quant_config.weight, weight_shape(part)[1]) or ""
        state = part.quantized_tensor("weight")
        try:
            check_state(state, "weight")
            stored = pack_blocks(state, kind)
        except ValueError as error:
            raise ValueError(f"{key} cannot be written: {error}") from None
    if architecture.interleaves and is_rotated(key):
        order = interleaved_rows(len(stored), head_size(model.config))
        stored = stored[order.to(stored.device)]
    return stored, kind
