"""Parameters of a quantized model with a JSON description of its structure.

``<model_type>.json`` has the version, the configuration of the model and the tree of its modules
with the specification of each quantized tensor; ``<model_type>.safetensors`` has the tensors. Of
packed codes it also has their order (``pack_method``), which files of earlier versions lack.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark import __version__
from quark.torch.digests import DIGESTS, check_unchanged
from quark.torch.export.checkpoint.architecture import empty_model, made_config
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.graphs import is_quantized_graph
from quark.torch.export.checkpoint.headers import NATIVE
from quark.torch.export.checkpoint.low_rank_config import with_low_rank
from quark.torch.export.checkpoint.reader import load
from quark.torch.export.checkpoint.rotation_config import with_rotations
from quark.torch.export.checkpoint.writer import collect, make_format
from quark.torch.export.formats.base import get_format
from quark.torch.export.graph_archive import graph_archive, load_graph_archive
from quark.torch.export.recognition import reading
from quark.torch.files import fresh_directory, read_json, size_of, write_json
from quark.torch.graph.residency import residency_of
from quark.torch.quantization.config.config import OLDEST, Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.name_lookup import member
from quark.torch.quantization.config.tensor_names import LOW_RANK, PRESCALE, SHORT_NAMES
from quark.torch.quantization.config.type import QuantizationMode
from quark.torch.quantization.config.value_types import check_types
from quark.torch.quantization.nn.attention import attention_routes
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.probabilities import probability_quantizers

FLOAT_OPTIONS = JsonExporterConfig(weight_format="fake_quantized")  # without ``compressed``
_ORDER = "pack_method"  # key of the order of packed codes
_SPEC_KEYS = {name: f"{short}_quant" for name, short in SHORT_NAMES.items()}


def save_params(
    model: nn.Module,
    model_type: str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    export_dir: str | Path | None = None,
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
    overwrite: bool = False,
) -> None:
    """Write ``<model_type>.json`` and ``<model_type>.safetensors`` into a directory.

    A graph is written as ``<model_type>_quantized.pth``, an archive of ``torch.export.save`` that
    torch opens without this package. It may lie beside other outputs, such as ``quark_model.onnx``.

    Args:
        model: A frozen model. It is not changed.
        model_type: Name of the files.
        args: Example of the arguments of a graph.
        kwargs: Example of keyword arguments of a graph.
        export_dir: Directory to write.
        quant_mode: Whether the model is a graph (``fx_graph_mode``).
        compressed: Whether weights are packed codes instead of quantized values.
        reorder: How packed 4-bit codes lie in a word; see ``JsonExporterConfig.pack_method``.
        overwrite: Whether an existing directory may be replaced.

    Raises:
        TypeError: ``args`` is no tuple, or an option has a value of another type.
        ValueError: No directory is given, ``model_type`` is no name of a file, the model is not
            quantized or not frozen, its keys are quantized after rotary embedding, or a graph comes
            without ``args``.
        FileExistsError: The directory is in use.
    """
    from safetensors.torch import save_file

    check_types(bool, compressed=compressed, reorder=reorder, overwrite=overwrite)
    check_types(str, model_type=model_type)
    if export_dir is None:
        raise ValueError("Give export_dir, the directory to write.")
    if not model_type or Path(model_type).name != model_type:
        raise ValueError(f"model_type: expected the name of the files, got {model_type!r}.")
    if _is_graph_mode(quant_mode):
        if args is None:
            raise ValueError("args is missing: give an example of the arguments of the graph.")
        archive = graph_archive(model, args, kwargs)
        _write_archive(archive, Path(export_dir), f"{model_type}_quantized.pth", overwrite)
        return
    check_params(model)
    options = _options(compressed, reorder)
    fmt = make_format(model, None, options, "quark")
    tensors = {name: t.detach().cpu().contiguous() for name, t in collect(model, fmt).items()}
    described = _describe(model) | ({_ORDER: options.pack_method} if compressed else {})
    with fresh_directory(export_dir, overwrite, size_of(tensors)) as directory:
        save_file(tensors, directory / f"{model_type}.safetensors", metadata={"format": "pt"})
        write_json(directory / f"{model_type}.json", described)


def _write_archive(archive: bytes, folder: Path, name: str, overwrite: bool) -> None:
    """Write the archive of a graph; other outputs of this package in the directory stay.

    So ``export_onnx`` and ``save_params`` can write to one directory, one after the other.

    Raises:
        FileExistsError: The directory is in use by other files, or has an archive of this name.
    """
    stays = folder.is_dir() and not overwrite and not (folder / name).exists()
    with fresh_directory(folder, overwrite or stays, len(archive)) as directory:
        if stays:
            ignored = shutil.ignore_patterns(DIGESTS)  # they are written again, with the archive
            shutil.copytree(folder, directory, ignore=ignored, dirs_exist_ok=True)
        (directory / name).write_bytes(archive)


def _is_graph_mode(quant_mode: QuantizationMode | str) -> bool:
    mode = member(QuantizationMode, quant_mode, "quant_mode")
    return mode is QuantizationMode.fx_graph_mode


def check_params(model: nn.Module) -> None:
    """Check that ``save_params`` can write a model.

    Raises:
        ValueError: It is a graph, it is read in parts, or attention is quantized inside: keys after
            rotary embedding, or probabilities.
    """
    if residency_of(model) is not None:
        raise ValueError(
            "The model is read in parts, and these files need all of it in memory: write "
            "safetensors (hf_format), or leave params_save (--params_save) or max_memory "
            "(--max_memory) out."
        )
    if is_quantized_graph(model):
        raise ValueError(
            "The model is a graph: its operators have no place in these files. Use "
            "save_params(…, quant_mode=QuantizationMode.fx_graph_mode), export_safetensors, "
            "export_onnx or export_program."
        )
    if next(probability_quantizers(model), None) is not None:
        raise ValueError(
            "These files cannot tell that probabilities of attention are quantized: use "
            "ModelExporter, or quantize without softmax_quant_spec."
        )
    if attention_routes(model):
        raise ValueError(
            "These files cannot tell that queries or keys are quantized after rotary embedding: "
            "use ModelExporter, or quantize without query_quant_config and kv_cache_post_rope."
        )


def load_params(
    model: nn.Module | None = None,
    json_path: str | Path = "",
    safetensors_path: str | Path = "",
    pth_path: str | Path = "",
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
    check_digests: bool = False,
) -> nn.Module:
    """Fill a model with what ``save_params`` wrote, here or in an earlier version.

    Args:
        model: The float architecture, or None to build the causal language model that the JSON
            file describes.
        json_path: The JSON file.
        safetensors_path: The tensors.
        pth_path: The archive of a graph, with ``fx_graph_mode``; the other files are not needed.
        quant_mode: Whether to load a graph.
        compressed: As given to ``save_params``.
        reorder: As given to ``save_params``, for files of earlier versions; others record it.
        check_digests: Whether both files are first compared with the digests that were written
            with them.

    Raises:
        TypeError: An option has a value of another type.
        ValueError: A file has changed, is damaged or does not fit the model, an archive has
            contents that could run code, or ``pth_path`` does not go with ``quant_mode``.
        FileNotFoundError: A file, or its digest, is missing.
    """
    check_types(bool, compressed=compressed, reorder=reorder, check_digests=check_digests)
    if _is_graph_mode(quant_mode):
        return _load_graph(model, pth_path, check_digests)
    if pth_path:
        raise ValueError(
            f"pth_path={str(pth_path)!r}: with quant_mode=fx_graph_mode, archives of graphs are "
            "loaded; pickled models can run code when they are loaded. Give "
            f"json_path and safetensors_path, or import a directory with {NATIVE}."
        )
    if check_digests:
        check_params_unchanged(json_path, safetensors_path)
    described = read_json(json_path)
    if not isinstance(described, dict) or not isinstance(described.get("structure"), dict):
        raise ValueError(f"{json_path} does not describe a model: give what save_params wrote.")
    path = Path(safetensors_path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    reader = CheckpointReader(path.parent, path.name)
    config = _described_config(described, reader)
    options = _options(compressed, reorder)
    if _ORDER in described:
        options = replace(options, pack_method=described[_ORDER])
    fmt = get_format("quark", config, options)
    if model is None:
        model = _build(described.get("config"), reader, Path(json_path))
    with reading(path):
        return load(model, fmt, reader)


def _load_graph(model: nn.Module | None, path: str | Path, check_digests: bool) -> nn.Module:
    if not path or model is not None:
        raise ValueError("Of a graph, give pth_path alone: its archive holds the whole model.")
    if check_digests:
        check_unchanged(Path(path))
    return load_graph_archive(Path(path))


def check_params_unchanged(json_path: str | Path, safetensors_path: str | Path) -> None:
    """Check that the files of ``save_params`` are what was written.

    Raises:
        FileNotFoundError: A file, or its digest, is missing.
        ValueError: A file has changed.
    """
    for path in (Path(json_path), Path(safetensors_path)):
        check_unchanged(path)


def _options(compressed: bool, reorder: bool) -> JsonExporterConfig:
    return JsonExporterConfig(
        weight_format="real_quantized" if compressed else "fake_quantized",
        pack_method="reorder" if reorder else "order",
    )


def _described_config(described: Mapping[str, Any], reader: CheckpointReader) -> Config:
    """Return the configuration of the layers that a JSON file describes.

    Raises:
        ValueError: A rotation, factors or a branch are not stored.
    """
    leaves = dict(_leaves(described["structure"]))
    layers = {literal(name): _layer_config(leaf) for name, leaf in leaves.items()}
    config = Config(
        layer_quant_config={n: c for n, c in layers.items() if not c.is_empty},
        version=described.get("version", OLDEST),
    )
    rotations = _stored_parts("input_rotation", leaves, reader)
    prescales = _stored_parts(PRESCALE, leaves, reader)
    branches = _stored_parts(LOW_RANK[0], leaves, reader)
    config = with_rotations(config, rotations, prescaled=prescales, divided=branches)
    return with_low_rank(config, {name: len(down) for name, down in branches.items()})


def _stored_parts(
    part: str, leaves: Mapping[str, dict[str, Any]], reader: CheckpointReader
) -> dict[str, torch.Tensor]:
    """Return a tensor of each layer that has it, without values, by name of the layer.

    Raises:
        ValueError: One is not stored.
    """
    parts: dict[str, torch.Tensor] = {}
    for name, leaf in leaves.items():
        if part in leaf:
            stored = reader.entries.get(f"{name}.{part}")
            if stored is None:
                raise ValueError(f"{name}.{part} is not stored: the two files differ.")
            parts[name] = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    return parts


def _build(config: Any, reader: CheckpointReader, path: Path) -> nn.Module:
    """Return the architecture that the JSON file describes, on the meta device.

    Raises:
        ValueError: It describes none, or one that does not go with the tensors.
    """
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError("The JSON file names no architecture: pass the model to fill.")
    return empty_model(made_config(config, path), reader.entries, path)


def _describe(model: nn.Module) -> dict[str, Any]:
    """Return the contents of the JSON file, without the order of packed codes."""
    config: Any = getattr(model, "config", None)
    return {
        "version": __version__,
        "config": config.to_dict() if hasattr(config, "to_dict") else {},
        "structure": _structure(model),
    }


def _structure(model: nn.Module) -> dict[str, Any]:
    """Return the tree of modules, with the tensors and specifications of each leaf."""
    tree: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = {n for n, t in module._parameters.items() if t is not None}
        if not name or not own:
            continue
        leaf = {"name": name, "type": type(module).__name__}
        own |= {"input_rotation"} if module._buffers.get("input_rotation") is not None else set()
        leaf |= {n: f"{name}.{n}" for n in sorted(own)}
        for tensor, key in _SPEC_KEYS.items():
            state = module.quantized_tensor(tensor) if isinstance(module, QuantizedLayer) else None
            if state is not None:
                leaf[key] = state.spec.to_dict()
        branch = tree
        for part in name.split("."):
            branch = branch.setdefault(part, {})
        branch.update(leaf)
    return tree


def _leaves(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(tree.get("name"), str):
        yield tree["name"], tree
    for branch in tree.values():
        if isinstance(branch, dict) and "dtype" not in branch:
            yield from _leaves(branch)


def _layer_config(leaf: dict[str, Any]) -> QuantizationConfig:
    specs = {t: leaf.get(key) for t, key in _SPEC_KEYS.items()}
    return QuantizationConfig.from_dict(specs)
