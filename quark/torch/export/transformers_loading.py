"""Checkpoints that Transformers loads itself: it calls ``map_to_quark`` before it reads tensors.

Transformers assigns stored tensors to our layers, gives missing ones arbitrary values, and does not
tell us. So headers are checked before, where the files are known, and each layer checks itself when
its tensors are assigned.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.config_json import CONFIG, SECTION, read_config_json
from quark.torch.export.checkpoint.files import CheckpointReader, TensorHeader
from quark.torch.export.checkpoint.header_checks import fits, is_offset
from quark.torch.export.checkpoint.reader import (
    check_stored,
    known_offsets,
    prepare_layers,
    quantized_layers,
    zero_offset,
)
from quark.torch.export.checkpoint.transformers_names import rename_for_model
from quark.torch.export.checkpoint.value_checks import check_layer_values, check_values
from quark.torch.export.formats.base import ExportFormat, get_format
from quark.torch.export.recognition import recognize_format
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.nn.experts import split_experts, stack_experts
from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.packed import PackedLayer
from quark.torch.quantization.preparation import refuse_to_save

# Transformers sets this attribute on tensors that it has read, and initializes no module with it.
_READ = "_is_hf_initialized"


def map_to_quark(
    model: nn.Module, quantization_config: Config, pack_method: str, custom_mode: str
) -> None:
    """Prepare a float model for stored tensors; Transformers calls this before it loads them.

    Args:
        model: The model, on the meta device.
        quantization_config: Configuration of the checkpoint.
        pack_method: Order of 4-bit codes in a word.
        custom_mode: Checkpoint format.

    Raises:
        ValueError: The configuration does not fit the model, or the checkpoint does not. The layers
            raise this too, when the model is loaded, for tensors that are missing or not sound.
    """
    options = quantization_config.export or JsonExporterConfig()
    options = replace(options, pack_method=pack_method)
    fmt = get_format(custom_mode, quantization_config, options)
    fmt.check_readable()
    experts = split_experts(model)
    layers = quantized_layers(model, quantization_config)
    directory = _directory(model, quantization_config)
    reader = None if directory is None else CheckpointReader(directory)
    if reader is not None:
        layers = fmt.stored_layers(layers, rename_for_model(reader, model))
    stack_experts(experts, keep=layers)
    if reader is not None:
        try:
            check_stored(model, fmt, layers, reader)
        except ValueError as error:
            raise ValueError(f"{directory}: {_stored_names(str(error))}") from None
    prepare_layers(model, fmt, layers)
    _untie(model)
    stored = {} if reader is None else {fmt.state_name(k): e for k, e in reader.entries.items()}
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = refuse_to_save  # type: ignore[assignment]
    others = [(n, m) for n, m in model.named_modules() if not isinstance(m, PackedLayer)]
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLayer):
            check = partial(
                _check_loaded, name=name, expected=_state(layer), fmt=fmt, others=others
            )
            layer.finish_load_with(check)
            _take_shapes(layer, name, stored)
            setattr(layer, _READ, True)  # never initialize codes at random
    for module, _ in experts.values():
        if isinstance(module, LinearExperts):
            module.expect_stacked()


def _directory(model: Any, config: Config) -> Path | None:
    """Return the directory whose files Transformers reads whole, None if that is not known.

    It may read them for another class (a classifier, from a language model), from a subfolder, or
    not at all: then the section of ``config.json`` or the class differs. Files of the Hub are in
    its cache by now, unless ``from_pretrained`` was given another ``cache_dir``. If revisions with
    different tensors fit, it is not known which of them is read.
    """
    described = getattr(model, "config", None)
    name, classes = (getattr(described, n, None) for n in ("name_or_path", "architectures"))
    if not (name and isinstance(classes, list) and type(model).__name__ in classes):
        return None
    if Path(name).is_dir():
        return Path(name) if _holds(Path(name), config) else None
    directories = []
    for snapshot in _snapshots(name):
        with suppress(ValueError):  # of another revision
            directories += [snapshot] if _holds(snapshot, config) else []
    if len(directories) > 1 and not _have_same_headers(directories):
        return None
    return directories[0] if directories else None


def _holds(directory: Path, config: Config) -> bool:
    """Whether a directory has safetensors, and a ``config.json`` with a configuration."""
    if not (directory / CONFIG).is_file() or not any(directory.glob("*.safetensors")):
        return False
    stored = read_config_json(directory)
    return SECTION in stored and recognize_format(stored, str(directory)).config == config


def _snapshots(name: str) -> list[Path]:
    """Return the directories in the cache of the Hub with revisions of a model.

    Transformers does not say which of them it reads.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name, repo_type="model")
    return sorted((Path(constants.HF_HUB_CACHE) / folder / "snapshots").glob("*"))


