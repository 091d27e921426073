"""Models in one GGUF file, for llama.cpp and what is built on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.files import check_vacant, fresh_directory, size_of
from quark.torch.export.checkpoint.writer import check_exportable, check_present
from quark.torch.export.checks import check_state
from quark.torch.export.formats.layouts.act_order import PROBLEM, has_order
from quark.torch.export.formats.third_party import refusals, shape_of
from quark.torch.export.gguf.blocks import HOLDS, block_type, to_blocks
from quark.torch.export.gguf.metadata import (
    Architecture,
    add_metadata,
    architecture_of,
    head_size,
    interleaved_rows,
    rope_factors,
)
from quark.torch.export.gguf.tokenizer import add_tokens
from quark.torch.quantization.nn.layer import QuantMixin
from quark.torch.quantization.nn.packed import PackedMixin

QUANTIZATION_VERSION = 2
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILE_TYPES = {
    "F32": "ALL_F32",
    **{kind: f"MOSTLY_{kind}" for kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q8_0")},
}
Tensors = dict[str, tuple[torch.Tensor, str]]  # name in GGUF -> values or blocks, their type


def write_gguf(
    model: nn.Module,
    directory: Path,
    model_type: str,
    tokenizer_path: str | Path,
    overwrite: bool,
    judge: Callable[[Path, nn.Module], None],
) -> None:
    """Write ``<model_type>.gguf``; see ``ModelExporter.export_gguf_model``.

    ``judge`` sees the directory and the model before the directory takes its place.
    """
    gguf = _package()
    check_vacant(directory, overwrite)
    architecture = check_holds(model)
    check_present(model)
    config: Any = model.config
    tensors = _collect(model, architecture)
    used = [kind for tensor, kind in tensors.values() if tensor.dim() > 1]
    most = max(_FILE_TYPES, key=lambda kind: (kind.startswith("Q") and kind in used, kind in used))
    values = {name: tensor for name, (tensor, _) in tensors.items()}
    with fresh_directory(directory, overwrite, size_of(values)) as partial:
        writer = gguf.GGUFWriter(partial / f"{model_type}.gguf", architecture.name)
        add_metadata(writer, config, model_type, architecture.rms)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[most]])
        writer.add_quantization_version(QUANTIZATION_VERSION)
        add_tokens(writer, _tokenizer(tokenizer_path), config.vocab_size)
        for name, (tensor, kind) in tensors.items():
            stored = tensor.detach().cpu().contiguous()
            stored = stored.view(torch.uint8) if kind not in ("F32", "F16") else stored
            writer.add_tensor(name, stored.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        judge(partial, model)


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError(
            "GGUF export needs the package gguf: pip install 'quark[gguf]' or pip install gguf."
        ) from None
    return gguf


def _tokenizer(path: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer_path={str(path)!r} has no tokenizer that Transformers loads ({error})."
        ) from error


def _collect(model: nn.Module, architecture: Architecture) -> Tensors:
    """Return every tensor under its name in GGUF.

    Raises:
        ValueError: A tensor has no place there, or values that no block holds.
    """
    quantized = (QuantMixin, PackedMixin)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, quantized)}
    modules = model.named_modules(remove_duplicate=False)
    every_name = {n for n, m in modules if isinstance(m, quantized)}
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
    names = tensor_names(architecture, model.config)
    placed = {names(key): _stored(key, part, architecture, model) for key, part in parts.items()}
    factors = rope_factors(model, model.config)
    return placed if factors is None else {**placed, "rope_freqs.weight": (factors, "F32")}


def check_holds(model: nn.Module) -> Architecture:
    """Return how a model is stored in GGUF.

    Raises:
        ValueError: Its family or the scheme of a layer has no place there.
    """
    check_exportable(model)
    architecture = architecture_of(getattr(model, "config", None))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (QuantMixin, PackedMixin))}
    said = refusals({name: _problem(layer) for name, layer in layers.items()})
    if said:
        raise ValueError(f"GGUF cannot hold {said}. It holds {HOLDS}.")
    return architecture


def _problem(layer: QuantMixin | PackedMixin) -> str | None:
    """Return why no block holds a layer, or None."""
    config, weight = layer.quant_config, layer.quant_config.weight
    for what in ("input_tensors", "output_tensors", "bias"):
        if getattr(config, what) is not None:
            return f"its {what.removesuffix('_tensors')} is quantized"
    if layer.input_rotation is not None:
        return "its input is rotated"
    if has_order(layer):
        return PROBLEM
    if layer.float_class not in (nn.Linear, nn.Embedding):
        return f"it is a {layer.float_class.__name__}"
    if weight is None:
        return "its weight is not quantized"
    columns = shape_of(layer)[1]
    if block_type(weight, columns) is None:
        return f"its weight of {columns} inputs is {weight.dtype.name} " + (
            f"{weight.scheme.qscheme.name}, group_size={weight.group_size}, "
            f"symmetric={weight.scheme.symmetric}"
        )
    return None


def _stored(
    key: str, part: Any, architecture: Architecture, model: nn.Module
) -> tuple[torch.Tensor, str]:
    """Return a tensor, or the weight of a quantized layer, as GGUF stores it, and its type."""
    if isinstance(part, torch.Tensor):
        stored, kind = (part.float(), "F32") if part.dim() == 1 else (part, _FLOATS[part.dtype])
        if architecture.norm_offset and key.endswith("norm.weight"):
            stored = stored + architecture.norm_offset
    else:
        kind = block_type(part.quant_config.weight, shape_of(part)[1]) or ""
        state = part.state("weight")
        try:
            check_state(state, "weight")
            stored = to_blocks(state, kind)
        except ValueError as error:
            raise ValueError(f"{key} cannot be written: {error}") from None
    if architecture.interleaves and key.split(".")[-2] in ("q_proj", "k_proj"):
        order = interleaved_rows(len(stored), head_size(model.config))
        stored = stored[order.to(stored.device)]
    return stored, kind


def tensor_names(architecture: Architecture, config: Any) -> Callable[[str], str]:
    """Return what gives the name in GGUF of a tensor."""
    gguf = _package()
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def name(key: str) -> str:
        found: str | None = table.get_name(key, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"GGUF has no place for {key} in a model {architecture.name!r}.")
        return found

    return name
