"""Import of quantized models: packed, or dequantized."""

from __future__ import annotations

import logging
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.digests import check_unchanged
from quark.torch.export.checkpoint.config_json import CONFIG, keep_notes, read_config_json
from quark.torch.export.checkpoint.files import CheckpointReader, NativeReader
from quark.torch.export.checkpoint.graphs import GRAPH, build_for_load, check_edges
from quark.torch.export.checkpoint.headers import NATIVE
from quark.torch.export.checkpoint.reader import Reader, load
from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.recognition import (
    load_in_float,
    open_checkpoint,
    reading,
    recognize_format,
)
from quark.torch.quantization.config.value_types import check_types
from quark.torch.quantization.nn.runtime import check_runtime, set_runtime

logger = logging.getLogger(__name__)


class ModelImporter:
    """Reads what ``ModelExporter`` wrote, here or in an earlier version.

    Args:
        model_info_dir: Directory of the checkpoint.
        saved_format: "safetensors", or "quark_format" for the native format, with safetensors
            where there is no native file.
        multi_device: Accepted for compatibility.
        check_digests: Whether files are first compared with the digests that were written with
            them.
        runtime: How packed layers compute; see ``set_runtime``.

    Raises:
        FileNotFoundError: ``model_info_dir`` is not a directory.
        ValueError: ``saved_format`` or ``runtime`` is unknown.
    """

    def __init__(
        self,
        model_info_dir: str | Path,
        saved_format: str = "quark_format",
        multi_device: bool = False,
        check_digests: bool = False,
        runtime: str = "exact",
    ) -> None:
        check_types(bool, check_digests=check_digests)
        _check_directory(model_info_dir, "model_info_dir")
        check_runtime(runtime)
        if saved_format not in ("quark_format", "safetensors", "hf_format"):
            raise ValueError(
                f"saved_format={saved_format!r} is unknown: give safetensors or quark_format."
            )
        self.model_info_dir = Path(model_info_dir)
        self.saved_format = saved_format
        self.check_digests = check_digests
        self.runtime = runtime
        if not self.model_info_dir.is_dir():
            raise FileNotFoundError(
                f"{self.model_info_dir} is not a directory: give that of a checkpoint."
            )

    def import_model_info(self, model: nn.Module) -> nn.Module:
        """Fill the architecture ``model`` in place with the checkpoint and return it.

        A graph is not changed: the quantized graph is another one.

        Args:
            model: A float model; for the checkpoint of a graph, the exported float graph, with its
                values. Of other models, only its structure matters; on the meta device it costs no
                memory. Where parameters are on a device, they stay there.

        Raises:
            FileNotFoundError: A file, or its digest, is missing.
            ValueError: A file is damaged, the configuration is not understood, or tensors do not
                fit the model. The model is then as it was.
        """
        if self.check_digests:
            check_unchanged(self.model_info_dir)
        config = read_config_json(self.model_info_dir)
        fmt = recognize_format(config, str(self.model_info_dir / CONFIG))
        native = self.saved_format == "quark_format" and (self.model_info_dir / NATIVE).is_file()
        with reading(self.model_info_dir):
            reader = (NativeReader if native else CheckpointReader)(self.model_info_dir)
            if GRAPH in config:
                loaded = _load_graph(model, config[GRAPH], fmt, reader)
            else:
                loaded = load(model, fmt, reader)
            return set_runtime(keep_notes(loaded, config), self.runtime)


def _check_directory(directory: Any, name: str) -> None:
    if not isinstance(directory, (str, PathLike)):
        kind = "None" if directory is None else f"an object of {type(directory).__name__}"
        raise TypeError(
            f"{name}: expected the directory of a checkpoint, got {kind}. A model is another "
            "argument."
        )


def import_model_from_safetensors(
    model: nn.Module | None,
    model_dir: str | Path,
    multi_device: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str = "eager",
    device: str = "cuda",
    multi_gpu: str | bool | None = False,
    dequantize: bool = False,
    runtime: str = "exact",
) -> nn.Module:
    """Return a model with the checkpoint of ``model_dir``.

    Args:
        model: The float architecture, or None to build the causal language model that the
            config.json of the directory describes.
        model_dir: Directory of the checkpoint.
        multi_device: Accepted for compatibility.
        trust_remote_code: Passed to Transformers.
        attn_implementation: Passed to Transformers. ``from_pretrained`` of Transformers takes
            ``sdpa`` unless told otherwise, whose sums differ in the last bits.
        device: Where to put a model that is built here; the CPU if there is no GPU.
        multi_gpu: No effect, which a warning says: the model lies on one device.
        dequantize: Whether to return a float model with the dequantized values, to quantize it in
            another scheme.
        runtime: How packed layers compute; see ``set_runtime``.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, says what is not understood, or does not fit the model; or
            both ``model`` and ``dequantize`` are given; or ``runtime`` is unknown.
    """
    check_types(bool, trust_remote_code=trust_remote_code, dequantize=dequantize)
    _check_directory(model_dir, "model_dir")
    check_runtime(runtime)
    if multi_gpu:
        logger.warning(
            "multi_gpu=%r has no effect: the model lies on one device. from_pretrained(%r, "
            "device_map='auto') of Transformers spreads it over several.",
            *(multi_gpu, str(model_dir)),
        )
    if model is not None and dequantize:
        raise ValueError("dequantize=True builds the model itself: give None for model.")
    if model is not None:
        importer = ModelImporter(model_dir, "safetensors", runtime=runtime)
        return importer.import_model_info(model)
    if device.startswith("cuda") and not torch.cuda.is_available():
        device = "cpu"
    options: dict[str, Any] = {"attn_implementation": attn_implementation}
    if dequantize:
        options["trust_remote_code"] = trust_remote_code
        return load_in_float(model_dir, **options).to(device)
    loaded = open_checkpoint(model_dir, trust_remote_code, **options).fill().to(device)
    return set_runtime(loaded, runtime)


def _load_graph(model: nn.Module, section: Any, fmt: ExportFormat, reader: Reader) -> nn.Module:
    """Return a quantized graph with the tensors of a checkpoint.

    Args:
        model: The float graph. It is not changed.
        section: Section "graph" of ``config.json``.
        fmt: Format of the checkpoint.
        reader: Its tensors.

    Raises:
        ValueError: The graph is another one, or tensors are missing, unexpected, or of the wrong
            shape or type.
    """
    graph = build_for_load(model, section, reader.entries)
    config = graph.quant_config
    load(graph, fmt, reader)
    check_edges(graph)
    graph.quant_config = config
    return graph