def _have_same_headers(directories: list[Path]) -> bool:
    try:
        first, *others = (CheckpointReader(directory).entries for directory in directories)
    except (FileNotFoundError, ValueError):
        return False
    return all(entries == first for entries in others)


def _untie(model: Any) -> None:
    """Keep Transformers from tying weights of packed layers, as it does if the values are equal."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for pair in list(tied.items()):
        if any(isinstance(model.get_submodule(n.rpartition(".")[0]), PackedLayer) for n in pair):
            del tied[pair[0]]
            model.config.tie_word_embeddings = False


def _take_shapes(layer: PackedLayer, name: str, stored: dict[str, TensorHeader]) -> None:
    """Give single numbers of a layer the shape that they are stored in.

    Transformers compares shapes, and some tools store a scale per tensor as [1] instead of [].
    """
    for part, tensor in layer.named_buffers():
        header = stored.get(f"{name}.{part}")
        if header is not None and prod(header.shape) == tensor.numel() == 1:
            path, _, attribute = part.rpartition(".")
            setattr(layer.get_submodule(path), attribute, tensor.reshape(header.shape))


def _state(layer: PackedLayer) -> dict[str, torch.Tensor]:
    """Return the tensors that a layer needs, on the meta device."""
    return {name: tensor.to("meta") for name, tensor in layer.state_dict().items()}


def _stored_names(text: str) -> str:
    """Return a text with names of stored tensors: ``weight_quantizer.scale`` is weight_scale."""
    return text.replace("_quantizer.", "_")


def _check_loaded(
    layer: PackedLayer,
    name: str,
    expected: dict[str, torch.Tensor],
    fmt: ExportFormat,
    others: list[tuple[str, nn.Module]],
) -> None:
    """Check that Transformers has read the tensors of a layer, and that they are sound.

    Zero points that need not be stored are set.

    Args:
        layer: The layer.
        name: Its name.
        expected: Its state, on the meta device.
        fmt: Format of the checkpoint.
        others: The modules that are not packed, which the first layer checks and removes.

    Raises:
        ValueError: A tensor is missing, or of the wrong type; or a value is not sound.
    """
    known = known_offsets(layer.quant_config, fmt)
    state = layer.state_dict(keep_vars=True)
    members = chain(layer.named_parameters(), layer.named_buffers())
    read = {part for part, tensor in members if getattr(tensor, _READ, False)}
    for part, needed in expected.items():
        tensor = state.get(part, needed)
        stored = _stored_names(f"{name}.{part}")
        header = TensorHeader("", tuple(tensor.shape), tensor.dtype)
        if part not in read:
            if part not in known:
                raise ValueError(f"{stored} is missing from the checkpoint: export it again.")
            path, _, attribute = part.rpartition(".")
            offset = zero_offset(layer, part, needed, tensor.device)
            setattr(layer.get_submodule(path), attribute, offset)
        elif not fits(header, needed, is_offset(part, expected)):
            raise ValueError(
                f"{stored} is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{needed.dtype} {list(needed.shape)}: export the checkpoint again."
            )
        elif tensor.shape != needed.shape:
            path, _, attribute = part.rpartition(".")
            setattr(layer.get_submodule(path), attribute, tensor.reshape(needed.shape))
    check_layer_values(layer, name)
    check_values(others)
    others.clear()
